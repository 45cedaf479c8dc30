"""Facts about one ATen overload, read once from its schema.

An `OpSchema` says which arguments are tensors, which are scalars (these may change from step to step, and so are inputs
of the graph) and which are structure. It also says which operands the op writes, what it returns, and whether it draws
random numbers. Made from an `OpOverload`; used by `shapes`, `record` and `ops`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Arg", "OpSchema", "is_view_op", "runs_with_grad"]

aten = torch.ops.aten


class Arg(enum.IntEnum):
    """How an argument enters the signature of a recorded op."""

    STATIC = 0  # structure: by value
    TENSOR = 1  # a tensor, or a scalar in place of a tensor
    TENSORS = 2  # a list of tensors (None allowed)
    SCALAR = 3  # a scalar: by type; its value is an input of the graph
    SCALARS = 4  # a list of scalars
    GENERATOR = 5
    STATIC_SCALAR = 6  # a scalar that is structure: by value and type; 6 == 6.0, but results differ


# Ops whose result shape or kernel algorithm depends on a scalar: their scalars are structure.
_STATIC_SCALARS = (
    "arange",
    "range",
    "upsample",
    "_upsample",
    "grid_sampler",
    "histc",
)

# Ops that write operands their schema does not mark. `native_batch_norm` updates its running statistics.
_UNMARKED_WRITES: dict[torch._ops.OpOverload, tuple[str, ...]] = {
    aten.native_batch_norm.default: ("running_mean", "running_var"),
}

# The schema marks the result as an alias of the input; we record it as a new value.
_NOT_VIEWS = frozenset({"lift_fresh", "_nested_view_from_buffer", "_nested_view_from_jagged"})


def _classify(schema_type: str, static_scalars: bool) -> Arg:
    base = (
        schema_type.removeprefix("Optional[").removesuffix("]")
        if "Optional[" in schema_type
        else schema_type
    )
    if base == "Tensor":
        return Arg.TENSOR
    if "Tensor" in schema_type:
        return Arg.TENSORS
    if base == "Generator":
        return Arg.GENERATOR
    if static_scalars:
        return Arg.STATIC_SCALAR
    if base in ("number", "float", "complex", "Scalar"):
        return Arg.SCALAR
    if schema_type in ("List[number]", "List[Scalar]"):
        return Arg.SCALARS
    return Arg.STATIC


def is_view_op(op: torch._ops.OpOverload) -> bool:
    """Whether the op's first result aliases its input without writing it."""
    if op._opname in _NOT_VIEWS:
        return False
    first = op._schema.returns[0].alias_info if op._schema.returns else None
    return first is not None and not first.is_write


def runs_with_grad(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether a kernel is to make what its backward reads.

    oneDNN's layer asks the grad mode, which a run of a graph has turned off. `ops.rnn` records the mode of the call as
    the last argument, `train`, which the kernel does not read.
    """
    return op is aten.mkldnn_rnn_layer.default and bool(args[-1])


class OpSchema:
    """The facts about one overload that recording needs; `aten::name` is `counter`.

    `args` classifies the arguments by position, `named` by name. `writes` names the written arguments in order.
    `returns` has, for each result, the name of the written argument that it is, or None for a new value.
    """

    __slots__ = (
        "args", "composite", "counter", "draws", "name", "named", "names", "op", "returns", "view", "writes",
        "yields_tensors",
    )  # fmt: skip

    _known: dict[torch._ops.OpOverload, OpSchema] = {}

    @classmethod
    def of(cls, op: torch._ops.OpOverload) -> OpSchema:
        """The one `OpSchema` of an overload: signatures compare it by identity."""
        known = cls._known.get(op)
        # Two threads may make one at the same time: both get that of the first.
        return cls._known.setdefault(op, cls(op)) if known is None else known

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        self.op = op
        self.name = op._opname
        self.counter = f"{op.namespace}::{op._opname}"
        static_scalars = self.name.startswith(_STATIC_SCALARS)
        self.names = tuple(a.name for a in schema.arguments)
        self.named = {a.name: _classify(str(a.type), static_scalars) for a in schema.arguments}
        self.args = tuple(self.named.values())
        self.writes = tuple(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ) + _UNMARKED_WRITES.get(op, ())
        self.returns = tuple(self._written_as(r, schema.arguments) for r in schema.returns)
        self.yields_tensors = all("Tensor" in str(r.type) for r in schema.returns)
        self.draws = Arg.GENERATOR in self.args and self.name != "set_"
        self.view = is_view_op(op)
        self.composite = _is_composite(op)

    @staticmethod
    def _written_as(result: Any, arguments: Any) -> str | None:
        info = result.alias_info
        if info is None or not info.is_write:
            return None
        for a in arguments:
            if a.alias_info is not None and a.alias_info.before_set == info.before_set:
                return str(a.name)
        return None

    def position(self, name: str) -> int:
        return self.names.index(name)

    def given(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The argument of this name in a call, by position or by keyword; None if the call does not give it."""
        position = self.position(name)
        return args[position] if position < len(args) else kwargs.get(name)


def _is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the op is implemented by other ops alone (CompositeImplicitAutograd), also on the CPU."""
    try:
        name = f"{op.namespace}::{op._opname}"
        if op._overloadname != "default":
            name += f".{op._overloadname}"
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")
    except RuntimeError:  # an operator without any kernel
        return False
