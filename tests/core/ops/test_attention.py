"""Attention is one op where eager on the CPU calls flash attention, and gives its numbers to the bit."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.ops import attention
from ltc_core.ops.attention import _takes_groups
from ltc_core.record import fast_path
from tests.core.beside_eager import attempt, run_beside_eager

Tensor = torch.Tensor
FLASH = "ltc::_scaled_dot_product_flash_attention_for_cpu"


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 16, 8, generator=g).to(dtype) for _ in range(3)]


def bool_mask() -> Tensor:
    return torch.ones(16, 16, dtype=torch.bool).tril()


def attend(
    device: torch.device | str, dtype: torch.dtype, mask: Tensor | None, **options: bool
) -> list[Tensor]:
    operands = [t.to(device).requires_grad_() for t in tensors(dtype)]
    mask = None if mask is None else mask.to(device)
    out = F.scaled_dot_product_attention(*operands, attn_mask=mask, **options)
    return [
        out.detach().cpu(),
        *(g.cpu() for g in torch.autograd.grad(out.square().sum(), operands)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "mask, options",
    [
        (None, {}),
        (None, {"is_causal": True}),
        (bool_mask(), {}),
        (torch.randn(16, 16), {}),
        (torch.randn(2, 1, 16, 16), {}),
    ],
    ids=["plain", "causal", "bool", "float", "4-d"],
)
def test_it_is_flash_attention_with_eagers_numbers(
    mask: Tensor | None, options: dict[str, bool], dtype: torch.dtype
) -> None:
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(dtype)
    metrics.clear_all()
    got = attend(ltc.lazy_device(), dtype, mask, **options)
    assert metrics.counter_value(FLASH) == 1
    assert metrics.counter_value(f"{FLASH}_backward") == 1
    for a, b in zip(got, attend("cpu", dtype, mask, **options), strict=True):
        assert torch.equal(a, b)


def refused(device: str) -> list[str]:
    """Calls that are not one op of these operands: their errors, or sizes."""
    q, k, v = (t.to(device) for t in tensors())
    mask = torch.ones(16, 16, device=device)
    calls: list[Callable[[], Tensor]] = [
        lambda: F.scaled_dot_product_attention(q, k.double(), v),
        lambda: F.scaled_dot_product_attention(q, k[..., :4], v),
        lambda: F.scaled_dot_product_attention(q, k[:, :3], v),
        lambda: F.scaled_dot_product_attention(q, k, v[..., :4]),
        lambda: F.scaled_dot_product_attention(q[0], k[0], v[0]),
        lambda: F.scaled_dot_product_attention(q, k, v, mask.int()),
        lambda: F.scaled_dot_product_attention(q, k, v, mask[:3]),
        lambda: F.scaled_dot_product_attention(q, k, v, mask[:, :1], scale=0.1),
        lambda: F.scaled_dot_product_attention(q, k, v, mask.requires_grad_()),
        lambda: F.scaled_dot_product_attention(q[:0], k[:0], v[:0]),
        lambda: F.scaled_dot_product_attention(q.half(), k.half(), v.half()),
        lambda: F.scaled_dot_product_attention(q.to(torch.complex64), k, v),
    ]
    found = []
    for call in calls:
        try:
            found.append(f"{tuple(call().shape)} {call().float().sum():.3f}")
        except (RuntimeError, ValueError) as error:
            found.append(type(error).__name__ + str(error).partition("(")[0][:40])
    return found


def test_operands_that_are_not_plain_are_eagers_calls() -> None:
    on_cpu = [e if e[0] == "(" else "error" for e in refused("cpu")]
    for _ in range(3):
        assert [e if e[0] == "(" else "error" for e in refused("ltc")] == on_cpu


@pytest.mark.skipif(fast_path.extension.load() is None, reason="no C++ compiler")
def test_plain_attention_needs_no_python() -> None:
    called = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is attention._attention.__code__:
            called.append(frame)

    q, k, v = (t.to("ltc") for t in tensors())
    F.scaled_dot_product_attention(
        q, k, v
    )  # whether the device is a CPU is known at the first call
    sys.setprofile(note)
    try:
        for mask in (None, bool_mask().to("ltc")):
            F.scaled_dot_product_attention(q, k, v, mask)
        assert not called
        F.scaled_dot_product_attention(q[0], k[0], v[0])
        assert len(called) == 1
    finally:
        sys.setprofile(None)


@pytest.mark.skipif(not _takes_groups(), reason="flash attention of this PyTorch takes no groups")
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("is_masked", [False, True], ids=["plain", "masked"])
def test_heads_that_share_keys_and_values(num_groups: int, is_masked: bool) -> None:
    found = []
    for device in ("cpu", ltc.lazy_device()):
        metrics.clear_all()
        q, k, v = (t.to(device) for t in tensors())
        operands = [t.detach().requires_grad_() for t in (q, k[:, :num_groups], v[:, :num_groups])]
        mask = bool_mask().to(device) if is_masked else None
        out = F.scaled_dot_product_attention(*operands, attn_mask=mask, enable_gqa=True)
        grads = torch.autograd.grad(out.square().sum(), operands)
        found.append([t.detach().cpu() for t in (out, *grads)])
    assert metrics.counter_value(FLASH) == 1
    assert metrics.counter_value(f"{FLASH}_backward") == 1
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(ours, eager)


CASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    "3-d": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "dropout and a mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=bool_mask().to(q.device), dropout_p=0.5
    ),
    "grouped heads and dropout": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], dropout_p=0.5, enable_gqa=True
    ),
    "3-d and a mask with an empty row": lambda q, k, v: F.scaled_dot_product_attention(
        q[0], k[0], v[0], attn_mask=bool_mask().tril(-1).to(q.device)
    ),
    "other length of the keys' heads": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v[..., :4]
    ),
    "a mask with a gradient": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.zeros(16, 16, device=q.device).requires_grad_()
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_spelled_out_as_eager_does(name: str) -> None:
    results = []
    for device in ("cpu", ltc.lazy_device()):
        torch.manual_seed(3)
        metrics.clear_all()
        results.append(CASES[name](*(t.to(device) for t in tensors())).cpu())
    assert metrics.counter_value(FLASH) is None
    torch.testing.assert_close(*results)


def operands_of_all_kinds(device: torch.device) -> Any:
    """Masks of other dtypes, masks of causal attention, and operands that no device takes."""
    q = tensors()[0].to(device)
    low = q.to(torch.bfloat16)
    mask = torch.ones(16, 16, device=device)
    sdpa = F.scaled_dot_product_attention
    return [
        sdpa(low, low, low, mask),
        sdpa(q.double(), q.double(), q.double(), mask),
        sdpa(q, q, q, mask > 0, is_causal=True),
        attempt(lambda: sdpa(q, low, q)),
        attempt(lambda: sdpa(q, q, q, mask.long())),
        attempt(lambda: sdpa(q, q, q, mask.to(torch.bfloat16))),
        attempt(lambda: sdpa(q[0, 0, 0], q[0, 0, 0], q[0, 0, 0])),
        attempt(lambda: sdpa(mask[0, 0], mask[0, 0], mask[0, 0])),
    ]


def test_it_takes_and_refuses_what_eager_does() -> None:
    run_beside_eager(operands_of_all_kinds, rounds=2)
