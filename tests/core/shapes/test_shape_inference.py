"""Metadata of results, told without values: what eager gives, strides included; what cannot be told says so."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import ltc_core as ltc
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import OpSchema
from ltc_core.shapes import shape_inference as infer_module
from ltc_core.shapes import size_rules
from ltc_core.shapes.shape_inference import Unknown, infer, typed

aten = torch.ops.aten
Overload = torch._ops.OpOverload


def lazy(t: Tensor) -> Tensor:
    """A lazy tensor with the same size and strides."""
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=ltc.lazy_device())


def told(op: Overload, *args: Any, **kwargs: Any) -> Any:
    return infer(OpSchema.of(op), args, kwargs)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    cache: dict[Any, Any] = {}
    monkeypatch.setattr(infer_module, "_cache", cache)
    monkeypatch.setattr(infer_module, "_known", size_rules.Known())
    return cache


# -- as eager --------------------------------------------------------------------------------------

x = torch.randn(2, 3)
image = torch.randn(2, 3, 4, 4)
rows = torch.tensor([1, 0, 1])
turned = torch.rand(2, 3).t() + 1
probabilities = torch.randn(1, 4, 5).log_softmax(2).transpose(0, 1)
volume = torch.randn(1, 1, 2, 2, 2)

CASES: dict[str, tuple[Overload, tuple[Any, ...]]] = {
    "add": (aten.add.Tensor, (x, x)),
    "broadcast": (aten.add.Tensor, (x, torch.randn(4, 1, 3))),
    "promotion": (aten.add.Tensor, (x, torch.ones(3, dtype=torch.float64))),
    "0-dim does not promote": (aten.add.Tensor, (x, torch.tensor(1.0, dtype=torch.float64))),
    "strides of a transposed operand": (aten.exp.default, (x.t(),)),
    "strides of two operands": (aten.add.Tensor, (image.permute(0, 2, 3, 1), image[:, :1, :, :3])),
    "channels_last": (aten.relu.default, (image.to(memory_format=torch.channels_last),)),
    "mm": (aten.mm.default, (x, x.t())),
    "sum of a dim": (aten.sum.dim_IntList, (image, [1], True)),
    "sum of integers": (aten.sum.default, (rows,)),
    "comparison": (aten.gt.Scalar, (x, 0.0)),
    "number": (aten.mul.Tensor, (rows, 1.5)),
    "index": (aten.index.Tensor, (image, [None, rows])),
    "cat": (aten.cat.default, ([x, x, x], 1)),
    "view": (aten.transpose.int, (image, 1, 3)),
    "part": (aten.slice.Tensor, (image, 2, 1, 4, 2)),
    "part of a part": (aten.select.int, (image[:, 1:], 1, 1)),
    "several": (aten.split.Tensor, (image, 1, 1)),
    "two results": (aten.max.dim, (x, 1)),
    "convolution": (
        aten.convolution.default,
        (image, torch.randn(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    "clone": (aten.clone.default, (x.t(),)),
    "sort": (aten.sort.default, (x, 0, True)),
    "batch_norm": (
        aten.native_batch_norm.default,
        (image, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5),
    ),
    # Of these PyTorch has no kernel for `meta`.
    "gradient of gamma": (aten._standard_gamma_grad.default, (turned, turned)),
    "Dirichlet": (aten._sample_dirichlet.default, (turned,)),
    "gradient of Dirichlet": (aten._dirichlet_grad.default, (turned / 9, turned, turned * 3)),
    "binomial": (aten.binomial.default, (turned.round(), turned / 9)),
    "gradient of margins": (
        aten.multi_margin_loss_backward.default,
        (torch.tensor(1.0), turned, rows, 1, 1.0, None, 1),
    ),
    "gradient of margins of labels": (
        aten.multilabel_margin_loss_backward.default,
        (torch.tensor(1.0), turned, rows[:, None] * turned.long() * 0, 1, torch.zeros(3, 2)),
    ),
    "gradient of CTC": (
        aten._ctc_loss_backward.default,
        (
            *(torch.ones(1), probabilities, rows[None] + 1, [4], [3]),
            *aten._ctc_loss.default(probabilities, rows[None] + 1, [4], [3]),
            0,
        ),
    ),
    "gradient of pooling": (
        aten.fractional_max_pool3d_backward.default,
        (
            torch.ones(1, 1, 1, 1, 1),
            volume,
            [2, 2, 2],
            [1, 1, 1],
            torch.zeros(1, 1, 1, 1, 1).long(),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_tells_what_eager_gives(name: str) -> None:
    op, args = CASES[name]
    wanted = op(*args)
    got = told(op, *torch.utils._pytree.tree_map_only(Tensor, lazy, args))
    single = isinstance(wanted, Tensor)
    results = [(got, wanted)] if single else zip(got, wanted, strict=True)
    for meta, tensor in results:
        assert isinstance(meta, TensorMeta)
        assert (meta.size, meta.dtype) == (tensor.shape, tensor.dtype)
        assert meta.stride == tensor.stride()


@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)]
)
@pytest.mark.parametrize("padding_idx", [-1, 1])
@pytest.mark.parametrize("include_last", [False, True])
def test_what_an_embedding_bag_saves(
    mode: str, padding_idx: int, include_last: bool, weighted: bool
) -> None:
    """ATen's meta kernel gives other sizes."""
    number = ("sum", "mean", "max").index(mode)
    bags = torch.tensor([4, 1, 1, 0, 2]), torch.tensor([0, 2, 5])
    weights = torch.rand(5) if weighted else None
    args = (torch.randn(7, 3), *bags, False, number, False, weights, include_last, padding_idx)
    for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
        got = told(op, *torch.utils._pytree.tree_map_only(Tensor, lazy, args))
        assert [meta.size for meta in got] == [t.shape for t in op(*args)]


