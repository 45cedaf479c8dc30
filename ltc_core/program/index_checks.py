"""Checks of indices before a compiled subgraph is launched.

Eager raises IndexError. Compiled loops on the CPU check indices inside of their threads, where an exception ends the
process. So `find_bounds` traces index operands back to inputs of the graph, and `in_bounds` checks the inputs before a
launch. If an index is illegal, the subgraph runs op by op, and the op at fault raises its own error. An op is not
compiled if its indices are computed in the graph by ops that may leave the range. Called by `partition` and
`compiled_subgraph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ltc_core.graph.ir import Graph, Node, TensorMeta, Write, references
from ltc_core.graph.lens import apply_lens

__all__ = ["INDEXED_OPS", "Bound", "checks_of", "find_bounds", "in_bounds", "is_in_bounds"]

aten = torch.ops.aten


class Bound(NamedTuple):
    """Legal values of an input: `low` to `high`, and `also_legal`. `value` is the number of the input."""

    value: int
    low: int
    high: int
    also_legal: int | None = None


Metas = dict[int, TensorMeta]
# Arguments of an op -> for each that has indices: the value, low, high, also_legal (as in `Bound`).
Find = Callable[[Sequence[Any], Metas], Iterator[tuple[Any, int, int, int | None]]]


def _rows(table: int, index: int) -> Find:
    """The operand `index` indexes dim 0 of the operand `table`."""

    def find(args: Sequence[Any], metas: Metas) -> Iterator[Any]:
        yield args[index], 0, _size(args[table], metas)[0] - 1, None

    return find


def _given(index: int, count: int) -> Find:
    """The operand `index` is below the argument `count`."""

    def find(args: Sequence[Any], metas: Metas) -> Iterator[Any]:
        yield args[index], 0, args[count] - 1, None

    return find


def _along(args: Sequence[Any], metas: Metas) -> Iterator[Any]:
    """(self, dim, index, ...): `index` indexes `dim` of `self`."""
    size = _size(args[0], metas)
    yield args[2], 0, (size[args[1]] if size else 1) - 1, None


def _fancy(args: Sequence[Any], metas: Metas) -> Iterator[Any]:
    """(self, indices, ...): an index tensor or None for each dim; a mask of k dims stands for k dims, maybe none."""
    size = _size(args[0], metas)
    dim = 0
    for index in args[1]:
        if index is not None and metas[index].dtype in (torch.bool, torch.uint8):
            dim += len(_size(index, metas))
            continue
        if index is not None:
            yield index, -size[dim], size[dim] - 1, None
        dim += 1


def _flat(args: Sequence[Any], metas: Metas) -> Iterator[Any]:
    """(self, index, ...): `index` indexes the flattened `self`."""
    n = _size(args[0], metas).numel()
    yield args[1], -n, n - 1, None


def _classes(scores: int, target: int, ignored: int) -> Find:
    """The operand `target` indexes dim 1 of `scores` (dim 0 of a vector); the argument `ignored` is legal too."""

    def find(args: Sequence[Any], metas: Metas) -> Iterator[Any]:
        size = _size(args[scores], metas)
        yield args[target], 0, size[1 if len(size) > 1 else 0] - 1, args[ignored]

    return find


def _size(operand: Any, metas: Metas) -> torch.Size:
    return operand.size if type(operand) is _Part else metas[operand].size


class _Part(int):
    """A value that an op sees through a lens, as a tensor of `size`."""

    size: torch.Size


_INDEXED: dict[str, Find] = {
    "embedding": _rows(0, 1),
    "embedding_dense_backward": _given(1, 2),
    "gather": _along,
    "index": _fancy,
    "index_add": _along,
    "index_copy": _along,
    "index_fill": _along,
    "index_put": _fancy,
    "index_reduce": _along,
    "index_select": _along,
    "nll_loss2d_backward": _classes(1, 2, 5),
    "nll_loss2d_forward": _classes(0, 1, 4),
    "nll_loss_backward": _classes(1, 2, 5),
    "nll_loss_forward": _classes(0, 1, 4),
    "put": _flat,
    "scatter": _along,
    "scatter_add": _along,
    "scatter_reduce": _along,
    "take": _flat,
    "_index_put_impl": _fancy,
    "_unsafe_index": _fancy,
    "_unsafe_index_put": _fancy,
}
INDEXED_OPS = frozenset(_INDEXED)
_SAME_VALUES = frozenset({"_to_copy", "alias", "clone", "lift_fresh", "_unsafe_view"})
# Ops with a result that indexes a dim of their first operand -> the position of that result.
_RETURN_INDICES = {"argmax": 0, "argmin": 0, "argsort": 0, "max": 1, "min": 1, "sort": 1, "topk": 1}


def find_bounds(graph: Graph, has_draws: bool = False) -> tuple[list[Bound], set[int]]:
    """Bounds of inputs, and positions of the nodes whose indices cannot be traced to inputs.

    Args:
        has_draws: whether the compiled program draws random numbers itself; else what is drawn is an input of it.
    """
    metas = graph.metas()
    maker = {node.first + i: node for node in graph.nodes for i in range(len(node.outs))}
    bounds: dict[Bound, None] = {}
    unknown = set()
    for at, node in enumerate(graph.nodes):
        for index, low, high, also_legal in checks_of(node, metas):
            source = _source(index, maker, metas, high, has_draws)
            if source is None:
                unknown.add(at)
            elif source >= 0:
                bounds[Bound(source, low, high, also_legal)] = None
    return list(bounds), unknown


def checks_of(node: Node, metas: Metas) -> list[Bound]:
    """Legal values of the index operands of a node."""
    find = _INDEXED.get(node.op._opname.rstrip("_"))
    if find is None:
        return []
    found = find([_read(node, a, metas) for a in node.args], metas)
    return [Bound(*row) for row in found if metas[row[0]].dtype is not torch.bool]


def _read(node: Node, item: Any, metas: Metas) -> Any:
    """An argument; for an operand that is written, its old value with the size of the part that the op sees."""
    if type(item) in (list, tuple):  # a mask may be written where it says: `m[m] = False`
        return [_read(node, each, metas) for each in item]
    if type(item) is not Write:
        return item
    value = _Part(node.writes[item.base])
    whole = metas[value]
    value.size = apply_lens(whole.meta_tensor(), item.lens).shape if item.lens else whole.size
    return value


def _source(
    value: int, maker: dict[int, Node], metas: Metas, high: int, has_draws: bool
) -> int | None:
    """Input that an index comes from; -1 if the index is always in range, None if it cannot be traced."""
    while value in maker:
        node = maker[value]
        name = node.op._opname
        if "generator" in node.kwargs:
            return None if has_draws else value
        if node.view or name in _SAME_VALUES:
            value = references(node)[0]
        elif name == "arange":
            return -1 if _arange_fits(node, high) else None
        elif value - node.first == _RETURN_INDICES.get(name):
            return -1 if _num_indexed(node, name, metas) <= high + 1 else None
        else:
            return None
    return value


def _num_indexed(node: Node, name: str, metas: Metas) -> int:
    """Number of elements that the indices returned by an op count; at most that of the largest dim."""
    size = metas[references(node)[0]].size
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return size.numel() if name in ("argmax", "argmin") and dim is None else max(size, default=1)


def _arange_fits(node: Node, high: int) -> bool:
    meta = node.outs[0]
    assert meta is not None
    if not all(type(a) is int for a in node.args):
        return False
    start = node.args[0] if len(node.args) > 1 else 0
    step = node.args[2] if len(node.args) > 2 else 1
    ends = (start, start + (meta.numel - 1) * step)
    return min(ends) >= 0 and max(ends) <= high


def in_bounds(bounds: Sequence[Bound], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether all indices are legal. Cost: one pass over each input; 10 us for a batch of labels."""
    return all(is_in_bounds(bound, inputs[bound.value]) for bound in bounds)


def is_in_bounds(bound: Bound, t: torch.Tensor) -> bool:
    """Whether all elements of an input are legal."""
    if not t.numel():
        return True
    least, greatest = (v.item() for v in t.aminmax())  # nan is possible: floats before `.long()`
    if least >= bound.low and greatest <= bound.high:
        return True
    if bound.also_legal is None:
        return False
    return bool(((t == bound.also_legal) | ((t >= bound.low) & (t <= bound.high))).all())
