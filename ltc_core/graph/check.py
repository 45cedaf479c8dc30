"""The rules of a well-formed graph.

The recorder and the passes must keep them; the executors rely on them without a check. `runtime.program_cache` calls
`check` on every graph in tests, with LTC_CHECK_GRAPHS, and if LTC_DEBUG asks for reports.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ltc_core.errors import GraphError
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, Write
from ltc_core.graph.lens import Lens, apply_lens

__all__ = ["check"]


def check(graph: Graph) -> None:
    """Raise if a graph breaks a rule.

    1. A value is defined once: as an input, or by a node. The numbers of the values increase in the order of the nodes.
    2. A node reads only values that are defined before it. Positions of scalars are not negative.
    3. The arguments of a node name each of its writes. Two writes may have the same old value: its memory is copied.
    4. The new value of a write has the meta of the old value: size, strides, offset and dtype. In a graph of dynamic
       shapes, where each meta is that of some call, only the dtype.
    5. The lens of a write can be applied to the meta of the old value, unless shapes are dynamic.
    6. Outputs are defined, and each is listed once; donated values are inputs.
    7. Metas are interned, and `Node.result` names each result of the node once.
    8. The first argument of a view is a value, and a view writes nothing.

    Raises:
        GraphError: the rule and the node that breaks it.

    Cost: about 20 us a node.
    """
    metas = dict(graph.inputs)
    last = -1
    for node in graph.nodes:
        for why in _faults(graph, node, metas, last):
            raise _error(why, f"node {node}", node.line)
        last = node.first + len(node.outs) - 1
        metas.update((node.first + k, m) for k, m in enumerate(node.outs) if m is not None)
    for why in _faults_outside(graph, metas):
        raise _error(why, f"outputs {graph.outputs}, donated {sorted(graph.donated)}", "")


def _error(why: str, got: str, line: str) -> GraphError:
    return GraphError(
        f"a graph is not well formed: {why}",
        got=got,
        where=line,
        next="report this, with the program that recorded it",
    )


def _faults(graph: Graph, node: Node, metas: dict[int, TensorMeta], last: int) -> Iterator[str]:
    """Rules that a node breaks, given the values that are defined before it."""
    defined = range(node.first, node.first + len(node.outs))
    if node.first <= last:
        yield f"it numbers its results from {node.first} on, but {last} is given away"
    if taken := sorted(graph.inputs.keys() & set(defined)):
        yield f"it defines {taken}, which are inputs"
    items = list(leaves(node.args, *node.kwargs.values()))
    read = [*node.writes, *(int(i) for i in items if type(i) is Ref)]
    if unknown := [value for value in read if value not in metas]:
        yield f"it reads {unknown}, which are not defined before it"
        return
    if any(type(i) is Scalar and i < 0 for i in items):
        yield "it reads a scalar at a negative position"
    yield from _faults_of_writes(graph, node, metas, [i for i in items if type(i) is Write])
    yield from _faults_of_results(node)


def _faults_of_writes(
    graph: Graph, node: Node, metas: dict[int, TensorMeta], written: list[Write]
) -> Iterator[str]:
    if {w.base for w in written} != set(range(len(node.writes))):
        yield f"it has {len(node.writes)} writes, and operands {written} for them"
        return
    if len(node.writes) > len(node.outs):
        yield "it has fewer values than writes"
        return
    for old, new in zip(node.writes, node.outs[len(node.outs) - len(node.writes) :], strict=True):
        is_same = new is metas[old]
        if graph.dynamic:
            is_same = new is not None and new.dtype is metas[old].dtype
        if not is_same:
            yield f"it writes %{old}: {metas[old]!r}, which becomes {new!r}"
    for w in () if graph.dynamic else written:
        if why := _fault_of_lens(metas[node.writes[w.base]], w.lens):
            yield f"operand {w!r} is no part of {metas[node.writes[w.base]]}: {why}"


@functools.lru_cache(maxsize=4096)
def _fault_of_lens(meta: TensorMeta, lens: Lens) -> str:
    try:
        apply_lens(meta.meta_tensor(), lens)
    except Exception as error:  # whatever a view op raises for arguments that do not fit
        return f"{type(error).__name__}: {error}"
    return ""


def _faults_of_results(node: Node) -> Iterator[str]:
    for meta in node.outs:
        if (
            meta is not None
            and TensorMeta.of(meta.size, meta.stride, meta.offset, meta.dtype) is not meta
        ):
            yield f"the meta {meta!r} is not interned"
    count = len(node.outs) - len(node.writes)
    positions = [s for s in leaves(node.result) if type(s) is int]
    if sorted(positions) != list(range(count)):
        yield f"it has {count} results and returns {node.result!r}"
    if node.view and not (node.args and type(node.args[0]) is Ref and not node.writes):
        yield "it is a view of no value, or one that writes"


def _faults_outside(graph: Graph, metas: dict[int, TensorMeta]) -> Iterator[str]:
    if unknown := [value for value in graph.outputs if value not in metas]:
        yield f"outputs {unknown} are not defined"
    if len(set(graph.outputs)) < len(graph.outputs):
        yield "an output is there twice"
    if unknown := sorted(graph.donated - graph.inputs.keys()):
        yield f"donated values {unknown} are no inputs"
