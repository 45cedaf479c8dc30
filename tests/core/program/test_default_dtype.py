"""Ops on integers compute in the default dtype of their recording, also if it has changed when they run, op by op."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def values(device: Any) -> list[torch.Tensor]:
    i, b = torch.arange(1, 9).to(device), torch.tensor([True, False]).to(device)
    is_wide = torch.get_default_dtype().itemsize >= 4  # there is no transform in the others
    return [
        i / 3, i.sqrt(), i.log(), i.sinh(), torch.atan2(i, i + 1), i * 0.1, i.sigmoid(), i**0.3, b / 3, i.erf(),
        torch.where(i > 3, 0.1, 0.2), torch.full((2,), 0.1, device=device), torch.linspace(0, 1, 7, device=device),
        torch.arange(0, 1, 0.1, device=device), i.true_divide(7), i.view(torch.float64), i.float() / 3,
        torch.lerp(i.double(), i.double() + 1, 0.1),
        *([torch.fft.fft(i)] if is_wide else []),
    ]  # fmt: skip


@pytest.mark.parametrize("recorded", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("present", [torch.float32, torch.float64], ids=str)
def test_the_default_dtype_changes_before_the_run(
    recorded: torch.dtype, present: torch.dtype
) -> None:
    torch.set_default_dtype(recorded)
    wanted = values("cpu")
    found = values(ltc.lazy_device())
    torch.set_default_dtype(present)
    ltc.mark_step(wait=True)
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype is right.dtype
        assert torch.equal(got.cpu(), right)
