"""Metadata of a call that is known for other sizes: what eager gives, and nothing is asked of ATen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ltc_core as ltc
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import OpSchema
from ltc_core.shapes import shape_inference, size_rules
from ltc_core.shapes.shape_inference import Unknown, infer

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]


FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def r(*size: int) -> Tensor:
    return torch.rand(size)


def whole(*size: int, below: int = 2) -> Tensor:
    return torch.randint(below, size)


def norm(x: Tensor) -> tuple[Tensor, Tensor]:
    return aten.native_layer_norm.default(x, x.shape[-1:], None, None, 1e-5)[1:]


CASES: dict[str, Callable[[int, int, int], Call]] = {
    "mm": lambda a, b, c: (aten.mm.default, (r(a, b), r(b, c))),
    "mm of a transposed": lambda a, b, c: (aten.mm.default, (r(b, a).t(), r(c, b).t())),
    "addmm": lambda a, b, c: (aten.addmm.default, (r(c), r(a, b), r(c, b).t())),
    "linear": lambda a, b, c: (aten.linear.default, (r(a, 2, b), r(c, b), r(c))),
    "linear without a bias": lambda a, b, c: (aten.linear.default, (r(a, b), r(c, b))),
    "addmm of a matrix": lambda a, b, c: (aten.addmm.default, (r(a, c), r(a, b), r(b, c))),
    "bmm": lambda a, b, c: (aten.bmm.default, (r(a, b, c), r(a, b, c).transpose(1, 2))),
    "baddbmm": lambda a, b, c: (
        aten.baddbmm.default,
        (r(a, b, b), r(a, b, c), r(a, b, c).transpose(1, 2)),
    ),
    "sum": lambda a, b, c: (aten.sum.dim_IntList, (r(a, b, c), [0, -1])),
    "sum that keeps dims": lambda a, b, c: (aten.sum.dim_IntList, (r(a, b, c), [1], True)),
    "sum of all": lambda a, b, c: (aten.sum.dim_IntList, (r(a, b, c), None)),
    "sum of integers": lambda a, b, c: (aten.sum.dim_IntList, (whole(a, b, c), [1])),
    "mean": lambda a, b, c: (aten.mean.dim, (r(a, b, c), [-1], True)),
    "prod": lambda a, b, c: (aten.prod.dim_int, (r(a, b, c), 1)),
    "amax": lambda a, b, c: (aten.amax.default, (r(a, b, c), [1])),
    "softmax": lambda a, b, c: (aten._softmax.default, (r(a, b, c), -1, False)),
    "softmax of a permuted": lambda a, b, c: (
        aten._softmax.default,
        (r(a, b, c).permute(2, 0, 1), 1, False),
    ),
    "log_softmax's gradient": lambda a, b, c: (
        aten._log_softmax_backward_data.default,
        (r(a, b), r(a, b), 1, torch.float32),
    ),
    "cumsum": lambda a, b, c: (aten.cumsum.default, (r(a, b), 1)),
    "clone": lambda a, b, c: (aten.clone.default, (r(a, b, c).permute(1, 2, 0),)),
    "layer_norm": lambda a, b, c: (
        aten.native_layer_norm.default,
        (r(a, b, 4), [4], r(4), r(4), 1e-5),
    ),
    "layer_norm's gradient": lambda a, b, c: (
        aten.native_layer_norm_backward.default,
        (x := r(a, b, 4), x, [4], *norm(x), r(4), r(4), [True, True, True]),
    ),
    "layer_norm's gradient in part": lambda a, b, c: (
        aten.native_layer_norm_backward.default,
        (x := r(a, b, 4), x, [4], *norm(x), r(4), None, [False, True, False]),
    ),
    "nll_loss": lambda a, b, c: (
        aten.nll_loss_forward.default,
        (r(a, b), whole(a), None, 1, -100),
    ),
    "nll_loss of each": lambda a, b, c: (
        aten.nll_loss_forward.default,
        (r(a, b), whole(a), r(b), 0, -100),
    ),
    "nll_loss's gradient": lambda a, b, c: (
        aten.nll_loss_backward.default,
        (r(), r(a, b), whole(a), None, 1, -100, torch.tensor(1.0)),
    ),
    "index_select": lambda a, b, c: (aten.index_select.default, (r(a, b, 3), 1, whole(c))),
    "index_select of a transposed": lambda a, b, c: (
        aten.index_select.default,
        (r(a, b).t(), -1, whole(c)),
    ),
    "index_copy": lambda a, b, c: (aten.index_copy.default, (r(a, b), 0, whole(c), r(c, b))),
    "embedding": lambda a, b, c: (aten.embedding.default, (r(9, 4), whole(a, b))),
    "embedding's gradient": lambda a, b, c: (
        aten.embedding_dense_backward.default,
        (r(a, b, 4), whole(a, b), 9, -1, False),
    ),
    "stack": lambda a, b, c: (aten.stack.default, ([r(a, b)] * 3, -1)),
    "cat": lambda a, b, c: (aten.cat.default, ([r(a, b), r(a, c)], 1)),
    "cat of integers and floats": lambda a, b, c: (aten.cat.default, ([r(a, b), whole(c, b)],)),
    "mm with gaps": lambda a, b, c: (aten.mm.default, (r(a, 2 * b)[:, ::2].t(), r(a, c))),
    "embedding of a part": lambda a, b, c: (
        aten.embedding.default,
        (r(9, 4), whole(a, b + 1)[:, 1:]),
    ),
    "attention": lambda a, b, c: (
        FLASH,
        (*[r(a, b, 3, c, 8).select(2, k) for k in range(3)], 0.0, True),
    ),
    "attention of heads that share keys": lambda a, b, c: (
        FLASH,
        (r(a, 4, b, 8), r(a, 2, c, 8), r(a, 2, c, 8)),
    ),
    "attention of transposed": lambda a, b, c: (
        FLASH,
        (*[r(a, c, b, 24)[..., 8 * k : 8 * k + 8].transpose(1, 2) for k in range(3)],),
    ),
    "attention's gradient": lambda a, b, c: (
        FLASH_BACKWARD,
        (x := r(a, c, b, 8).transpose(1, 2), x, x, x, *FLASH(x, x, x), 0.0, False),
    ),
    "index": lambda a, b, c: (aten.index.Tensor, (r(a, b, c), [whole(4)])),
    "index of a dim within": lambda a, b, c: (
        aten.index.Tensor,
        (r(a, b, c), [None, whole(a + 1)]),
    ),
    "index of several dims": lambda a, b, c: (
        aten.index.Tensor,
        (r(c, a, b).permute(1, 2, 0), [whole(b, 2), whole(b, 2)]),
    ),
    "zeros": lambda a, b, c: (aten.zeros.default, ([a, b, c],)),
    "full": lambda a, b, c: (aten.full.default, ([a, b], 2.5)),
    "arange": lambda a, b, c: (aten.arange.default, (a,)),
    "view": lambda a, b, c: (aten.view.default, (r(a, b, c), [a * b, c])),
    "view of the rest": lambda a, b, c: (aten.view.default, (r(a, b, c), [b, -1])),
    "add": lambda a, b, c: (aten.add.Tensor, (r(a, b, c), r(b, c))),
    "add of a number": lambda a, b, c: (aten.add.Tensor, (whole(a, b), 1.5)),
    "add of permuted": lambda a, b, c: (
        aten.add.Tensor,
        (r(a, b, c).permute(1, 2, 0), r(a, b, c).permute(1, 2, 0)),
    ),
    "maximum of a row and a part": lambda a, b, c: (
        aten.maximum.default,
        (r(a, 4)[1, :2], r(b, 4)[:, :2]),
    ),
    "add of an element": lambda a, b, c: (aten.add.Tensor, (r(a)[1], r(b, 2)[:, 1])),
    "mul of parts of permuted": lambda a, b, c: (
        aten.mul.Tensor,
        (r(c, a, 2 * b)[..., ::2].permute(1, 2, 0), r(a, b, c)),
    ),
    "mul of parts of both orders": lambda a, b, c: (
        aten.mul.Tensor,
        (r(a, b, 2 * c)[..., 1::2], r(b, a, 2 * c)[..., ::2].transpose(0, 1)),
    ),
    "gelu of a part": lambda a, b, c: (aten.gelu.default, (r(a, b + 1, c)[:, 1:],)),
    "index of a part": lambda a, b, c: (aten.index.Tensor, (r(a, b + 1)[:, 1:], [whole(c)])),
    "index of a transposed part": lambda a, b, c: (
        aten.index.Tensor,
        (r(b + 1, a)[1:].t(), [None, whole(c, 2)]),
    ),
    "where": lambda a, b, c: (aten.where.self, (r(a, b) > 0.5, r(a, b), r())),
    "comparison": lambda a, b, c: (aten.gt.Scalar, (r(a, b), 0.5)),
}
FIRST, OTHERS = (5, 6, 7), [(7, 5, 6), (3, 2, 4), (2, 8, 3)]


def lazy(call: Call) -> tuple[OpSchema, Any]:
    op, args = call

    def moved(t: Tensor) -> Tensor:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=ltc.lazy_device())

    return OpSchema.of(op), pytree.tree_map_only(Tensor, moved, args)


def told(call: Call) -> list[Any]:
    schema, args = lazy(call)
    return metas(infer(schema, args, {}))


def metas(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that ATen is asked about."""
    run, found = shape_inference._run_on_meta, []

    def noted(schema: OpSchema, *rest: Any) -> Any:
        found.append(schema.op)
        return run(schema, *rest)

    monkeypatch.setattr(shape_inference, "_run_on_meta", noted)
    monkeypatch.setattr(shape_inference, "_cache", {})
    monkeypatch.setattr(shape_inference, "_known", size_rules.Known())
    return found