NORMS: dict[str, Callable[[Tensor, Tensor | None], tuple[Overload, tuple[Any, ...]]]] = {
    "layer": lambda x, w: (aten.native_layer_norm.default, (x, [4], w, w, 1e-5)),
    "group": lambda x, w: (aten.native_group_norm.default, (x, w, w, 2, 4, 4, 2, 1e-5)),
    "batch": lambda x, w: (
        aten.native_batch_norm.default,
        (
            x,
            w,
            w,
            None if w is None else w.clone(),
            None if w is None else w.clone(),
            True,
            0.1,
            1e-5,
        ),
    ),
    "batch with update": lambda x, w: (
        aten._batch_norm_with_update.default,
        (
            x,
            *(torch.ones((4,), dtype=x.dtype if w is None else w.dtype) for _ in range(4)),
            0.1,
            1e-5,
        ),
    ),
    "batch without statistics": lambda x, w: (
        aten._native_batch_norm_legit.no_stats,
        (x, w, w, True, 0.1, 1e-5),
    ),
}


DTYPES_OF_NORMS = [
    (dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.half, torch.float64)
]
DTYPES_OF_NORMS += [(torch.bfloat16, torch.float32), (torch.half, torch.float32)]


@pytest.mark.parametrize(
    ("dtype", "of_weight"), [*DTYPES_OF_NORMS, (torch.bfloat16, None), (torch.half, None)]
)
@pytest.mark.parametrize("name", NORMS)
def test_what_a_norm_saves(name: str, dtype: torch.dtype, of_weight: torch.dtype | None) -> None:
    """ATen's meta kernels give other dtypes for the mean than the CPU's."""
    weight = None if of_weight is None else torch.ones((4,), dtype=of_weight)
    op, args = NORMS[name](torch.ones(2, 4, 4, dtype=dtype), weight)
    got = told(op, *torch.utils._pytree.tree_map_only(Tensor, lazy, args))
    assert [(meta.dtype, meta.size) for meta in got] == [(t.dtype, t.shape) for t in op(*args)]


@pytest.mark.parametrize(
    "op", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default]
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_a_batch_norm_saves(op: Overload, trains: bool) -> None:
    """ATen's meta kernel says that one that evaluates saves a mean, too."""
    args = (image, *[torch.ones(3) for _ in range(4)], trains, 0.1, 1e-5)
    check_sizes(op, args)


@pytest.mark.parametrize(
    "op", [aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default]
)
def test_what_a_batch_norm_that_evaluates_saves(op: Overload) -> None:
    check_sizes(op, (image, *[torch.ones(3) for _ in range(4)], 0.1, 1e-5))


def check_sizes(op: Overload, args: tuple[Any, ...]) -> None:
    got = told(op, *torch.utils._pytree.tree_map_only(Tensor, lazy, args))
    assert [meta.size for meta in got] == [t.shape for t in op(*args)]


