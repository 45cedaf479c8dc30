"""What recording knows of an op, against ATen's own schemas: a few known ops, then all of them."""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ltc_core.graph.op_schema import Arg, OpSchema, is_view_op

aten = torch.ops.aten
Overload = torch._ops.OpOverload
STATIC, TENSOR, TENSORS = Arg.STATIC, Arg.TENSOR, Arg.TENSORS
SCALAR, SCALARS = Arg.SCALAR, Arg.SCALARS
GENERATOR, STATIC_SCALAR = Arg.GENERATOR, Arg.STATIC_SCALAR


def all_overloads() -> Iterator[Overload]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and hasattr(aten, packet):
            found = getattr(getattr(aten, packet), overload or "default", None)
            if found is not None:
                yield found


@functools.cache
def all_schemas() -> tuple[OpSchema, ...]:
    return tuple(OpSchema(op) for op in all_overloads())


# -- how arguments enter a signature ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (TENSOR, TENSOR, SCALAR)),
        (aten.add.Scalar, (TENSOR, SCALAR, SCALAR)),
        (aten.cat.default, (TENSORS, STATIC)),
        (aten.index.Tensor, (TENSOR, TENSORS)),
        (aten.sum.dim_IntList, (TENSOR, STATIC, STATIC, STATIC)),
        (aten.clamp.default, (TENSOR, SCALAR, SCALAR)),
        (aten.clamp.Tensor, (TENSOR, TENSOR, TENSOR)),
        (aten.select.int, (TENSOR, STATIC, STATIC)),
        (aten.normal_.default, (TENSOR, SCALAR, SCALAR, GENERATOR)),
        (aten._foreach_mul.ScalarList, (TENSORS, SCALARS)),
        (aten._foreach_mul.Scalar, (TENSORS, SCALAR)),
        (aten.arange.start_step, (STATIC_SCALAR,) * 7),
        (aten.native_layer_norm.default, (TENSOR, STATIC, TENSOR, TENSOR, SCALAR)),
        (aten.gelu.default, (TENSOR, STATIC)),
        (aten.div.Tensor_mode, (TENSOR, TENSOR, STATIC)),
    ],
    ids=str,
)
def test_arguments_are_told_apart(op: Overload, args: tuple[Arg, ...]) -> None:
    assert OpSchema.of(op).args == args


def test_numbers_a_shape_follows_from_are_structure() -> None:
    scales = OpSchema.of(aten.upsample_nearest2d.default).named
    assert scales["scales_h"] == STATIC_SCALAR
    assert OpSchema.of(aten.histc.default).named["bins"] == STATIC_SCALAR


def test_a_number_made_a_tensor_is_a_number() -> None:
    """`torch.where(mask, t, lr)` and `t[mask] = lr` go this way: no new graph for each value."""
    assert OpSchema.of(aten.scalar_tensor.default).named["s"] == SCALAR


def test_named_arguments_are_classified_like_positional_ones() -> None:
    schema = OpSchema.of(aten.add.out)
    assert schema.named == {"self": TENSOR, "other": TENSOR, "alpha": SCALAR, "out": TENSOR}
    assert schema.names == ("self", "other", "alpha", "out")
    assert schema.position("out") == 3


# -- what an op writes and returns -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "writes", "returns"),
    [
        (aten.add.Tensor, (), (None,)),
        (aten.add_.Tensor, ("self",), ("self",)),
        (aten.add.out, ("out",), ("out",)),
        (aten.max.dim, (), (None, None)),
        (aten.max.dim_max, ("max", "max_values"), ("max", "max_values")),
        (aten.sort.values, ("values", "indices"), ("values", "indices")),
        (aten._foreach_add_.List, ("self",), ()),
        (aten.native_batch_norm.default, ("running_mean", "running_var"), (None, None, None)),
        (aten.transpose.int, (), (None,)),
        (aten.index_put_.default, ("self",), ("self",)),
        (aten._fused_adamw_.default, ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"), ()),
    ],
    ids=str,
)  # fmt: skip
def test_writes_and_returns(
    op: Overload, writes: tuple[str, ...], returns: tuple[str | None, ...]
) -> None:
    schema = OpSchema.of(op)
    assert schema.writes == writes
    assert schema.returns == returns


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.transpose.int, True),
        (aten.split.Tensor, True),
        (aten.view.dtype, True),
        (aten.alias.default, True),
        (aten.add.Tensor, False),
        (aten.add_.Tensor, False),
        (aten.lift_fresh.default, False),
        (aten._unsafe_view.default, False),
        (aten._foreach_add_.List, False),
    ],
    ids=str,
)
def test_views(op: Overload, expected: bool) -> None:
    assert is_view_op(op) is expected
    assert OpSchema.of(op).view is expected


