"""A graph as text or as a drawing in the DOT language; the trie of recorded programs as a drawing."""

from __future__ import annotations

from collections.abc import Iterable

from ltc_core.graph.ir import Graph, references
from ltc_core.record.trace import Step

__all__ = ["FORMATS", "graph_text", "trie_text"]

FORMATS = ("text", "backend", "dot")


def graph_text(graph: Graph, fmt: str = "text", lines: bool = False) -> str:
    """Write a graph in one of `FORMATS`.

    Raises:
        RuntimeError: "Unrecognized IR format: ..." for another format, as torch._lazy does.
    """
    if fmt in ("text", "backend"):
        return graph.text(lines=lines)
    if fmt == "dot":
        return _dot(graph, lines)
    raise RuntimeError(f"Unrecognized IR format: {fmt}; one of {', '.join(FORMATS)}")


def _dot(graph: Graph, lines: bool) -> str:
    rows = ["digraph G {"]
    maker: dict[int, str] = {}
    for i, meta in graph.inputs.items():
        maker[i] = f"input{i}"
        rows.append(f'  input{i} [shape=box, label="%{i} input\\n{meta}"];')
    for k, node in enumerate(graph.nodes):
        name = f"node{k}"
        metas = ", ".join(str(m) for m in node.outs if m is not None)
        line = f"\\n{node.line}" if lines and node.line else ""
        rows.append(f'  {name} [label="{node.op}\\n{metas}{_escape(line)}"];')
        rows += [f"  {maker[i]} -> {name};" for i in dict.fromkeys(references(node))]
        for i in range(len(node.outs)):
            maker[node.first + i] = name
    for i in graph.outputs:
        rows.append(f'  out{i} [shape=box, label="output %{i}"];')
        rows.append(f"  {maker[i]} -> out{i};")
    rows.append("}")
    return "\n".join(rows)


def trie_text(roots: Iterable[Step]) -> str:
    """The trie as a drawing: a node for each op, with a double border where a program ends."""
    rows = ["digraph recorded {"]
    numbers: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        step = waiting.pop()
        number = numbers[id(step)] = len(numbers)
        label = "start" if step.node is None else _escape(str(step.node.op))
        rows.append(f'  step{number} [label="{label}", peripheries={1 + bool(step.programs)}];')
        if step.parent is not None:
            rows.append(f"  step{numbers[id(step.parent)]} -> step{number};")
        waiting += (step.children or {}).values()
        waiting += [step.next] if step.next is not None else []
    return "\n".join([*rows, "}"])


def _escape(text: str) -> str:
    return text.replace('"', '\\"')