def test_operands_may_be_metas_already() -> None:
    meta = TensorMeta.packed((2, 3), torch.float32)
    assert told(aten.t.default, meta) is TensorMeta.of((3, 2), (1, 3), 0, torch.float32)


def test_factories_are_told_from_their_arguments() -> None:
    device = ltc.lazy_device()
    assert told(aten.ones.default, [2, 3], device=device) is TensorMeta.packed(
        (2, 3), torch.float32
    )
    assert told(aten.arange.default, 5, device=device).dtype is torch.int64


@pytest.mark.usefixtures("empty_cache")
def test_factories_make_and_draw_nothing() -> None:
    before = torch.get_rng_state()
    drawn = told(aten.randperm.generator, 6, generator=None, dtype=torch.int64)
    assert isinstance(drawn, TensorMeta) and torch.equal(torch.get_rng_state(), before)
    made = told(aten.ones.default, [1 << 50], dtype=torch.float32)  # more than any machine has
    assert made == TensorMeta.packed((1 << 50,), torch.float32)


def test_nothing_is_recorded_or_run() -> None:
    from ltc_core.runtime.devices import context

    t = lazy(x)
    told(aten.mm.default, t, lazy(x.t()))
    assert not context(0).trace


# -- what cannot be told ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda t: told(aten.nonzero.default, t),
        lambda t: told(aten.masked_select.default, t, lazy(x > 0)),
        lambda t: told(aten.to_sparse.default, t),
    ],
    ids=["nonzero", "masked_select", "a sparse result"],
)
def test_results_that_depend_on_values_are_unknown(call: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Unknown):
        call(lazy(x))


def test_a_wrong_call_is_unknown_with_atens_reason_as_cause() -> None:
    with pytest.raises(Unknown, match="reduction dim|cannot be multiplied") as unknown:
        told(aten.mm.default, lazy(x), lazy(x))
    assert isinstance(unknown.value.__cause__, RuntimeError)
    with pytest.raises(Unknown) as unknown:
        told(aten.sum.dim_IntList, lazy(x), [7])
    assert isinstance(unknown.value.__cause__, IndexError)