def test_ops_that_draw_take_a_generator() -> None:
    for op in (aten.bernoulli_.float, aten.randperm.generator, aten.multinomial.default):
        assert OpSchema.of(op).draws
    assert not OpSchema.of(aten.add.Tensor).draws


def test_ops_that_answer_with_a_python_value_yield_no_tensors() -> None:
    for op in (aten.equal.default, aten._local_scalar_dense.default, aten.is_same_size.default):
        assert not OpSchema.of(op).yields_tensors
    for op in (aten.add.Tensor, aten.split.Tensor, aten._foreach_add_.List):
        assert OpSchema.of(op).yields_tensors


def test_composite_ops_are_those_defined_by_others() -> None:
    for op in (aten.matmul.default, aten.reshape.default, aten.einsum.default):
        assert OpSchema.of(op).composite
    for op in (aten.mm.default, aten.add.Tensor, aten.relu.default):
        assert not OpSchema.of(op).composite


def test_counters_are_named_as_peers_name_them() -> None:
    assert OpSchema.of(aten.add_.Tensor).counter == "aten::add_"


def test_there_is_one_schema_an_overload() -> None:
    assert OpSchema.of(aten.mul.Tensor) is OpSchema.of(aten.mul.Tensor)
    assert OpSchema.of(aten.mul.Tensor) is not OpSchema.of(aten.mul.Scalar)


# -- all of ATen -----------------------------------------------------------------------------------


def test_two_threads_that_make_one_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    both, make = threading.Barrier(2, timeout=30), OpSchema.__init__

    def make_together(schema: OpSchema, op: Overload) -> None:
        both.wait()
        make(schema, op)

    monkeypatch.setattr(OpSchema, "_known", {})
    monkeypatch.setattr(OpSchema, "__init__", make_together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(OpSchema.of, [torch.ops.aten.add.Tensor] * 2)
    assert first is second


def test_every_overload_of_aten_has_a_schema() -> None:
    assert len(all_schemas()) > 2500


def test_every_argument_of_aten_is_classified_by_its_type() -> None:
    """A tensor is a tensor, a generator a generator; nothing else is either."""
    for schema in all_schemas():
        for argument in schema.op._schema.arguments:
            text, code = str(argument.type), schema.named[argument.name]
            assert (code in (TENSOR, TENSORS)) == ("Tensor" in text), f"{schema.op}: {argument}"
            assert (code == GENERATOR) == ("Generator" in text), f"{schema.op}: {argument}"
            if code == TENSORS:
                assert "List" in text, f"{schema.op}: {argument}"
            if code in (SCALAR, SCALARS):
                assert "int" not in text, f"{schema.op}: {argument}: a size is structure"


def test_whatever_aten_marks_as_written_is_written() -> None:
    for schema in all_schemas():
        marked = [
            a.name for a in schema.op._schema.arguments if a.alias_info and a.alias_info.is_write
        ]
        assert [w for w in schema.writes if w in marked] == marked, str(schema.op)
        assert set(schema.writes) <= set(schema.names), str(schema.op)
        assert all(name in schema.writes for name in schema.returns if name), str(schema.op)
        assert len(schema.returns) == len(schema.op._schema.returns)


def test_in_place_ops_return_the_tensor_they_write() -> None:
    for schema in all_schemas():
        is_in_place = schema.name.endswith("_") and not schema.name.startswith("_")
        if is_in_place and schema.writes == ("self",) and len(schema.returns) == 1:
            assert schema.returns == ("self",), str(schema.op)


def test_no_view_writes_or_draws() -> None:
    for schema in all_schemas():
        if schema.view:
            assert not schema.writes, str(schema.op)
            assert not schema.draws, str(schema.op)
            assert schema.args[0] == TENSOR, str(schema.op)
