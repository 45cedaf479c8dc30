"""`torch.export` of modules and arguments on the device: the program has the tensors of the device, and runs there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ltc_core as ltc
from ltc_core.api.torch_export import cpu_module

device = pytest.fixture(lambda: ltc.lazy_device())


class Model(nn.Module):
    """A module with all kinds of tensors: weights, a tied one, buffers, constants, and one made in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: Tensor, more: dict[str, Tensor], power: int = 2) -> tuple[Tensor, Tensor]:
        y = self.norm(self.second(self.first(x))) * self.scale + more["bias"]
        y = y + torch.arange(3, device=x.device) + torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return y**power, y.relu()


def exported(device: torch.device) -> tuple[Any, Model, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = Model().eval().to(device)
    args = torch.randn(4, 3).to(device), {"bias": torch.ones(3).to(device)}
    free = ({0: torch.export.Dim("batch", min=2)}, {"bias": None})
    return torch.export.export(model, args, dynamic_shapes=free), model, args


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # PyTorch's own
def test_it_runs_on_the_device(device: torch.device) -> None:
    program, model, args = exported(device)
    assert program.state_dict["first.weight"] is model.first.weight
    assert program.example_inputs[0][0] is args[0]
    core = program.run_decompositions()
    other = torch.randn(7, 3).to(device), args[1]
    for each in (program, core):
        assert isinstance(each, torch.export.ExportedProgram)
        for given in (args, other):
            for found, wanted in zip(each.module()(*given), model(*given), strict=True):
                torch.testing.assert_close(found, wanted)
    assert model.first.weight is model.second.weight and model.first.weight.device == device
    assert core.state_dict["first.weight"] is model.first.weight


def test_its_weights_learn(device: torch.device) -> None:
    program, model, args = exported(device)
    program.module()(*args)[0].sum().backward()
    assert model.first.weight.grad is not None


def test_nothing_runs_meanwhile(device: torch.device) -> None:
    x = torch.ones(3, device=device) * 3
    before = (
        ltc.metrics.counter_value("UncachedCompile"),
        ltc.metrics.counter_value("CachedCompile"),
    )
    torch.export.export(nn.ReLU(), (x,))
    after = ltc.metrics.counter_value("UncachedCompile"), ltc.metrics.counter_value("CachedCompile")
    assert before == after


def test_the_module_comes_back_after_an_error(device: torch.device) -> None:
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model = Branch(3, 3).to(device)
    weight = model.weight
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(model, (torch.ones(3, device=device),))
    assert model.weight is weight and weight.device == device


def test_the_module_of_the_trace_is_on_the_cpu(device: torch.device) -> None:
    program, model, args = exported(device)
    module = cpu_module(program).cpu()
    found = module(args[0].cpu(), {"bias": args[1]["bias"].cpu()})
    torch.testing.assert_close(found[0], model.cpu()(args[0].cpu(), {"bias": torch.ones(3)})[0])


def test_what_is_on_the_cpu_is_as_before() -> None:
    model = nn.Linear(3, 3)
    program = torch.export.export(model, (torch.ones(2, 3),))
    assert type(program) is torch.export.ExportedProgram
    assert program.module()(torch.ones(2, 3)).device.type == "cpu"


def test_what_is_no_module_is_refused_as_by_pytorch() -> None:
    with pytest.raises(ValueError, match="instance of `torch.nn.Module`"):
        torch.export.export(lambda x: x, (torch.ones(2),))  # type: ignore[arg-type]
