"""Strides of results as CPU kernels give them, where operands are not packed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ltc_core as ltc
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import OpSchema
from ltc_core.shapes.shape_inference import infer

aten = torch.ops.aten
Overload = torch._ops.OpOverload


def packed(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def last(*shape: int) -> Tensor:
    """Channels last, for any number of dims."""
    order = (0, *range(2, len(shape)), 1)
    return packed(*[shape[d] for d in order]).permute(0, len(shape) - 1, *range(1, len(shape) - 1))


def turned(*shape: int) -> Tensor:
    return packed(*shape[::-1]).permute(*reversed(range(len(shape))))


def places(t: Tensor) -> list[int]:
    """Strides of the dims that have any."""
    return [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1]


def lazy(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=ltc.lazy_device())


def check(op: Overload, *args: Any, **kwargs: Any) -> None:
    """The metas that are inferred lead to the same addresses as the results that the kernel gives."""
    wanted = pytree.tree_leaves(op(*args, **kwargs))
    told = infer(OpSchema.of(op), *pytree.tree_map_only(Tensor, lazy, (args, kwargs)))
    got = pytree.tree_leaves(told, is_leaf=lambda item: isinstance(item, TensorMeta))
    for meta, t in zip(got, wanted, strict=True):
        if isinstance(t, Tensor):
            assert meta.size == t.shape
            assert places(meta.meta_tensor()) == places(t), (meta.stride, t.stride())


stats = (torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3))
unfolded = packed(4).unfold(0, 3, 1)


def normed(x: Tensor) -> None:
    check(aten.native_batch_norm.default, x, *stats, True, 0.1, 1e-5)


CASES: dict[str, Callable[[], None]] = {
    "parts of one vector that overlap": lambda: check(aten.fmax.default, packed(2, 3), unfolded),
    "only parts that overlap": lambda: check(aten.logaddexp.default, unfolded, unfolded),
    "a broadcast operand": lambda: check(aten.logical_and.default, packed(4, 1, 3), turned(4, 3)),
    "another broadcast operand": lambda: check(aten.xlogy.Tensor, packed(5, 4, 3), turned(4, 3)),
    "equal strides": lambda: check(
        aten.heaviside.default, packed(9).as_strided((3, 2), (1, 1)), packed(3, 2)
    ),
    "a number to the power": lambda: check(aten.pow.Scalar, 2, turned(4, 3)),
    "a divisor of no dims": lambda: check(aten.div.Tensor_mode, turned(4, 3), packed(), rounding_mode="floor"),
    "an expanded operand": lambda: check(aten.copysign.Tensor, packed(4, 1).expand(4, 3), turned(4, 3)),
    "gaps": lambda: check(aten.fmin.default, packed(4, 6)[:, ::2], turned(4, 3)),
    "integers": lambda: check(aten.floor_divide.default, turned(4, 3).long() + 1, turned(4, 3).long() + 2),
    "an integer and a float": lambda: check(aten.floor_divide.default, turned(4, 3).int(), packed()),
    "a huge operand": lambda: check(aten.logical_or.default, turned(300, 400), packed(400)),
    "gradients of losses": lambda: check(
        aten.smooth_l1_loss_backward.default, packed(), turned(4, 3), turned(4, 3), 1, 1.0
    ),
    "gradients of activations": lambda: check(aten.hardswish_backward.default, packed(4, 3), turned(4, 3)),
    "two results": lambda: check(aten.log_sigmoid_forward.default, turned(4, 3)),
    "batch norm of turned rows": lambda: normed(last(4, 3, 5)),
    "batch norm of images": lambda: normed(last(2, 3, 4, 4)),
    "batch norm of many images": lambda: normed(last(9, 3, 64, 64)),
    "batch norm without statistics": lambda: check(
        aten.native_batch_norm_backward.default,
        *(packed(2, 3, 4, 4), last(2, 3, 4, 4), *stats[:1], *stats[2:], packed(0), packed(0), False, 0.1, [True] * 3),
    ),
    "pads": lambda: check(aten.replication_pad2d.default, last(2, 3, 4, 4), [1, 1, 0, -1]),
    "unpooled": lambda: check(aten.max_unpool2d.default, last(2, 3, 2, 2), (last(2, 3, 2, 2) * 0).long(), [4, 4]),
    "pooled": lambda: check(aten.max_pool2d_with_indices.default, last(2, 3, 4, 4), [2, 2]),
    "resized": lambda: check(aten.upsample_nearest2d.vec, last(2, 3, 4, 4), None, [2.0, 2.0]),
    "shuffled": lambda: check(aten.pixel_shuffle.default, last(2, 8, 2, 2), 2),
    "gradient of a softmax": lambda: check(
        aten._log_softmax_backward_data.default, turned(4, 3), packed(4, 3), 1, torch.float32
    ),
    "a transform of two dims": lambda: check(aten._fft_r2c.default, packed(5, 6, 7), [0, 1, 2], 0, True),
    "singular vectors": lambda: check(aten._linalg_svd.default, packed(3, 4)),
    "draws": lambda: check(aten.normal.Tensor_Tensor, turned(4, 3), turned(4, 3)),
    "a product": lambda: check(aten.mm.default, packed(4, 3), turned(3, 5)),
    "nothing": lambda: check(aten.fmax.default, packed(0, 3), turned(0, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_strides_that_eager_gives(name: str) -> None:
    CASES[name]()


CONVOLUTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "of images": (2, {}),
    "of rows": (1, {}),
    "of volumes": (3, {}),
    "grouped": (2, {"groups": 2}),
    "transposed": (2, {"transposed": True}),
    "transposed rows": (1, {"transposed": True}),
    "with holes": (2, {"dilation": 2}),
    "of doubles": (2, {"dtype": torch.float64}),
    "of one image": (2, {"batch": 1}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_have_the_memory_format_of_their_kernel(name: str) -> None:
    dims, kind = CONVOLUTIONS[name]
    dtype, groups = kind.get("dtype", torch.float32), kind.get("groups", 1)
    settings = (
        [1] * dims, [1] * dims, [kind.get("dilation", 1)] * dims, kind.get("transposed", False), [0] * dims, groups,
    )  # fmt: skip
    for of_input in (packed, last, turned):
        for of_weight in (packed, last):
            x = of_input(kind.get("batch", 2), 4, *[5] * dims).to(dtype)
            weight = of_weight(4, 4 // groups, *[3] * dims).to(dtype)
            bias = torch.ones(4, dtype=dtype)
            check(aten.convolution.default, x, weight, bias, *settings)
            check(aten.convolution.default, x, weight, None, *settings)
            out = aten.convolution.default(x, weight, bias, *settings)
            for grad in (out, out.contiguous(), turned(*out.shape).to(dtype)):
                check(
                    aten.convolution_backward.default, grad, x, weight, [4], *settings, [True] * 3
                )
    ltc.mark_step()
