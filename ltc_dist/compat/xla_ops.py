"""XLA's operations over PyTorch's, and computations made of them.

In: the names and arguments that `torch_xla.core.xla_builder` passes. A `Node` is one operation, whose shape is known
from the device `meta`. A `Computation` replays nodes on tensors, which records PyTorch's ops. Operations that have no
row in `_OPS` are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ltc_core import source
from ltc_core.errors import listed
from ltc_dist.compat.absent import NotHereError
from ltc_dist.compat.xla_text import KINDS

__all__ = ["DTYPES", "Builder", "Computation", "Node", "dot_general", "make_node", "make_param"]

DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
_INSTEAD = "write the op with PyTorch's own, or as a torch.library.custom_op"

Tensors = Any  # a tensor, or a tuple of them


class Builder:
    """The nodes of one computation, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One operation; `param` is the number of a parameter. `meta` has its shape."""

    builder: Builder
    name: str
    operands: tuple[Node, ...]
    arguments: dict[str, Any]
    meta: Tensors
    index: int
    param: int = -1


class Computation:
    """Callable of tensors: the nodes that `root` needs, replayed."""

    def __init__(self, name: str, root: Node) -> None:
        self.name, self.root = name, root
        needed, waiting = {root.index: root}, [root]
        while waiting:
            for operand in waiting.pop().operands:
                if operand.index not in needed:
                    needed[operand.index] = operand
                    waiting.append(operand)
        self._nodes = [needed[index] for index in sorted(needed)]

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        values: dict[int, Tensors] = {}
        device = tree_leaves(tensors)[0].device
        for node in self._nodes:
            if node.param >= 0:
                values[node.index] = tensors[node.param]
            else:
                operands = [values[operand.index] for operand in node.operands]
                values[node.index] = _apply(node.name, operands, node.arguments, device)
        return values[self.root.index]

    def reduction(self) -> str | None:
        """The operation, if there is only one and the parameters are its operands: 'Add'."""
        params = sorted(operand.param for operand in self.root.operands)
        return self.root.name if params == [0, 1] else None


def make_param(builder: Builder, number: int, meta: Tensors) -> Node:
    """The node of a parameter."""
    return _note(Node(builder, "Parameter", (), {}, meta, len(builder.nodes), number))


def make_node(
    builder: Builder, name: str, operands: Sequence[Node], arguments: dict[str, Any]
) -> Node:
    """The node of an operation.

    Raises:
        NotHereError: there is no such operation here, or PyTorch cannot do what it is asked for.
    """
    meta = _apply(name, [o.meta for o in operands], arguments, torch.device("meta"))
    return _note(Node(builder, name, tuple(operands), arguments, meta, len(builder.nodes)))


def _note(node: Node) -> Node:
    node.builder.nodes.append(node)
    return node


def _apply(name: str, operands: list[Tensors], arguments: dict[str, Any], device: Any) -> Tensors:
    run = _OPS.get(name)
    if run is None:
        raise NotHereError(
            f"the XLA operation {name} is not here",
            got=f"{name}({', '.join(arguments)}); there are {listed(sorted(_OPS), limit=len(_OPS))}",
            where=source.user_line(),
            next=_INSTEAD,
        )
    if name in _LEAVES:
        return run(device=device, **arguments)
    return run(*operands, **arguments)


# -- operations ------------------------------------------------------------------------------------


def dot_general(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    contracting: Sequence[Sequence[int]],
    batch: Sequence[Sequence[int]],
) -> torch.Tensor:
    """XLA's DotGeneral: the batch dims, then the other dims of `lhs`, then those of `rhs`."""
    contracted = [
        [d % t.dim() for d in dims]
        for t, dims in zip((lhs, rhs), contracting or ((), ()), strict=True)
    ]
    batched = [
        [d % t.dim() for d in dims] for t, dims in zip((lhs, rhs), batch or ((), ()), strict=True)
    ]
    names = list(range(lhs.dim()))
    others = [lhs.dim() + d for d in range(rhs.dim())]
    for dims in (contracted, batched):
        for left, right in zip(*dims, strict=True):
            others[right] = names[left]
    shared = [names[d] for d in batched[0]]
    taken = {*shared, *(names[d] for d in contracted[0])}
    free = [n for n in names if n not in taken] + [n for n in others if n >= lhs.dim()]
    return torch.einsum(lhs, names, rhs, others, shared + free)


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    exact = a.dtype.is_floating_point or a.dtype.is_complex
    return torch.div(a, b, rounding_mode=None if exact else "trunc")


