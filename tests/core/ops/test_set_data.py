"""`t.data = data` between the CPU and the device, and conversions of modules whose tensors are in use."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from tests.core.beside_eager import assert_same, beside_eager


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class TestModulesInUse:
    """A graph, a hook, an optimizer or a weak reference refers to the parameters while they are converted."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.double], ids=str)
    def test_another_dtype_between_forward_and_backward(self, dtype: torch.dtype) -> None:
        def program(device: torch.device) -> Any:
            model = net().to(device)
            found: list[Any] = []
            for _ in range(4):
                x = torch.ones(2, 3, device=device, requires_grad=True)
                out = model(x).sum()
                parameters = list(model.parameters())
                model.to(dtype)
                assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
                out.backward()
                found.append([p.grad for p in parameters] + [x.grad, out])
                found.append([p.detach() for p in parameters])
                model.float().zero_grad()
                if device.type != "cpu":
                    ltc.mark_step()
            return found

        beside_eager(program, rtol=1e-6, atol=1e-7)

    def test_to_the_device_and_back(self, device: torch.device) -> None:
        model = net()
        x = torch.ones(2, 3)
        parameters = [weakref.ref(p) for p in model.parameters()]
        kept = model(x).sum()
        expected = torch.autograd.grad(kept, list(model.parameters()), retain_graph=True)
        model.to(device)
        assert all(p() is q for p, q in zip(parameters, model.parameters(), strict=True))
        moved = model(x.to(device)).sum()
        model.cpu()
        assert all(p() is q for p, q in zip(parameters, model.parameters(), strict=True))
        assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())
        moved.backward()  # each graph has what it was made with
        assert_same([p.grad.cpu() for p in model.parameters()], list(expected), 1e-5, 1e-6)
        model.zero_grad()
        kept.backward()
        assert_same([p.grad for p in model.parameters()], list(expected))

    def test_hooks_and_optimizers_stay(self) -> None:
        def program(device: torch.device) -> Any:
            model = net()
            seen: list[str] = []
            model[0].weight.register_hook(lambda g: seen.append("tensor"))
            model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("grad"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for where in (device, torch.device("cpu"), device):
                model.to(where)
                loss = model(torch.ones(2, 3, device=where)).square().sum()
                loss.backward()
                optimizer.step()
                for state in optimizer.state.values():
                    state["momentum_buffer"] = state["momentum_buffer"].cpu()
                optimizer.state.clear()
            return seen, [p.detach() for p in model.parameters()]

        beside_eager(program, rtol=1e-5, atol=1e-6)

    def test_gradients_stay_the_same_objects(self) -> None:
        def program(device: torch.device) -> Any:
            model = net()
            model(torch.ones(2, 3)).sum().backward()
            gradients = [p.grad for p in model.parameters()]
            model.to(device, torch.float64)
            assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
            assert all(g.device == device for g in gradients)
            return gradients

        beside_eager(program)

    def test_pytorch_s_two_other_ways_to_convert(self, device: torch.device) -> None:
        future = torch.__future__
        model = net()
        parameters = list(model.parameters())
        future.set_swap_module_params_on_conversion(True)
        try:
            kept = model(torch.ones(2, 3))
            with pytest.raises(RuntimeError, match="Couldn't swap"):
                model.to(device)
            del kept
            model.to(device)
            kept = model(torch.ones(2, 3, device=device))
            with pytest.raises(RuntimeError, match="Couldn't swap"):
                model[2].half()
        finally:
            future.set_swap_module_params_on_conversion(False)
        assert_same(model(torch.ones(2, 3, device=device)), kept.cpu())
        assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
        future.set_overwrite_module_params_on_conversion(True)
        try:
            model.half().cpu()
        finally:
            future.set_overwrite_module_params_on_conversion(False)
        assert all(p is not q for p, q in zip(parameters, model.parameters(), strict=True))
        assert all(p.device == device and p.dtype is torch.float32 for p in parameters)
        assert_same([p.half().float() for p in parameters], [p.float() for p in model.parameters()])

    def test_in_inference_mode(self) -> None:
        def program(device: torch.device) -> Any:
            model = net()
            with torch.inference_mode():
                model.to(device).half().float()
                found = [p.is_inference() for p in model.parameters()]
                model.cpu()
            made = torch.nn.Parameter(torch.ones(2, device=device))
            with torch.inference_mode():
                made.data = torch.zeros(2, device=device)
            found.append(device.type != "cpu" or made.is_inference())
            return found[-1], [p.is_inference() for p in model.parameters()]

        beside_eager(program)


class TestTensors:
    def test_a_parameter_is_moved_by_its_data(self) -> None:
        def program(device: torch.device) -> Any:
            parameter = nn.Parameter(torch.ones(2, 2))
            parameter.data = parameter.data.to(device)
            assert parameter.device == device and isinstance(parameter, nn.Parameter)
            (parameter * 3).sum().backward()
            found = [parameter.grad, parameter.detach() * 2, parameter.is_leaf]
            copied = copy.deepcopy(parameter)
            parameter.grad = None
            parameter.data = torch.zeros(3)
            (parameter * 4).sum().backward()
            return [*found, parameter.grad, parameter, type(parameter) is nn.Parameter, copied]

        beside_eager(program)

    def test_data_is_shared_memory(self) -> None:
        def program(device: torch.device) -> Any:
            x, y = torch.ones(3), torch.zeros(2, device=device)
            x.data = y
            y.add_(5)
            x[0] = 7
            x.data = torch.arange(4.0)
            return x, y, type(x) is torch.Tensor

        beside_eager(program)

    def test_what_pytorch_refuses_changes_nothing(self) -> None:
        def program(device: torch.device) -> Any:
            parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device=device))]
            for parameter in parameters:
                for data in (
                    torch.zeros(3, dtype=torch.int64, device=device),
                    torch.zeros(1).bool(),
                ):
                    with pytest.raises(RuntimeError, match="must be floating point"):
                        parameter.data = data
            return [type(parameters[0]) is nn.Parameter, *[p * 2 for p in parameters]]

        beside_eager(
            lambda device: [
                t.detach().cpu() if isinstance(t, torch.Tensor) else t for t in program(device)
            ]
        )

    def test_a_class_of_tensors_is_refused(self, device: torch.device) -> None:
        class Marked(torch.Tensor):
            pass

        marked = torch.ones(2).as_subclass(Marked)
        with pytest.raises(ltc.errors.UnsupportedOpError, match="cannot be a Marked") as error:
            marked.to(device)
        assert "t.as_subclass(torch.Tensor).to('ltc')" in str(error.value)
        moved = marked.as_subclass(torch.Tensor).to(device)
        assert moved.as_subclass(torch.Tensor).add_(1).tolist() == moved.tolist() == [2, 2]

    def test_what_has_no_memory_with_strides_is_refused(self, device: torch.device) -> None:
        sparse = torch.eye(2).to_sparse()
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            sparse.data = torch.ones(2, 2, device=device)
        x = torch.ones(2, device=device)
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            x.data = torch.empty(2, device="meta")
        assert_same(x, torch.ones(2))


class Named(nn.Parameter):
    """A user's class of parameters."""

    def double(self) -> torch.Tensor:
        return self * 2


def test_a_class_of_parameters_comes_back_from_the_device(device: torch.device) -> None:
    model = nn.Linear(2, 1)
    model.weight = weight = Named(torch.ones(1, 2))
    for _ in range(2):
        model.to(device)
        assert model.weight is weight and isinstance(weight, nn.Parameter)
        model.cpu()
        assert type(weight) is Named and weight.double().tolist() == [[2.0, 2.0]]
