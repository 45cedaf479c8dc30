"""Gradients through views whose sizes, or whose base's sizes, changed in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core.native_extension import Extension
from ltc_core.record import fast_path


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def numbers(*size: int, device: Any) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel(), device=device).view(size)


def of_a_view_when_its_base_is_written(b: Tensor) -> Tensor:
    v = b[0]
    v.t_()
    b.mul_(2)
    return v


def of_a_view_that_is_written(b: Tensor) -> Tensor:
    v = b[0]
    v.t_()
    v.mul_(numbers(4, 2, device=b.device))
    return b


def of_a_view_of_a_view(b: Tensor) -> Tensor:
    v = b[:2].transpose(0, 1)
    v.transpose_(-1, 0)
    v[1:].mul_(3)
    v.unsqueeze_(1)
    v.squeeze_(1)
    v[0].mul_(b.sum())
    return v


def of_a_view_without_its_ones(b: Tensor) -> Tensor:
    v = b.unsqueeze(0).unsqueeze(-1)
    v.squeeze_()
    b.mul_(numbers(3, 2, 4, device=b.device))
    return v


def of_a_view_when_its_base_is_renamed(b: Tensor) -> Tensor:
    v = b[0]
    b.transpose_(0, 2)
    return v


def of_a_base_when_its_view_is_written(b: Tensor) -> Tensor:
    v, w = b[0], b[:, 1:]
    b.transpose_(0, 2)
    b.unsqueeze_(1)
    v.mul_(numbers(2, 4, device=b.device))
    w.mul_(5)
    return b


def of_a_new_view_of_a_renamed_base(b: Tensor) -> Tensor:
    b.transpose_(0, 1)
    v = b[1]
    b.mul_(numbers(2, 3, 4, device=b.device))
    return v


PROGRAMS = (
    of_a_view_when_its_base_is_written,
    of_a_view_that_is_written,
    of_a_view_of_a_view,
    of_a_view_without_its_ones,
    of_a_view_when_its_base_is_renamed,
    of_a_base_when_its_view_is_written,
    of_a_new_view_of_a_renamed_base,
)


def gradient(program: Callable[[Tensor], Tensor], device: Any) -> Tensor:
    p = torch.ones(3, 2, 4, device=device, requires_grad=True)
    result = program(p * numbers(3, 2, 4, device=device))
    (result * numbers(*result.shape, device=device)).sum().backward()
    assert p.grad is not None
    return p.grad.cpu()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_gradient(program: Callable[[Tensor], Tensor], device: torch.device) -> None:
    torch.testing.assert_close(gradient(program, device), gradient(program, "cpu"))


def test_a_loop_that_renames_a_view_does_not_make_its_history_longer(device: torch.device) -> None:
    def program(b: Tensor) -> Tensor:
        v = b[0]
        for _ in range(15_001):  # a function of so many calls would end the stack
            with torch.no_grad():
                v.t_()
        b.mul_(2)
        return v

    torch.testing.assert_close(gradient(program, device), gradient(program, "cpu"))


def test_without_the_cpp_part_gradients_are_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = Extension("absent", Path("absent.cpp"))
    monkeypatch.setattr(without, "load", lambda: None)
    without.unavailable_reason = "no compiler was found"
    monkeypatch.setattr(fast_path, "extension", without)
    b = torch.ones(2, 3, device=device, requires_grad=True) * 2
    v = b[0]
    with pytest.raises(ltc.errors.UnsupportedOpError, match="no compiler was found") as raised:
        v.unsqueeze_(0)
    assert "x = x.unsqueeze(0)" in str(raised.value)
    assert v.shape == (3,) and v.tolist() == [2.0] * 3
    alone = b * 2
    alone.t_()
    assert alone.shape == (3, 2)
    constant = torch.ones(2, 3, device=device)[0]
    constant.unsqueeze_(0)
    assert constant.shape == (1, 3)