def _reshape(
    t: torch.Tensor,
    sizes: Sequence[int],
    dimensions: Sequence[int] | None = None,
    inferred_dimension: int | None = None,
) -> torch.Tensor:
    return (t if dimensions is None else t.permute(*dimensions)).reshape(tuple(sizes))


def _broadcast_in_dim(
    t: torch.Tensor, sizes: Sequence[int], dimensions: Sequence[int]
) -> torch.Tensor:
    shape = [1] * len(sizes)
    for dim, n in zip(dimensions, t.shape, strict=True):
        shape[dim] = n
    return t.reshape(shape).expand(*sizes)


def _slice(
    t: torch.Tensor,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    return t[tuple(map(slice, start_indices, limit_indices, strides))]


def _slice_in_dim(
    t: torch.Tensor, start_index: int, limit_index: int, dimno: int, stride: int = 1
) -> torch.Tensor:
    return t[(slice(None),) * dimno + (slice(start_index, limit_index, stride),)]


def _window(t: torch.Tensor, starts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    """Indices of a window, which is moved into the tensor as XLA does."""
    found = []
    for dim, (start, n) in enumerate(zip(starts, sizes, strict=True)):
        offsets = torch.arange(n, device=t.device) + start.long().clamp(0, t.shape[dim] - n)
        found.append(offsets.reshape([-1 if d == dim else 1 for d in range(t.dim())]))
    return tuple(found)


def _dynamic_slice(
    t: torch.Tensor, *starts: torch.Tensor, slice_sizes: Sequence[int]
) -> torch.Tensor:
    return t[_window(t, starts, slice_sizes)]


def _dynamic_update_slice(
    t: torch.Tensor, update: torch.Tensor, *starts: torch.Tensor
) -> torch.Tensor:
    return t.index_put(_window(t, starts, update.shape), update)


def _pad(t: torch.Tensor, value: torch.Tensor, config: Sequence[Sequence[int]]) -> torch.Tensor:
    """`config` has (low, high, interior) for each dim; padding below zero cuts off."""
    spread = [n + max(n - 1, 0) * c[2] for n, c in zip(t.shape, config, strict=True)]
    out = value.expand(spread).clone()
    out[tuple(slice(None, None, c[2] + 1) for c in config)] = t
    for dim, (low, high, _) in enumerate(config):
        kept = out.narrow(dim, max(-low, 0), out.shape[dim] - max(-low, 0) - max(-high, 0))
        shapes = [(*out.shape[:dim], max(n, 0), *out.shape[dim + 1 :]) for n in (low, high)]
        before, after = (value.expand(shape) for shape in shapes)
        out = torch.cat([before, kept, after], dim)
    return out


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "Add": lambda t, dims: t.sum(dims, dtype=t.dtype),
    "And": lambda t, dims: t.all(dims),
    "Max": torch.amax,
    "Min": torch.amin,
    "Or": lambda t, dims: t.any(dims),
}


def _reduce(
    t: torch.Tensor, init: torch.Tensor, computation: Computation, dimensions: Sequence[int]
) -> torch.Tensor:
    kind = computation.reduction()
    is_logical = kind in ("And", "Or") and t.dtype is not torch.bool
    if kind == "Mul":
        found = t
        for dim in sorted(dimensions, reverse=True):
            found = found.prod(dim, dtype=t.dtype)
    elif kind in _REDUCTIONS and not is_logical:
        found = _REDUCTIONS[kind](t, tuple(dimensions)) if dimensions else t
    else:
        raise NotHereError(
            "this computation does not reduce here",
            got=f"{computation.name} on {KINDS[t.dtype]}, expected one of Add, Max, Min, Mul, and And, Or on pred, "
            "of the two parameters",
            where=source.user_line(),
            next=_INSTEAD,
        )
    return computation(init, found)  # type: ignore[no-any-return]


def _reduce_all(t: torch.Tensor, init: torch.Tensor, computation: Computation) -> torch.Tensor:
    return _reduce(t, init, computation, range(t.dim()))


def _triangular_solve(
    a: torch.Tensor,
    b: torch.Tensor,
    left_side: bool | None = None,
    lower: bool | None = None,
    unit_diagonal: bool | None = None,
    transpose_a: bool | None = None,
) -> torch.Tensor:
    matrix, upper = (a.mT, bool(lower)) if transpose_a else (a, not lower)
    is_left, unit = left_side is not False, bool(unit_diagonal)
    solved: torch.Tensor = torch.linalg.solve_triangular(
        matrix, b, upper=upper, left=is_left, unitriangular=unit
    )
    return solved


def _conditional(
    condition: torch.Tensor,
    true_operand: Tensors,
    false_operand: Tensors,
    true_computation: Computation,
    false_computation: Computation,
) -> Tensors:
    """Compute both and select, so that the condition is not waited for."""
    chosen, other = true_computation(true_operand), false_computation(false_operand)
    if isinstance(chosen, tuple):
        return tuple(torch.where(condition, a, b) for a, b in zip(chosen, other, strict=True))
    return torch.where(condition, chosen, other)


def _while(
    state: Tensors, condition_computation: Computation, body_computation: Computation
) -> Tensors:
    """Cost: a sync for each iteration."""
    first = state[0] if isinstance(state, tuple) else state
    if first.device.type == "meta":
        return state
    while condition_computation(state):
        state = body_computation(state)
    return state


def _iota(shape: dict[str, Any], iota_dimension: int, device: torch.device) -> torch.Tensor:
    sizes = shape["sizes"]
    row = torch.arange(sizes[iota_dimension], dtype=DTYPES[shape["type"]], device=device)
    return _broadcast_in_dim(row, sizes, [iota_dimension])


def _constant(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.to(device)


_LEAVES = ("Constant", "Iota")
_OPS: dict[str, Callable[..., Tensors]] = {
    "Acos": torch.acos,
    "Add": torch.add,
    "And": torch.bitwise_and,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "Atan2": torch.atan2,
    "BitcastConvert": lambda t, to_type: t.view(DTYPES[to_type]),
    "Broadcast": lambda t, sizes: t.expand(*sizes, *t.shape),
    "BroadcastInDim": _broadcast_in_dim,
    "Call": lambda *tensors, computation: computation(*tensors),
    "Ceil": torch.ceil,
    "Clamp": torch.clamp,
    "ConcatInDim": lambda *tensors, dimension: torch.cat(tensors, dimension),
    "Conditional": _conditional,
    "Conj": torch.conj_physical,
    "Constant": _constant,
    "Convert": lambda t, to_type: t.to(DTYPES[to_type]),
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Div": _divide,
    "Dot": torch.matmul,
    "DynamicSlice": _dynamic_slice,
    "DynamicUpdateSlice": _dynamic_update_slice,
    "Eq": torch.eq,
    "Erf": torch.erf,
    "ErfInv": torch.erfinv,
    "Erfc": torch.erfc,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Ge": torch.ge,
    "GetDimensionSize": lambda t, dimension: torch.full(
        (), t.shape[dimension], dtype=torch.int32, device=t.device
    ),
    "GetTupleElement": lambda state, index: state[index],
    "Gt": torch.gt,
    "Imag": torch.imag,
    "Iota": _iota,
    "Le": torch.le,
    "Log": torch.log,
    "Log1p": torch.log1p,
    "Lt": torch.lt,
    "Map": lambda *tensors, computation, dimensions: computation(*tensors),
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Mul": torch.mul,
    "Ne": torch.ne,
    "Neg": torch.neg,
    "Not": torch.bitwise_not,
    "Or": torch.bitwise_or,
    "Pad": _pad,
    "Pow": torch.pow,
    "Real": torch.real,
    "Reduce": _reduce,
    "ReduceAll": _reduce_all,
    "Rem": torch.fmod,
    "Reshape": _reshape,
    "Rev": lambda t, dimensions: t.flip(tuple(dimensions)),
    "Rsqrt": torch.rsqrt,
    "Select": torch.where,
    "ShiftLeft": torch.bitwise_left_shift,
    "ShiftRight": torch.bitwise_right_shift,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Slice": _slice,
    "SliceInDim": _slice_in_dim,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Transpose": lambda t, permutation: t.permute(*permutation),
    "TriangularSolve": _triangular_solve,
    "Tuple": lambda *tensors: tensors,
    "While": _while,
    "Xor": torch.bitwise_xor,
}
