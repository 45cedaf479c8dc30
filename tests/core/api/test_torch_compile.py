"""`torch.compile` in scripts as they are: what works on tensors of the device is recorded, other calls are compiled."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop

import ltc_core as ltc
from ltc_core.api import torch_compile

device = pytest.fixture(lambda: ltc.lazy_device())
Step = Callable[[torch.Tensor], torch.Tensor]
compiled: list[torch.fx.GraphModule] = []  # what PyTorch's compiler was given


def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    compiled.append(graph)
    return graph.forward  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    compiled.clear()
    torch_compile._tell.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.compile does nothing on ltc")
        warnings.filterwarnings("ignore", "`torch.jit.script")  # of PyTorch itself
        yield
    torch._dynamo.reset()


def make(device: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def steps(called: nn.Module, optimizer: torch.optim.Optimizer, device: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = called(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def a_module(device: Any, **options: Any) -> Step:
    model, optimizer = make(device)
    return steps(torch.compile(model, **options), optimizer, device)


def compiled_in_place(device: Any) -> Step:
    model, optimizer = make(device)
    model.compile(backend=backend)
    return steps(model, optimizer, device)


def a_step_that_names_its_model(device: Any) -> Step:
    model, optimizer = make(device)
    return torch.compile(backend=backend)(steps(model, optimizer, device))


def a_method_of_a_trainer(device: Any) -> Step:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = make(device)

        @torch.compile(backend=backend)
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x.to(device)).square().mean()

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(x)
            loss.backward()
            torch.compile(self.optimizer.step, backend=backend)()
            return loss.detach()

    return Trainer().step


def train(step: Step) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        losses.append(step(torch.randn(4, 6)))
        ltc.mark_step()
    return [loss.item() for loss in losses]


PLAIN = train(a_module("cpu", disable=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fullgraph": True, "dynamic": True},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
        {"backend": "openxla"},
        {"backend": "aot_eager"},
    ],
    ids=str,
)
def test_a_module_with_all_options(options: dict[str, Any], device: torch.device) -> None:
    assert train(a_module(device, **options)) == pytest.approx(PLAIN, rel=1e-5)


@pytest.mark.parametrize(
    "make_step", [compiled_in_place, a_step_that_names_its_model, a_method_of_a_trainer]
)
def test_other_ways_to_compile(make_step: Callable[[Any], Step], device: torch.device) -> None:
    assert train(make_step(device)) == pytest.approx(PLAIN, rel=1e-5)
    assert not compiled


def test_what_is_not_on_the_device_is_compiled(device: torch.device) -> None:
    assert train(a_module("cpu", backend=backend)) == pytest.approx(PLAIN, rel=1e-5)
    assert compiled
    compiled.clear()

    @torch.compile(backend=backend)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    on_device = torch.ones(3, device=device)
    assert twice(on_device).tolist() == [2.0] * 3 and not compiled
    assert twice(torch.ones(3)).tolist() == [2.0] * 3 and compiled
    assert twice(on_device).tolist() == [2.0] * 3


def test_the_module_is_pytorchs_and_may_be_copied_moved_and_saved(device: torch.device) -> None:
    model, _ = make("cpu")
    x = torch.randn(4, 6)
    wanted = model(x)
    called = torch.compile(model, backend=backend)
    assert isinstance(called, torch._dynamo.eval_frame.OptimizedModule)
    assert list(called.state_dict()) == [f"_orig_mod.{name}" for name in model.state_dict()]
    assert torch.equal(called(x), wanted) and compiled
    compiled.clear()
    seen = []
    called.register_forward_hook(lambda *args: seen.append(args[2].device.type))
    called.to(device)
    copied = copy.deepcopy(called)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for each in (called, copied, called.train(False)):
        torch.testing.assert_close(each(x.to(device)).cpu(), wanted)
    assert not compiled and set(seen) == {device.type}
    file.seek(0)
    copied._orig_mod.load_state_dict(torch.load(file, map_location=device))


def test_an_exported_program_runs_on_the_device(device: torch.device) -> None:
    model, _ = make("cpu")
    x = torch.randn(4, 6)
    wanted = model(x)
    exported = (
        torch.export.export(model, (x,)).module().to(device)
    )  # with the parameters of the model
    torch.testing.assert_close(exported(x.to(device)).cpu(), wanted)


def test_it_is_told_once(device: torch.device) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(a_module(device, backend=backend))
        train(compiled_in_place(device))
    assert [str(w.message) for w in told if "torch.compile" in str(w.message)] == [
        "torch.compile does nothing on ltc: a step is recorded and compiled as a whole anyway"
    ]


def test_control_flow_of_pytorch_has_gradients_of_what_it_captures(device: torch.device) -> None:
    x = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    scale = torch.tensor(3.0, device=device, requires_grad=True)
    for pred, to_x, to_scale in ((True, [3.0, 3.0], 3.0), (False, [1.0, 1.0], None)):
        x.grad = scale.grad = None
        taken = torch.tensor(pred, device=device)
        torch.cond(taken, lambda x: x * scale, lambda x: x + 1, (x,)).sum().backward()
        assert x.grad is not None and x.grad.tolist() == to_x
        assert (None if scale.grad is None else scale.grad.item()) == to_scale
    x.grad = scale.grad = None
    start = torch.tensor(0, device=device), x
    count, out = torch_while_loop(lambda k, v: k < 3, lambda k, v: (k + 1, v * scale), start)
    out.sum().backward()
    assert count.item() == 3 and x.grad.tolist() == [27.0, 27.0] and scale.grad.item() == 81.0


def looped(device: Any) -> list[torch.Tensor]:
    x = torch.arange(6.0, device=device).view(3, 2).requires_grad_()
    scale = torch.tensor(3.0, device=device, requires_grad=True)

    def add(carry: Any, x: Any) -> Any:
        total = carry["total"] * 0.5 + x * scale
        return {"total": total}, (total * 2, x.sin())

    start = {"total": torch.ones(3, device=device)}
    carry, (doubled, sines) = torch_scan(add, start, x, dim=1, reverse=True)
    mapped = torch_map(
        lambda x, bias: {"y": x[0] * scale + x[1].cos() + bias}, (x, x * 2), scale * 2
    )["y"]
    scanned = associative_scan(lambda a, b: a * b * scale, x, dim=0, combine_mode="generic")
    found = [carry["total"], doubled, sines, mapped, scanned]
    loss = sum((each**2).sum() for each in found)
    return found + list(torch.autograd.grad(cast(torch.Tensor, loss), [x, scale]))


@pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="eager's gradient of associative_scan is wrong in 2.9"
)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # PyTorch's, on the CPU
def test_loops_of_pytorch_have_gradients_of_what_they_capture(device: torch.device) -> None:
    for got, wanted in zip(looped(device), looped("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), wanted)


def test_what_is_compiled_past_torch_compile_runs_as_it_is(device: torch.device) -> None:
    """`torch._dynamo.optimize` is not replaced: a function with tensors of the device is left to itself."""

    def fn(t: torch.Tensor) -> torch.Tensor:
        return t.sin() + 1

    called = torch._dynamo.optimize(backend)(fn)
    x = torch.ones(3).to(device)
    assert torch.equal(called(x).cpu(), fn(torch.ones(3))) and not compiled
    with pytest.raises(Exception, match="cannot be traced from outside"):
        torch._dynamo.optimize(backend, nopython=True)(lambda t: t.cos())(x)
