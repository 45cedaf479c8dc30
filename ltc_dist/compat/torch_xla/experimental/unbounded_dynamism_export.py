"""`torch_xla.experimental.unbounded_dynamism_export`: passes over the graph of a program with free sizes.

`torch_xla.stablehlo` needs none of them here. They are for scripts that call them: each changes a graph module in
place, and its results stay the same. What a pass cannot change it leaves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ltc_dist.compat.torch_xla.experimental import xla_dynamic_reshape_ops  # noqa: F401 - its ops

__all__ = [
    "decompose_dynamic_native_group_norm",
    "decompose_dynamic_native_layer_norm",
    "decompose_dynamic_shape_select",
    "decompose_split_with_sizes",
    "dynamic_unsqueeze_to_view",
    "exported_program_has_symbolic_input_shape",
    "flatten_embedding_indices_tensor",
    "native_group_norm_impl",
    "native_layer_norm_impl",
    "process_exported_program_with_symbolic_input",
    "remove_no_op_slice",
    "replace_dynamic_expand_with_xla_op",
    "replace_dynamic_view_with_xla_op",
]

aten: Any = torch.ops.aten
_Call = Callable[..., Any]
_VIEWS = (aten.view.default, aten.reshape.default)
_LARGEST = torch.iinfo(torch.int64).max


# -- graphs --------------------------------------------------------------------------------------


def _insert(graph: Graph, op: _Call, *args: Any, **kwargs: Any) -> Any:
    """Insert a call, with its fake result."""
    node = graph.call_function(op, args, kwargs)
    values: Any = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = op(*values[0], **values[1])
    return node


def _of(gm: GraphModule, *ops: _Call) -> list[Any]:
    return [node for node in gm.graph.nodes if node.target in ops]


def _shape(node: Any) -> Sequence[Any]:
    """Sizes of a node's tensor; none if they are not known."""
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _free_dims(node: Any) -> list[int]:
    return [dim for dim, size in enumerate(_shape(node)) if not isinstance(size, int)]


def _sizes(graph: Graph, node: Node) -> list[Any]:
    """Sizes of a node's tensor: numbers, and nodes for the free ones."""
    return [
        size if isinstance(size, int) else _insert(graph, aten.sym_size.int, node, dim)
        for dim, size in enumerate(_shape(node))
    ]


def _replace(gm: GraphModule, node: Node, new: Node) -> None:
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


# -- passes --------------------------------------------------------------------------------------


def decompose_dynamic_shape_select(gm: GraphModule) -> None:
    """Make `aten.select` of a tensor with a free size a `slice` and a `view`; not along the free dimension."""
    for node in _of(gm, aten.select.int):
        x, dim, index = node.args
        dim %= len(_shape(x)) or 1
        if not _free_dims(x) or dim in _free_dims(x):
            continue
        index %= _shape(x)[dim]
        with gm.graph.inserting_before(node):
            part = _insert(gm.graph, aten.slice.Tensor, x, dim, index, index + 1, 1)
            sizes = _sizes(gm.graph, x)
            new = _insert(gm.graph, aten.view.default, part, sizes[:dim] + sizes[dim + 1 :])
        _replace(gm, node, new)


def decompose_split_with_sizes(gm: GraphModule) -> None:
    """Make the results of `aten.split_with_sizes` of a tensor with a free size slices; the call is left unused."""
    for node in _of(gm, aten.split_with_sizes.default):
        x, sizes, *rest = node.args
        dim = (rest[0] if rest else 0) % (len(_shape(x)) or 1)
        if not _free_dims(x) or dim in _free_dims(x):
            continue
        for user in list(node.users):
            begin = sum(sizes[: user.args[1]])
            with gm.graph.inserting_before(user):
                end = begin + sizes[user.args[1]]
                new = _insert(gm.graph, aten.slice.Tensor, x, dim, begin, end)
            _replace(gm, user, new)


def flatten_embedding_indices_tensor(gm: GraphModule) -> None:
    """Look up indices with a free size as a list of them, and give the result their shape."""
    for node in _of(gm, aten.embedding.default):
        weight, indices, *rest = node.args
        free = _free_dims(indices)
        if len(free) != 1 or len(_shape(indices)) == 1:
            continue
        with gm.graph.inserting_before(node):
            sizes = _sizes(gm.graph, indices)
            known = 1
            for size in sizes:
                known *= size if isinstance(size, int) else 1
            count = _insert(gm.graph, operator.mul, sizes[free[0]], known)
            flat = _insert(gm.graph, aten.reshape.default, indices, [count])
            found = _insert(gm.graph, aten.embedding.default, weight, flat, *rest)
            shape = [*sizes, _shape(weight)[-1]]
            new = _insert(gm.graph, aten.reshape.default, found, shape)
        _replace(gm, node, new)


def remove_no_op_slice(gm: GraphModule) -> None:
    """Remove slices that take all of a dimension."""
    for node in _of(gm, aten.slice.Tensor):
        begin, end, step = (*node.args[2:], None, None, None)[:3]
        if begin in (None, 0) and end in (None, _LARGEST) and step in (None, 1):
            _replace(gm, node, node.args[0])


def dynamic_unsqueeze_to_view(gm: GraphModule) -> None:
    """Make `aten.unsqueeze` of a tensor with a free size a `view`."""
    for node in _of(gm, aten.unsqueeze.default):
        x, dim = node.args
        if _free_dims(x):
            dim %= len(_shape(x)) + 1
            with gm.graph.inserting_before(node):
                sizes = _sizes(gm.graph, x)
                new = _insert(gm.graph, aten.view.default, x, [*sizes[:dim], 1, *sizes[dim:]])
            _replace(gm, node, new)


