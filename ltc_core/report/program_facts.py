"""The facts of a program that a report shows: its nodes, their modules and lines, their work, and memory over a run.

In: a graph. Out: a dict for JSON, in which texts and types are numbers in tables. Called by `recording` when a program
is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, Write, references
from ltc_core.program.plan import MemoryPlan, plan
from ltc_core.report.work import bytes_of, flops_of

__all__ = ["program_facts"]

_IN_BACKWARD = ", in backward"
_LONGEST_TEXT = 200
_MOST_HOLDERS = 200
_MOST_POINTS = 500  # of the curve of memory


class _Table:
    """Texts, each once; a text stands for its position."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.rows.setdefault(text, len(self.rows))


def program_facts(graph: Graph) -> dict[str, Any]:
    """What a report shows of a graph. Cost: about 20 us a node."""
    metas = graph.metas()
    names, lines, modules, types, constants = (_Table() for _ in range(5))
    origins = [graph.nodes[at] for at in forward_nodes(graph.nodes)]
    nodes = [
        [
            names(node.op._schema.name.removeprefix("aten::")),
            lines(origin.line.removesuffix(_IN_BACKWARD)),
            modules(origin.module),
            int(node.line.endswith(_IN_BACKWARD)),
            node.first,
            [types(str(meta)) if meta is not None else -1 for meta in node.outs],
            list(dict.fromkeys(references(node))),
            constants(_constants(node)),
            flops_of(node, metas),
            bytes_of(node, metas),
            int(node.view),
        ]
        for node, origin in zip(graph.nodes, origins, strict=True)
    ]
    return {
        "inputs": [
            [value, types(str(meta)), int(value in graph.donated)]
            for value, meta in graph.inputs.items()
        ],
        "outputs": list(graph.outputs),
        "nodes": nodes,
        "names": list(names.rows),
        "lines": list(lines.rows),
        "modules": list(modules.rows),
        "types": list(types.rows),
        "constants": list(constants.rows),
        "memory": _memory(graph, metas, plan(graph)),
    }


def _constants(node: Node) -> str:
    """The arguments of a node that are neither tensors nor numbers that may change."""
    found = [_text(item) for item in node.args if _is_constant(item)]
    found += [f"{name}={_text(item)}" for name, item in node.kwargs.items() if _is_constant(item)]
    return ", ".join(found)[:_LONGEST_TEXT]


def _text(item: Any) -> str:
    return str(list(item) if isinstance(item, tuple) else item)


def _is_constant(item: Any) -> bool:
    return not any(isinstance(leaf, Ref | Write | Scalar) for leaf in leaves(item))


# -- backward --------------------------------------------------------------------------------------


def forward_nodes(nodes: Sequence[Node]) -> list[int]:
    """For each node of backward the position of the forward node that it belongs to; for another node its own.

    Backward runs outside of the modules' calls, and all of it at one line. A node of it belongs to the forward node
    with which it shares most values. Of several, that one counts which it is the backward of by its name, else the last
    one. If it shares none, it belongs to that of the node before it.
    """
    users: dict[int, list[int]] = {}  # value -> the forward nodes that read or make it
    found: list[int] = []
    for at, node in enumerate(nodes):
        if not node.line.endswith(_IN_BACKWARD):
            found.append(at)
            for value in {*references(node), *range(node.first, node.first + len(node.outs))}:
                users.setdefault(value, []).append(at)
            continue
        shared = Counter(at for value in set(references(node)) for at in users.get(value, ()))
        if shared:
            name = node.op._opname
            found.append(
                max(shared, key=lambda at: (shared[at], _is_backward_of(name, nodes[at]), at))
            )
        else:
            is_after_backward = at > 0 and nodes[at - 1].line.endswith(_IN_BACKWARD)
            found.append(found[-1] if is_after_backward else at)
    return found


# Ops of backward that are not named after the op of forward.
_OTHER_NAMES = {"threshold": "relu", "mm": "addmm", "bmm": "baddbmm"}


def _is_backward_of(name: str, forward: Node) -> bool:
    stem = name.partition("_backward")[0]
    return forward.op._opname.startswith((stem, _OTHER_NAMES.get(stem, stem)))


# -- memory ----------------------------------------------------------------------------------------


def _memory(graph: Graph, metas: Mapping[int, TensorMeta], memory: MemoryPlan) -> dict[str, Any]:
    """Bytes that are held after each node, and who holds them where it is most.

    Views and values that overwrite another one hold nothing of their own.
    """
    owner = {value: value for value in graph.inputs}
    held = {value: meta.nbytes for value, meta in graph.inputs.items()}
    uses = Counter(graph.inputs.keys())
    kept = set(graph.inputs) - graph.donated
    outputs = set(graph.outputs)
    now = peak = sum(held.values())
    inputs_bytes = now
    peak_at, holders = -1, dict(held)
    curve = []
    for at, node in enumerate(graph.nodes):
        reads = references(node)
        for i, meta in enumerate(node.outs):
            value = node.first + i
            write = i - (len(node.outs) - len(node.writes))
            if node.view and reads:
                owner[value] = owner[reads[0]]
            elif write >= 0 and memory.in_place[at][write]:
                owner[value] = owner[node.writes[write]]
            elif meta is not None:
                owner[value] = value
                held[value] = meta.nbytes
                now += meta.nbytes
            else:
                continue
            uses[owner[value]] += 1
        curve.append(now)
        if now > peak:
            peak, peak_at, holders = now, at, dict(held)
        for value in memory.frees[at]:
            root = owner.get(value)
            if root is None:
                continue
            uses[root] -= 1
            if not uses[root] and root not in kept and root not in outputs:
                now -= held.pop(root, 0)
    ranked = sorted(holders.items(), key=lambda item: -item[1])[:_MOST_HOLDERS]
    step = max(1, -(-len(curve) // _MOST_POINTS))
    return {
        "peak": peak,
        "at": peak_at,
        "inputs": inputs_bytes,
        "curve": [max(curve[k : k + step]) for k in range(0, len(curve), step)],
        "holders": [[value, size] for value, size in ranked],
        "others": sum(holders.values()) - sum(size for _, size in ranked),
    }
