"""What is left of a graph when an op of it fails, or an input of it is lost.

Outputs that do not depend on the failure are computed op by op. State, an output that descends by writes from an input
of the graph, keeps the version it had when the op failed, as eager leaves it at the line that raises. Used by
`reference` and `partitioned_program`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ltc_core.executors.base import Cause, Remains
from ltc_core.graph import collective
from ltc_core.graph.ir import Node, references
from ltc_core.graph.passes import prune

__all__ = ["remains"]


def remains(
    origins: Mapping[int, tuple[int, ...]],
    inputs: Collection[int],
    values: Mapping[int, Any],
    rest: Sequence[Node],
    failed: Collection[int],
    run: Callable[[Node, dict[int, Any]], None],
) -> Remains:
    """Compute what a failure left, and find the newest version of the other outputs.

    Args:
        origins: output -> its earlier versions, newest first (`passes.origins`).
        inputs: the inputs of the graph.
        values: what there is; nothing of it is written.
        rest: the nodes that have not run, in order.
        failed: the first values of those among `rest` that failed.
        run: runs a node on values, and puts its results there; writes in copies only.

    Cost: an op-by-op run of the nodes that the outputs still need.
    """
    state = {o for o, chain in origins.items() if chain and chain[-1] in inputs}
    wanted = [o for o in origins if o not in values and o not in state]
    roots = {(o, *origins[o])[-1] for o in wanted}
    # The state of a generator is not a tensor of the program: it goes on with each draw that is computed, and what
    # failed to draw has left it as it was.
    drawn = {n.first_write + n.kwargs["generator"].base for n in rest if "generator" in n.kwargs}
    states = {v for o in drawn.intersection(origins) for v in (o, *origins[o])}
    computed, causes = _computed(
        values, prune(rest, wanted), {*wanted, *roots, *states}, failed, run
    )
    found = Remains({}, frozenset(), {})
    older = set()
    for output, chain in origins.items():
        there = computed if output in drawn else values
        versions = [v for v in (output, *chain) if there.get(v) is not None]
        if output not in state and computed.get(output) is not None:
            found.data[output] = computed[output]
        elif versions:
            found.data[output] = there[versions[0]]
            older.update({output} - {versions[0]} - drawn)
        elif chain and computed.get(chain[-1]) is not None:  # such as an optimizer's zeros
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
    """`values` and what the nodes add to them; for each value that is lost the earliest cause, None for the first."""
    now = dict(values)
    causes: dict[int, Cause | None] = {}
    first = min(failed, default=-1)
    last_read = {value: at for at, node in enumerate(nodes) for value in references(node)}
    for at, node in enumerate(nodes):
        lost = [value for value in references(node) if now.get(value) is None]
        found = [causes.get(value) for value in lost]
        # Subgraphs do not run in the order of the program, but eager would have raised in that order.
        cause = min(found, key=lambda c: c[0].first if c else first, default=None)
        # Other processes do not run a collective that this one was to start after the failure.
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
