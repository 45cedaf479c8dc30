"""The outputs that are left after an op of a graph failed, or after an input was lost.

Outputs that do not depend on the failure are computed op by op. State (an output that writes made from an input of the
graph) keeps the version that it had when the op failed, as in eager at the line that raises. Called by the programs
that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ltc_core.graph import collective
from ltc_core.graph.ir import Node, references
from ltc_core.graph.passes import prune
from ltc_core.program.failure import Cause, Salvaged

__all__ = ["salvage"]


def salvage(
    origins: Mapping[int, tuple[int, ...]],
    inputs: Collection[int],
    values: Mapping[int, Any],
    rest: Sequence[Node],
    failed: Collection[int],
    run: Callable[[Node, dict[int, Any]], None],
) -> Salvaged:
    """Compute the outputs that do not depend on a failure, and find the newest version of the others.

    Args:
        origins: output -> its earlier versions, newest first (`graph.passes.origins`).
        inputs: the inputs of the graph.
        values: number -> data, of the values at the failure; never overwritten.
        rest: the nodes that have not run, in order.
        failed: the first value of each failed node in `rest`.
        run: runs a node on values and adds its results to them; it overwrites copies only.

    Cost: an op-by-op run of the nodes that the outputs still need.
    """
    state = {o for o, chain in origins.items() if chain and chain[-1] in inputs}
    wanted = [o for o in origins if o not in values and o not in state]
    roots = {(o, *origins[o])[-1] for o in wanted}
    # The state of a generator advances with each draw that is computed here; a draw that fails leaves it unchanged.
    drawn = {n.first_write + n.kwargs["generator"].base for n in rest if "generator" in n.kwargs}
    states = {v for o in drawn.intersection(origins) for v in (o, *origins[o])}
    computed, causes = _computed(
        values, prune(rest, wanted), {*wanted, *roots, *states}, failed, run
    )
    found = Salvaged({})
    older = set()
    for output, chain in origins.items():
        there = computed if output in drawn else values
        versions = [v for v in (output, *chain) if there.get(v) is not None]
        if output not in state and computed.get(output) is not None:
            found.data[output] = computed[output]
        elif versions:
            found.data[output] = there[versions[0]]
            older.update({output} - {versions[0]} - drawn)
        elif chain and computed.get(chain[-1]) is not None:  # its first version, such as zeros
            found.data[output] = computed[chain[-1]]
            older.add(output)
        else:
            cause = causes.get(output)
            if cause is not None:
                found.causes[output] = cause
    found.older = frozenset(older)
    return found


def _computed(
    values: Mapping[int, Any],
    nodes: Sequence[Node],
    kept: Collection[int],
    failed: Collection[int],
    run: Callable[[Node, dict[int, Any]], None],
) -> tuple[dict[int, Any], dict[int, Cause | None]]:
    """`values` with the results of the nodes; for each lost value its earliest cause, None for the first failure."""
    now = dict(values)
    causes: dict[int, Cause | None] = {}
    first = min(failed, default=-1)
    last_read = {value: at for at, node in enumerate(nodes) for value in references(node)}
    for at, node in enumerate(nodes):
        lost = [value for value in references(node) if now.get(value) is None]
        found = [causes.get(value) for value in lost]
        # Subgraphs do not run in recorded order. The cause is the failure that eager would have raised first.
        cause = min(found, key=lambda c: c[0].first if c else first, default=None)
        # No collectives after the failure: the other processes do not run them with this one.
        if not lost and node.first not in failed and node.op not in collective.OPS:
            try:
                run(node, now)
            except Exception as error:
                cause = (node, error)
            else:
                for value in references(node):
                    if last_read[value] == at and value not in kept:
                        now.pop(value, None)
                continue
        for value in range(node.first, node.first + len(node.outs)):
            now.pop(value, None)
            causes[value] = cause
    return now, causes
