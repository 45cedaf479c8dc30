"""`xb`: `torch_xla.core.xla_builder`, computations that are built by hand, over PyTorch's ops.

An `Op` wraps a node of `ltc_dist.compat.xla_ops`, which has its rules and refuses what has none. Operations on windows,
`gather`, `scatter` and `sort` have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_dist.compat.absent import Absent
from ltc_dist.compat.buffer_donors import make_placeholder
from ltc_dist.compat.cached_calls import JAX_CALLABLES as _JAX_TO_XLA_COMPUTATION_CACHE
from ltc_dist.compat.cached_calls import (
    CompiledCallableWithCache,
    FlattenedInputFunc,
    JaxCallable,
    call_jax,
)
from ltc_dist.compat.cached_calls import (
    count_jax_traces as _jax_to_xla_computation_cache_elements,
)
from ltc_dist.compat.xla_ops import DTYPES, Builder, Computation, Node, make_node, make_param
from ltc_dist.compat.xla_shapes import Shape, Type
from ltc_dist.compat.xla_text import KINDS

__all__ = [
    "_JAX_TO_XLA_COMPUTATION_CACHE",
    "_PT_XLA_TYPE_MAP",
    "_XLA_PT_TYPE_MAP",
    "CompiledCallableWithCache",
    "FlattenedInputFunc",
    "JaxCallable",
    "Op",
    "Shape",
    "Type",
    "XlaCallable",
    "_jax_to_xla_computation_cache_elements",
    "call_jax",
    "computation_from_module_proto",
    "create_builder",
    "create_computation",
    "create_placeholder_tensor",
    "get_computation_hlo",
    "mkleaf",
    "mkop",
    "mkparam",
    "mkshape",
    "tensor_shape",
    "xla_computation_as_func",
]

_XLA_PT_TYPE_MAP, _PT_XLA_TYPE_MAP = DTYPES, KINDS
create_placeholder_tensor = make_placeholder
_NO_HLO = "there is no HLO; write the op with PyTorch's own, or as a torch.library.custom_op"
computation_from_module_proto = Absent("xb.computation_from_module_proto", _NO_HLO)
get_computation_hlo = Absent("xb.get_computation_hlo", _NO_HLO)


class Op:
    """An operation of a computation that is being built. Source: XLA's operation semantics."""

    def __init__(self, op: Node) -> None:
        self.op = op

    def shape(self) -> Shape:
        return Shape.of(self.op.meta)

    def builder(self) -> Builder:
        return self.op.builder

    def build(self, name: str) -> Computation:
        """The computation that this operation is the result of."""
        return Computation(name, self.op)

    def _with(self, name: str, *others: Op, **kwargs: Any) -> Op:
        return mkop(name, (self.op, *_nodes(others)), **kwargs)

    # -- shapes and types --------------------------------------------------------------------------

    def reshape(
        self,
        sizes: Sequence[int],
        dimensions: Sequence[int] | None = None,
        inferred_dimension: int | None = None,
    ) -> Op:
        return self._with(
            "Reshape", sizes=sizes, dimensions=dimensions, inferred_dimension=inferred_dimension
        )

    def broadcast(self, sizes: Sequence[int]) -> Op:
        return self._with("Broadcast", sizes=sizes)

    def broadcast_in_dim(self, sizes: Sequence[int], dimensions: Sequence[int]) -> Op:
        return self._with("BroadcastInDim", sizes=sizes, dimensions=dimensions)

    def slice(
        self,
        start_indices: Sequence[int],
        limit_indices: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Op:
        strides = [1] * len(start_indices) if strides is None else strides
        return self._with(
            "Slice", start_indices=start_indices, limit_indices=limit_indices, strides=strides
        )

    def slice_in_dim(self, start_index: int, limit_index: int, dimno: int, stride: int = 1) -> Op:
        return self._with(
            "SliceInDim",
            start_index=start_index,
            limit_index=limit_index,
            dimno=dimno,
            stride=stride,
        )

    def dynamic_slice(self, start_indices: Sequence[Op], slice_sizes: Sequence[int]) -> Op:
        return self._with("DynamicSlice", *start_indices, slice_sizes=slice_sizes)

    def dynamic_update_slice(self, update: Op, start_indices: Sequence[Op]) -> Op:
        return self._with("DynamicUpdateSlice", update, *start_indices)

    def transpose(self, permutation: Sequence[int]) -> Op:
        return self._with("Transpose", permutation=permutation)

    def pad(self, value: Op, config: Sequence[Sequence[int]]) -> Op:
        return self._with("Pad", value, config=config)

    def rev(self, dimensions: Sequence[int]) -> Op:
        return self._with("Rev", dimensions=dimensions)

    def cast(self, to_type: str) -> Op:
        return self._with("Convert", to_type=to_type)

    def bitcast(self, to_type: str) -> Op:
        return self._with("BitcastConvert", to_type=to_type)

    def get_dimension_size(self, dimension: int) -> Op:
        return self._with("GetDimensionSize", dimension=dimension)

    def get_tuple_element(self, index: int) -> Op:
        return self._with("GetTupleElement", index=index)

    # -- values ------------------------------------------------------------------------------------

    def select(self, true_value: Op, false_value: Op) -> Op:
        return self._with("Select", true_value, false_value)

    def clamp(self, min_value: Op, max_value: Op) -> Op:
        return self._with("Clamp", min_value, max_value)

    def triangualr_solve(  # its name there
        self,
        b: Op,
        left_side: bool | None = None,
        lower: bool | None = None,
        unit_diagonal: bool | None = None,
        transpose_a: bool | None = None,
    ) -> Op:
        return self._with(
            "TriangularSolve",
            b,
            left_side=left_side,
            lower=lower,
            unit_diagonal=unit_diagonal,
            transpose_a=transpose_a,
        )

    def scalar_like(self, value: Any) -> Op:
        shape = self.shape()
        return Op.scalar(self.builder(), value, dtype=shape.dtype).broadcast(shape.sizes)

    def zeros_like(self) -> Op:
        return self.scalar_like(0)

    def ones_like(self) -> Op:
        return self.scalar_like(1)

    # -- with computations -------------------------------------------------------------------------

    def reduce(self, init_value: Op, computation: Any, dimensions: Sequence[int]) -> Op:
        return self._with(
            "Reduce",
            init_value,
            computation=self._of_two("Reduce", computation),
            dimensions=dimensions,
        )

    def reduce_all(self, init_value: Op, computation: Any) -> Op:
        return self._with(
            "ReduceAll", init_value, computation=self._of_two("ReduceAll", computation)
        )

    def _of_two(self, name: str, computation: Any) -> Computation:
        return Op.make_computation(name, computation, (self.shape().as_scalar(),) * 2)

    def conditional(
        self, true_operand: Op, false_operand: Op, true_computation: Any, false_computation: Any
    ) -> Op:
        return self._with(
            "Conditional",
            true_operand,
            false_operand,
            true_computation=Op.make_computation("CondTrue", true_computation, (true_operand,)),
            false_computation=Op.make_computation("CondFalse", false_computation, (false_operand,)),
        )

    def mkconditional(self, ops: Sequence[Op], true_fn: Any, false_fn: Any, **kwargs: Any) -> Op:
        operands = Op.tuple(ops)
        return self.conditional(operands, operands, true_fn, false_fn)

    def while_loop(self, condition_computation: Any, body_computation: Any) -> Op:
        return self._with(
            "While",
            condition_computation=Op.make_computation("Condition", condition_computation, (self,)),
            body_computation=Op.make_computation("Body", body_computation, (self,)),
        )

    @classmethod
    def mkwhile(cls, ops: Sequence[Op], condition_fn: Any, body_fn: Any, **kwargs: Any) -> Op:
        return Op.tuple(ops).while_loop(condition_fn, body_fn)

    @classmethod
    def wrap_function(cls, fn: Callable[..., Any]) -> Callable[..., Op]:
        """A function of the elements of its only argument, if that is a tuple; a tuple as its result is one op."""

        def call(*args: Op, **kwargs: Any) -> Op:
            if len(args) == 1 and args[0].shape().is_tuple():
                args = tuple(
                    args[0].get_tuple_element(k) for k in range(args[0].shape().tuple_size())
                )
            result = fn(*args, **kwargs)
            return Op.tuple(result) if isinstance(result, tuple | list) else result

        return call

    @classmethod
    def make_computation(
        cls, name: str, computation: Any, args_or_shapes: Sequence[Op | Shape], **kwargs: Any
    ) -> Computation:
        """The computation of a function; another computation as it is."""
        if isinstance(computation, Computation):
            return computation
        shapes = [a if isinstance(a, Shape) else a.shape() for a in args_or_shapes]
        return create_computation(name, Op.wrap_function(computation), shapes, **kwargs)

    @classmethod
    def call(cls, computation: Any, ops: Sequence[Op], builder: Builder | None = None) -> Op:
        made = Op.make_computation("Call", computation, ops)
        return mkop("Call", _nodes(ops), computation=made, builder=builder)

    @classmethod
    def map(
        cls,
        ops: Sequence[Op],
        computation: Computation,
        dimensions: Sequence[int],
        static_operands: Sequence[Op] = (),
        builder: Builder | None = None,
    ) -> Op:
        operands = _nodes((*ops, *static_operands))
        return mkop(
            "Map", operands, computation=computation, dimensions=dimensions, builder=builder
        )

    @classmethod
    def tuple(cls, ops: Sequence[Op], builder: Builder | None = None) -> Op:
        return mkop("Tuple", _nodes(ops), builder=builder)

    @classmethod
    def concat_in_dim(cls, ops: Sequence[Op], dimension: int, builder: Builder | None = None) -> Op:
        return mkop("ConcatInDim", _nodes(ops), dimension=dimension, builder=builder)

    # -- constants ---------------------------------------------------------------------------------

    @classmethod
    def constant(cls, builder: Builder, value: torch.Tensor) -> Op:
        return mkleaf("Constant", builder, value=value)

    @classmethod
    def scalar(cls, builder: Builder, value: Any, dtype: str | None = None) -> Op:
        return Op.constant(builder, torch.tensor(value, dtype=cls.to_torch_type(dtype)))

    @classmethod
    def zero(cls, builder: Builder, dtype: str | None = None) -> Op:
        return cls.scalar(builder, 0, dtype)

    @classmethod
    def one(cls, builder: Builder, dtype: str | None = None) -> Op:
        return cls.scalar(builder, 1, dtype)

    @classmethod
    def iota(cls, builder: Builder, shape: Shape, iota_dimension: int) -> Op:
        return mkleaf("Iota", builder, shape=shape.shape, iota_dimension=iota_dimension)

    @classmethod
    def to_torch_type(cls, dtype: str | None) -> torch.dtype:
        return DTYPES[dtype] if dtype else torch.float32

    @classmethod
    def from_torch_type(cls, dtype: torch.dtype) -> str:
        return KINDS[dtype]


# Method -> the operation of this op and the other arguments, which are ops.
_METHODS = {
    "__add__": "Add", "__sub__": "Sub", "__mul__": "Mul", "__matmul__": "Dot", "__truediv__": "Div", "__pow__": "Pow",
    "__mod__": "Rem", "__neg__": "Neg", "__not__": "Not", "__and__": "And", "__or__": "Or", "__xor__": "Xor",
    "__eq__": "Eq", "__ne__": "Ne", "__le__": "Le", "__lt__": "Lt", "__ge__": "Ge", "__gt__": "Gt",
    "__lshift__": "ShiftLeft", "__rshift__": "ShiftRight", "atan2": "Atan2", "max": "Max", "min": "Min",
    **{name.lower(): name for name in (
        "Acos", "Asin", "Atan", "Ceil", "Clz", "Conj", "Cos", "Cosh", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Imag",
        "Log", "Log1p", "Real", "Rsqrt", "Sin", "Sinh", "Sqrt", "Tan", "Tanh",
    )},
    "erfinf": "ErfInv",  # its name there
}  # fmt: skip
# Methods of operations that have no rule.
_REFUSED = {
    "conv": "Conv", "conv_general": "ConvGeneral", "conv_general_dilated": "ConvGeneralDilated",
    "conv_with_general_dimensions": "ConvWithGeneralDimensions",
    "conv_with_general_padding": "ConvWithGeneralPadding", "dynamic_reshape": "DynamicReshape", "gather": "Gather",
    "max_pool": "MaxPool", "reduce_window": "ReduceWindow", "scatter": "Scatter",
    "select_and_scatter": "SelectAndScatter",
    "select_and_scatter_with_general_padding": "SelectAndScatterWithGeneralPadding",
    "set_dimension_size": "SetDimensionSize", "sort": "Sort",
}  # fmt: skip


def _method(name: str) -> Callable[..., Op]:
    return lambda self, *others: self._with(name, *others)


def _refused(name: str) -> Callable[..., Op]:
    def refuse(ops: Op | Sequence[Op], *args: Any, **kwargs: Any) -> Op:
        first = ops if isinstance(ops, Op) else ops[0]
        return mkop(name, (first.op,), **kwargs)

    return refuse


for _name, _operation in _METHODS.items():
    setattr(Op, _name, _method(_operation))
for _name, _operation in _REFUSED.items():
    setattr(Op, _name, _refused(_operation))
Op.__hash__ = object.__hash__  # type: ignore[method-assign]


def _nodes(ops: Sequence[Op]) -> tuple[Node, ...]:
    return tuple(op.op for op in ops)


def create_builder(name: str) -> Builder:
    return Builder(name)


def mkshape(
    dtype: str, sizes: Sequence[int], dynamic_dimensions: Sequence[int] | None = None
) -> Shape:
    return Shape.create(dtype, sizes, dynamic_dimensions)


def mkop(name: str, ops: Sequence[Node], builder: Builder | None = None, **kwargs: Any) -> Op:
    return Op(make_node(builder or ops[0].builder, name, ops, kwargs))


def mkleaf(name: str, builder: Builder, **kwargs: Any) -> Op:
    return Op(make_node(builder, name, (), kwargs))


def mkparam(builder: Builder, param_no: int, shape: Shape) -> Op:
    return Op(make_param(builder, param_no, shape.meta()))


def tensor_shape(tensor: Any, device: str = "") -> Any:
    """The shape of a tensor, or a list of shapes."""
    return [Shape.of(t) for t in tensor] if isinstance(tensor, list | tuple) else Shape.of(tensor)


def create_computation(
    name: str, fn: Callable[..., Op], shapes: Sequence[Shape], **kwargs: Any
) -> Computation:
    """The computation that a function of ops builds from parameters of these shapes."""
    builder = create_builder(name)
    params = [mkparam(builder, number, shape) for number, shape in enumerate(shapes)]
    return fn(*params, **kwargs).build(name)


def xla_computation_as_func(
    computation: Computation, name: str | None = None
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A function of a list of tensors. No gradient flows through it."""

    def call(input_tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            result = computation(*input_tensors)
        return list(result) if isinstance(result, tuple) else [result]

    return call


class XlaCallable(CompiledCallableWithCache):
    """Calls a function of `Op`s, and structures of them, with tensors."""

    def __init__(self, xla_func: Callable[..., Any]) -> None:
        super().__init__(FlattenedInputFunc(xla_func))

    def specialize(self, sample_flat_args: Sequence[torch.Tensor]) -> Callable[..., Any]:
        name = "xla::computation"
        builder = create_builder(name)
        shapes = [mkshape(Op.from_torch_type(t.dtype), t.shape) for t in sample_flat_args]
        params = [mkparam(builder, number, shape) for number, shape in enumerate(shapes)]
        root = Op.tuple(self._flat_input_func.flat_call(params))
        return xla_computation_as_func(root.build(name), name)
