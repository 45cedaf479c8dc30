"""no_grad, inference_mode, anomaly mode: what each allows, and what comes out of it."""

from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.view_kinds import VIEWS, base_tensor


def test_no_grad_and_inference() -> None:
    def program(device: torch.device) -> Any:
        model = nn.Linear(3, 2).to(device)
        nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
        x = torch.ones(2, 3, device=device)
        with torch.no_grad():
            first = model(x)
            model.weight.add_(1)
        with torch.inference_mode():
            second = model(x)
            second += 1
            inner = second[0]
        with torch.set_grad_enabled(False), torch.enable_grad():
            third = model(x)
        assert second.is_inference() and inner.is_inference()
        return first, second.clone(), third, torch.is_grad_enabled()

    beside_eager(program)


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_parameters_in_inference_mode(name: str) -> None:
    """They can be made and read, and are views; whether autograd knows is left to PyTorch."""

    def program(device: torch.device) -> Any:
        weight = base_tensor(device).requires_grad_()
        with torch.inference_mode():
            part = VIEWS[name](weight)
            inner = VIEWS[name](weight * 2)
        with torch.no_grad():
            weight.add_(1)
        assert inner.is_inference()
        return part.detach().clone(), inner.clone(), weight

    beside_eager(program)


def test_an_inference_tensor_is_no_part_of_a_graph() -> None:
    for device in (torch.device("cpu"), ltc.lazy_device()):
        with torch.inference_mode():
            frozen = torch.ones(2, device=device)
        x = torch.ones(2, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            x * frozen
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            frozen.add_(1)
        (x + frozen.clone()).sum().backward()
        assert x.grad is not None and x.grad.sum().item() == 2


@pytest.mark.parametrize(
    "op",
    [
        torch._foreach_abs_,
        torch._foreach_zero_,
        lambda tensors: torch._foreach_add_(tensors, 1.0),
        lambda tensors: torch._foreach_mul_(tensors, tensors),
    ],
)
def test_a_list_with_an_inference_tensor_is_not_written_outside_of_it(op: Any) -> None:
    for device in (torch.device("cpu"), ltc.lazy_device()):
        with torch.inference_mode():
            frozen = torch.full((2,), -1.0, device=device)
        normal = [torch.ones(2, device=device), torch.ones(2, device=device)]
        for _ in range(4):  # the fourth time it is followed
            op(normal)
            ltc.mark_step()
        for tensors in ([frozen, frozen.clone()], [torch.ones(2, device=device), frozen]):
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                op(tensors)
        with torch.inference_mode():
            op([frozen, frozen.clone()])


def test_a_view_of_an_inference_tensor_is_one() -> None:
    views = (lambda t: t[0:1], torch.Tensor.detach, lambda t: t.as_strided((2,), (1,)), torch.t)
    for device in (torch.device("cpu"), ltc.lazy_device()):
        for view in views:
            for _ in range(4):
                view(torch.ones(2, device=device))
                ltc.mark_step()
            with torch.inference_mode():
                frozen = torch.ones(2, device=device)
            part = view(frozen)
            assert part.is_inference()
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                part[0] = 2.0


def test_a_model_trained_after_inference() -> None:
    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
        x = torch.arange(12.0, device=device).view(4, 3)
        with torch.inference_mode():
            model.eval()(x)
        model.train()(x).square().sum().backward()
        return [p.grad for p in model.parameters()], model.state_dict()

    beside_eager(program, rtol=1e-5, atol=1e-5)


def test_anomaly_mode_names_the_forward_call() -> None:
    x = torch.tensor([-1.0], device=ltc.lazy_device(), requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"):
        anomaly = torch.autograd.detect_anomaly()
    with anomaly, pytest.warns(UserWarning, match="(?s)Error detected in SqrtBackward0.*sqrt"):
        with pytest.raises(RuntimeError, match="returned nan values in its 0th output"):
            x.sqrt().sum().backward()


def test_requires_grad_asks_for_floats() -> None:
    for device in (torch.device("cpu"), ltc.lazy_device()):
        with pytest.raises(RuntimeError, match="floating point"):
            torch.arange(3, device=device).requires_grad_()