GROUPED = {
    "rows and matrices": ((12, 8), (3, 8, 16)),
    "matrices and columns": ((3, 5, 8), (8, 12)),
    "rows and columns": ((16, 12), (12, 8)),
    "matrices": ((3, 5, 8), (3, 8, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", GROUPED.values(), ids=GROUPED)
def test_products_of_groups_of_rows(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype
) -> None:
    """ATen's kernel for `meta` takes bfloat16 only."""
    a, b = (torch.randn(size).to(dtype) for size in sizes)
    ends = None if a.dim() == 3 == b.dim() else torch.tensor([4, 7, 12], dtype=torch.int32)
    try:
        eager = aten._grouped_mm.default(a, b, ends)
    except (RuntimeError, NotImplementedError) as refused:
        pytest.skip(f"this PyTorch refuses it: {str(refused).splitlines()[0]}")
    lazy_ends = None if ends is None else lazy(ends)
    assert told(aten._grouped_mm.default, lazy(a), lazy(b), lazy_ends) == TensorMeta.like(eager)


# -- calls like an earlier one ---------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, empty_cache: dict[Any, Any]) -> list[Any]:
    """Counts the calls that were not known: each asks ATen."""
    asked: list[Any] = []
    ask = infer_module._run_on_meta

    def counted(schema: OpSchema, args: Any, kwargs: Any) -> Any:
        asked.append(schema)
        return ask(schema, args, kwargs)

    monkeypatch.setattr(infer_module, "_run_on_meta", counted)
    return asked


def test_a_call_like_an_earlier_one_asks_nothing(runs: list[Any]) -> None:
    first = told(aten.add.Tensor, lazy(x), lazy(x), alpha=2.0)
    again = told(aten.add.Tensor, lazy(x), lazy(x), alpha=3.0)  # another value of the same type
    assert again is first
    assert len(runs) == 1


def test_what_is_unknown_is_asked_once(runs: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(Unknown) as unknown:
            told(aten.nonzero.default, lazy(x))
        assert isinstance(unknown.value.__cause__, NotImplementedError)
    assert len(runs) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: told(aten.add.Tensor, lazy(x.t()), lazy(x.t()), alpha=2.0),
        lambda: told(aten.add.Tensor, lazy(x.double()), lazy(x), alpha=2.0),
        lambda: told(aten.add.Tensor, lazy(x), lazy(x), alpha=2),
        lambda: told(aten.add.Tensor, lazy(x), lazy(x)),
        lambda: told(aten.sub.Tensor, lazy(x), lazy(x), alpha=2.0),
    ],
    ids=["strides", "dtype", "type of a number", "no number", "op"],
)
def test_a_call_that_differs_is_asked_for(runs: list[Any], other: Callable[[], Any]) -> None:
    told(aten.add.Tensor, lazy(x), lazy(x), alpha=2.0)
    other()
    assert len(runs) == 2


def test_equal_numbers_of_other_types_are_other_calls(empty_cache: dict[Any, Any]) -> None:
    for _ in range(2):
        for end, dtype in ((6, torch.int64), (6.0, torch.float32), (True, torch.int64)):
            assert told(aten.arange.default, end, device="meta").dtype is dtype
        for number, dtype in ((1, torch.int64), (1.0, torch.float32), (1j, torch.complex64)):
            assert told(aten.mul.Tensor, lazy(rows), number).dtype is dtype


def test_the_default_dtype_is_part_of_the_question(empty_cache: dict[Any, Any]) -> None:
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert told(aten.div.Tensor, lazy(rows), lazy(rows)).dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_what_is_remembered_does_not_grow_for_ever(
    empty_cache: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer_module, "_CACHE_SIZE", 10)
    for n in range(35):
        told(aten.ones.default, [n], device="meta")
        assert len(empty_cache) <= 10
    assert told(aten.ones.default, [34], device="meta").size == (34,)


def test_typed_tells_apart_what_compares_equal() -> None:
    assert typed(6) != typed(6.0)
    assert typed(1) != typed(True)
    assert typed([1, 2]) != typed([1, 2.0])
    assert typed([1, (2, None)]) == typed((1, [2, None]))
    assert hash(typed([1, [2.5]])) == hash(typed((1, (2.5,))))


@pytest.fixture(autouse=True)
def _no_pending_work() -> Iterator[None]:
    yield
    ltc.mark_step()


# -- ops on lists ----------------------------------------------------------------------------------

_A, _B = (
    [torch.randn(2, 3), torch.randn(4)],
    [torch.randn(2, 3).t().contiguous().t(), torch.randn(4)],
)
_INTS = [torch.ones(2, 3, dtype=torch.int64), torch.ones(4, dtype=torch.int64)]
LISTS: dict[str, tuple[Overload, tuple[Any, ...]]] = {
    "two lists and a number": (aten._foreach_add_.List, (_A, _B)),
    "three lists": (aten._foreach_addcmul_.Scalar, (_A, _B, _B, 2)),
    "numbers": (aten._foreach_addcdiv_.ScalarList, (_A, _B, _B, [1.0, 2])),
    "an integer": (aten._foreach_mul_.Scalar, (_A, True)),
    "another number of tensors": (aten._foreach_add_.List, (_A, _B[:1])),
    "another number of numbers": (aten._foreach_mul_.ScalarList, (_A, [1.0])),
    "other sizes": (aten._foreach_add_.List, (_A, [_B[1], _B[0]])),
    "sizes that are broadcast": (aten._foreach_add_.List, (_A, [torch.ones(1, 3), _B[1]])),
    "a larger dtype": (aten._foreach_add_.List, (_A, [t.double() for t in _B])),
    "a complex number": (aten._foreach_mul_.Scalar, (_A, 1j)),
    "integers and a fraction": (aten._foreach_mul_.Scalar, (_INTS, 1.5)),
    "integers and an integer": (aten._foreach_mul_.Scalar, (_INTS, 2)),
    "no tensor": (aten._foreach_mul_.Scalar, ([], 2.0)),
}


@pytest.mark.parametrize("case", LISTS)
def test_lists_that_are_written_are_taken_or_refused_as_in_eager(case: str) -> None:
    op, args = LISTS[case]
    device = ltc.lazy_device()
    lazy = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, args)
    eager = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, args)
    try:
        op(*eager)
    except Exception as error:
        with pytest.raises(type(error)):
            op(*lazy)
            ltc.mark_step()
        return
    op(*lazy)
    for ours, theirs in zip(lazy[0], eager[0], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)