def replace_dynamic_expand_with_xla_op(gm: GraphModule) -> None:
    """Make `aten.expand` to one free size `xla.dynamic_expand`, which has the tensor of that size."""
    for node in _of(gm, aten.expand.default):
        found = _source_of(node.args[1])
        if found is not None and found[3] == 1:
            node.target = torch.ops.xla.dynamic_expand.default
            node.args = (*node.args[:2], *found[:3])


def replace_dynamic_view_with_xla_op(gm: GraphModule) -> None:
    """Make `aten.view` and `reshape` to a multiple of one free size `xla.dynamic_view`, which has its tensor."""
    for node in _of(gm, *_VIEWS):
        found = _source_of(node.args[1])
        if found is not None:
            node.target = torch.ops.xla.dynamic_view.default
            node.args = (*node.args[:2], *found)


def _source_of(sizes: Sequence[Any]) -> tuple[Node, int, int, int] | None:
    """Of sizes with one node among them: the tensor whose size it is, of which dim, its place, and the multiple."""
    nodes = [(at, size) for at, size in enumerate(sizes) if isinstance(size, Node)]
    if len(nodes) != 1:
        return None
    ((at, node),) = nodes
    times = 1
    if node.target is operator.mul:
        numbers = [arg for arg in node.args if isinstance(arg, int)]
        others = [arg for arg in node.args if isinstance(arg, Node)]
        if len(numbers) != 1 or len(others) != 1:
            return None
        times, node = numbers[0], others[0]
    if node.target is not aten.sym_size.int:
        return None
    tensor, dim = node.args
    assert isinstance(tensor, Node) and isinstance(dim, int)
    return tensor, dim, at, times


# -- norms ---------------------------------------------------------------------------------------


def native_layer_norm_impl(
    input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    """The first result of `aten.native_layer_norm`, of simple ops."""
    dims = list(range(-len(normalized_shape), 0))
    return _affine(_plainly, _normalized(_plainly, input, dims, eps), weight, bias)


def native_group_norm_impl(
    input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    """The first result of `aten.native_group_norm`, of simple ops."""
    found = _normalized(_plainly, input.reshape(N, group, -1), [-1], eps).reshape(input.shape)
    columns = [-1] + [1] * (input.dim() - 2)
    return _affine(
        _plainly,
        found,
        None if weight is None else weight.reshape(columns),
        None if bias is None else bias.reshape(columns),
    )


def _plainly(op: _Call, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _normalized(call: _Call, x: Any, dims: list[int], eps: float) -> Any:
    mean = call(aten.mean.dim, x, dims, True)
    variance = call(aten.var.correction, x, dims, correction=0, keepdim=True)
    scale = call(aten.rsqrt.default, call(aten.add.Scalar, variance, eps))
    away = call(aten.add.Tensor, x, call(aten.mul.Scalar, mean, -1))
    return call(aten.mul.Tensor, away, scale)


def _affine(call: _Call, x: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        x = call(aten.mul.Tensor, x, weight)
    return x if bias is None else call(aten.add.Tensor, x, bias)


def decompose_dynamic_native_layer_norm(gm: GraphModule) -> None:
    """Make `aten.native_layer_norm` simple ops, where only its first result is used."""

    def emit(call: _Call, x: Node, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        dims = list(range(-len(shape), 0))
        return _affine(call, _normalized(call, x, dims, eps), weight, bias)

    _decompose(gm, aten.native_layer_norm.default, emit)


def decompose_dynamic_native_group_norm(gm: GraphModule) -> None:
    """Make `aten.native_group_norm` with a group for each channel simple ops, where only its first result is used."""

    def emit(call: _Call, x: Node, weight: Any, bias: Any, *numbers: Any) -> Any:
        _, channels, _, group, eps = numbers
        if channels != group:
            return None
        extra = len(_shape(x)) - 2
        columns = [-1] + [1] * extra
        shaped = [
            None if t is None else call(aten.reshape.default, t, columns) for t in (weight, bias)
        ]
        return _affine(call, _normalized(call, x, list(range(-extra, 0)), eps), *shaped)

    _decompose(gm, aten.native_group_norm.default, emit)


def _decompose(gm: GraphModule, op: _Call, emit: Callable[..., Any]) -> None:
    for node in _of(gm, op):
        users = list(node.users)
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in users):
            continue
        with gm.graph.inserting_before(node):
            new = emit(lambda *args, **kwargs: _insert(gm.graph, *args, **kwargs), *node.args)
        if new is not None:
            for user in users:
                _replace(gm, user, new)
            gm.graph.erase_node(node)


# -- programs ------------------------------------------------------------------------------------


def exported_program_has_symbolic_input_shape(ep: torch.export.ExportedProgram) -> bool:
    """Whether an input of a program has a free size."""
    return any(map(_free_dims, ep.graph_module.graph.find_nodes(op="placeholder")))


_PASSES = (
    decompose_dynamic_shape_select,
    decompose_split_with_sizes,
    remove_no_op_slice,
    decompose_dynamic_native_group_norm,
    decompose_dynamic_native_layer_norm,
    dynamic_unsqueeze_to_view,
    flatten_embedding_indices_tensor,
    replace_dynamic_expand_with_xla_op,
    replace_dynamic_view_with_xla_op,
)


def process_exported_program_with_symbolic_input(ep: torch.export.ExportedProgram) -> None:
    """Apply all passes to a program."""
    for change in _PASSES:
        change(ep.graph_module)
        ep.graph_module.graph.eliminate_dead_code()
        ep.graph_module.graph.lint()
        ep.graph_module.recompile()