def check_as_eager(call: Call) -> None:
    op, args = call
    for got, wanted in zip(told(call), metas(op(*args)), strict=True):
        if wanted is None:
            assert got is None
        else:
            assert isinstance(got, TensorMeta)
            assert (got.size, got.stride, got.dtype) == (
                wanted.shape,
                wanted.stride(),
                wanted.dtype,
            )
            assert got.offset == 0


@pytest.mark.parametrize("name", CASES)
def test_other_sizes(name: str, asked: list[Any]) -> None:
    """The second call, and those after it, ask nothing."""
    check_as_eager(CASES[name](*FIRST))
    assert len(asked) == 1
    for sizes in OTHERS:
        check_as_eager(CASES[name](*sizes))
    assert len(asked) == 1


def test_each_rule_is_tried() -> None:
    ops = {make(*FIRST)[0] for make in CASES.values()}
    not_tried = {op.name() for op in set(size_rules._RULES) - ops}
    assert not_tried == {
        "aten::amin", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::tril", "aten::triu",
        "aten::zeros_like", "aten::ones_like", "aten::empty_like", "aten::_unsafe_view", "aten::ones",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("known", "call"),
    [
        ("mm", (aten.mm.default, (r(3, 4), r(5, 6)))),
        ("bmm", (aten.bmm.default, (r(3, 4, 5), r(2, 4, 5).transpose(1, 2)))),
        ("view", (aten.view.default, (r(3, 4, 5), [7, 9]))),
        ("add", (aten.add.Tensor, (r(3, 4, 5), r(6, 5)))),
        ("cat", (aten.cat.default, ([r(3, 4), r(5, 6)], 1))),
        ("nll_loss", (aten.nll_loss_forward.default, (r(3, 4), whole(5), None, 1, -100))),
    ],
)  # fmt: skip
def test_a_wrong_call_of_a_known_form_is_refused(known: str, call: Call, asked: list[Any]) -> None:
    told(CASES[known](*FIRST))
    with pytest.raises(Unknown):
        told(call)


@pytest.mark.parametrize(
    "call",
    [
        (aten.mm.default, (r(3, 4), r(4, 1).expand(4, 5))),
        (aten.mm.default, (r(3, 1), r(1, 6))),
        (aten.mm.default, (r(0, 4), r(4, 6))),
        (aten.mm.default, (r(3, 4).double(), r(4, 6).double())),
    ],
)
def test_another_form_is_asked_about(call: Call, asked: list[Any]) -> None:
    told(CASES["mm"](*FIRST))
    check_as_eager(call)
    assert len(asked) == 2


def test_what_the_rule_does_not_say_is_not_learned(asked: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setitem(size_rules._RULES, aten.mm.default, lambda a, b: (a[0], a[1]))
    for sizes in (FIRST, *OTHERS):
        check_as_eager(CASES["mm"](*sizes))
    assert len(asked) == 4
