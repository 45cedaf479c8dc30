"""Gradients through views and in-place writes to views are those of eager PyTorch."""

from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.tensor import lazy_tensor
from tests.core.beside_eager import beside_eager
from tests.core.view_kinds import VIEWS, Make, base_tensor


def test_through_each_view() -> None:
    for name, make in VIEWS.items():
        if name in ("view_dtype", "detach", "data"):
            continue

        def program(device: torch.device, make: Make = make) -> Any:
            x = base_tensor(device).requires_grad_()
            part = make(x * 2)
            part.square().sum().backward()
            return x.grad, part

        beside_eager(program)


def test_in_place_on_a_view_of_a_view() -> None:
    def program(device: torch.device) -> Any:
        x = torch.arange(1.0, 13.0, device=device).view(3, 4).requires_grad_()
        y = x * 1
        part = y[1:].t()[::2]
        part.mul_(3)
        y[0, :2].add_(x[1, 1:3])
        y.view(-1)[5:7] *= 2
        y.diagonal().copy_(x.sum(1))
        part[1].sub_(y[0, 0].detach())
        (y.square() * torch.arange(12.0, device=device).view(3, 4)).sum().backward()
        return x.grad, y, part

    beside_eager(program)


@pytest.mark.parametrize("write", ["copy", "masked", "index", "transposed", "chunk"])
def test_writes(write: str) -> None:
    def program(device: torch.device) -> Any:
        x = torch.arange(1.0, 7.0, device=device).view(2, 3).requires_grad_()
        v = torch.tensor([2.0, 3.0, 4.0], device=device, requires_grad=True)
        y = x.clone()
        if write == "copy":
            y[0].copy_(v * 2)
        elif write == "masked":
            y[x > 2] = v[0]
        elif write == "index":
            y[torch.tensor([1, 0], device=device), 1] = v[:2] * 5
        elif write == "transposed":
            y.t_()[1].mul_(v[:2])
        else:
            first, second, third = y.unbind(1)[0], *y.chunk(3, 1)[1:]
            second.mul_(v[1])
            return second, third, first, x, v
        (y * y).sum().backward()
        return x.grad, v.grad, y

    if write == "chunk":  # eager refuses to write one of several outputs of unbind or chunk
        for device in (torch.device("cpu"), ltc.lazy_device()):
            with pytest.raises(RuntimeError, match="multiple views|is a view and is being"):
                program(device)
    else:
        beside_eager(program)


def test_a_leaf_cannot_be_written() -> None:
    for device in (torch.device("cpu"), ltc.lazy_device()):
        x = torch.zeros(2, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            x[0] = 1
        with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
            x[:1].add_(1)


def test_a_saved_value_that_was_written_is_noticed() -> None:
    for device in (torch.device("cpu"), ltc.lazy_device()):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_version_counters() -> None:
    def program(device: torch.device) -> Any:
        x = torch.zeros(4, device=device)
        part, apart = x[1:3], x.detach()
        x.add_(1)
        part.mul_(2)
        return x._version, part._version, apart._version, part._is_view(), part._base is x

    beside_eager(program)


def test_a_tensor_of_inference_mode_is_detached_in_place() -> None:
    def program(device: torch.device) -> Any:
        with torch.inference_mode():
            x = torch.ones(2, device=device) * 3
        return [x.detach_(), x.is_inference(), x.requires_grad]

    beside_eager(program)


def test_what_has_no_views_is_detached_without_a_look_at_all_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in each step of an optimizer that takes gradients of gradients."""
    monkeypatch.setattr(lazy_tensor, "alive", None)
    x = torch.ones(2, device=ltc.lazy_device(), requires_grad=True)
    (x.grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    x.grad.mul_(2)
    assert x.grad.detach_().tolist() == [6, 6]
    assert not x.grad.requires_grad


def test_a_base_is_detached_after_a_write_through_its_view() -> None:
    """What is asked of the view after that, and what is done with it, is as in eager."""

    def program(device: torch.device) -> Any:
        found: list[Any] = []
        for view in (lambda t: t[None], lambda t: t.view(2, 1), lambda t: t[0:1], lambda t: t):
            x = torch.ones(2, device=device, requires_grad=True)
            base = x * 3
            part = view(base)
            part[0] = 2.0
            base.detach_()
            out = (part * 2).sum()
            found += [base.requires_grad, base.is_leaf, part.requires_grad, out.requires_grad]
            if out.requires_grad:
                out.backward()
            base.mul_(2)
            found += [x.grad is None, part.detach(), out.detach(), base]
        return found

    beside_eager(program)
