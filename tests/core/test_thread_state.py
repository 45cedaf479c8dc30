"""The device computes in a thread state of its own: what the user's thread has switched on is for the user's ops."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ltc_core as ltc
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.placement import Placement
from ltc_core.thread_state import in_own_state
from tests.compiled_cache import empty_cache
from tests.core import child
from tests.nets.tiers import tier

REPEATS = 4  # the third run follows what was recorded


class Spy(TorchDispatchMode):
    """Notes the devices of the ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func} {[a.device.type for a in args if isinstance(a, torch.Tensor)]}")
        return func(*args, **(kwargs or {}))


class FunctionSpy(TorchFunctionMode):
    """Notes the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device(ltc.lazy_device())
    try:
        yield
    finally:
        torch.set_default_device(None)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "dispatch_mode": Spy,
    "function_mode": FunctionSpy,
    "fake_tensors": FakeTensorMode,
    "default_device": default_device,
    "enable_grad": torch.enable_grad,
}


@pytest.fixture(params=[Placement.HERE, Placement.WORKER])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs in the thread that cuts, or in the worker."""
    monkeypatch.setattr(Launcher, "placement", lambda *args: request.param)


@pytest.mark.parametrize("state", STATES)
def test_the_state_inside(state: str) -> None:
    def look() -> tuple[Any, ...]:
        made = torch.ones(2, 2)
        result = made @ made
        modes = torch._C._len_torch_function_stack() and torch._C._is_torch_function_mode_enabled()
        flags = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), modes
        kind = type(result), result.dtype, result.is_inference(), result.device.type
        return flags, kind

    def outside() -> tuple[Any, ...]:
        keys = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )
        return *map(str, keys), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with STATES[state]():
        before = outside()
        inside = in_own_state(look)()
        with pytest.raises(KeyError):
            in_own_state({}.__getitem__)("nothing")
        assert outside() == before
    assert inside == ((False, False, False), (torch.Tensor, torch.float32, False, "cpu"))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.usefixtures("place")
def test_a_step_that_is_cut_in_it(state: str) -> None:
    device = ltc.lazy_device()
    matrix = torch.full((4, 4), 1.001)
    expected = (matrix @ matrix + 1)[0, 0].item()
    x = matrix.to(device)
    for _ in range(REPEATS):
        total, other = x @ x, x @ x
        total += 1
        with STATES[state]():
            ltc.mark_step()
            ltc.wait_device_ops()
        total += 1  # in memory that was made then
        assert total[0, 0].item() == expected + 1
        if state not in ("fake_tensors", "default_device"):
            with STATES[state]():
                assert other[0, 0].item() == expected - 1
        assert torch.equal(other.cpu(), matrix @ matrix)


@pytest.mark.parametrize("state", [s for s in STATES if s != "fake_tensors"])
@pytest.mark.usefixtures("place")
def test_values_that_are_made_in_it(state: str) -> None:
    """Uploads, random states, results of ops that run on real values: all can be written later."""
    device = ltc.lazy_device()
    model = nn.Linear(3, 2).to(device)
    weights = {name: torch.ones_like(t, device="cpu") for name, t in model.state_dict().items()}
    host = torch.arange(3.0)
    generator = torch.Generator(device)
    for _ in range(REPEATS):
        with STATES[state](), torch.no_grad():
            model.load_state_dict(weights)
            there = host.to(device)
            (sent,) = ltc.send_cpu_data_to_device(host, device)
            where = there.nonzero()
            torch.manual_seed(1)
            generator.manual_seed(2)
            drawn = torch.rand(2, device=device, generator=generator)
            state_then = ltc.get_rng_state()
            there.cpu(), ltc.to_cpu([sent])
        assert where.tolist() == [[1], [2]]
        ltc.set_rng_state(state_then)
        torch.rand(2, device=device, generator=generator)
        again = torch.rand(2, device=device)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(2, device=device).cpu(), again.cpu())
        assert drawn.shape == (2,)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3, device=device)).sum().backward()
            optimizer.step()
            ltc.mark_step()
        moved = 0.5 * (1 + 1.9 + 2.71)
        torch.testing.assert_close(model.weight.cpu(), torch.full((2, 3), 1 - moved))


def test_an_unseeded_draw_in_inference_mode() -> None:
    out, _ = child.run(
        """
        with torch.inference_mode():
            torch.rand(3, device=device).cpu()
        for _ in range(4):
            torch.rand(3, device=device).cpu()
            ltc.mark_step()
        print("drawn")
        """
    )
    assert out == "drawn\n"


@pytest.mark.usefixtures("place")
def test_memory_that_is_set_in_inference_mode() -> None:
    device = ltc.lazy_device()
    for _ in range(REPEATS):
        weight = nn.Parameter(torch.zeros(2, device=device))
        with torch.inference_mode():
            weight.data = torch.full((2,), 3.0).to(device)
        assert not weight.is_inference()
        (weight * weight).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        assert weight.tolist() == [-3.0, -3.0]
        turned = torch.arange(6.0, device=device).view(2, 3)
        with torch.inference_mode():
            turned.t_()
        assert turned.shape == (3, 2) and turned.add_(1).tolist() == [[1, 4], [2, 5], [3, 6]]


@pytest.mark.parametrize("name", ["ops", "early", "lowered"])
def test_what_is_uploaded_in_inference_mode_is_written_outside_of_it(name: str) -> None:
    with tier(name):
        weight = torch.zeros(3, device=ltc.lazy_device())
        for step in range(REPEATS):
            given = torch.full((3,), float(step))
            with torch.inference_mode():
                weight.copy_(given)
            weight.add_(1)
            assert weight.tolist() == [step + 1.0] * 3


def test_what_is_read_in_inference_mode_is_of_it() -> None:
    x = torch.arange(3.0, device=ltc.lazy_device())
    with torch.inference_mode():
        assert x.cpu().is_inference() and x.nonzero().is_inference()
        assert torch.ones(2).to(x.device).is_inference()
    assert not x.cpu().is_inference()


@pytest.mark.usefixtures("place")
def test_modes_see_the_ops_of_the_user_alone() -> None:
    device = ltc.lazy_device()

    def step() -> None:
        x = torch.ones(3).to(device)
        y = (x + 1) * 2
        ltc.mark_step()
        y.sum().item()
        y.nonzero()
        ltc.to_cpu([y]), ltc.send_cpu_data_to_device([torch.ones(2)], device)
        ltc.manual_seed(1)
        ltc.wait_device_ops()

    for _ in range(REPEATS):
        with Spy() as outer, Spy() as inner:
            step()
        with FunctionSpy() as functions:
            step()
        assert outer.seen == inner.seen
        ops = [row.split(" ", 1) for row in inner.seen]
        assert [op.split(".")[1] for op, _ in ops] == [
            "ones", "_to_copy", "add", "mul", "sum", "_local_scalar_dense", "nonzero", "ones",
        ]  # fmt: skip
        assert [where for _, where in ops if "cpu" in where] == ["['cpu']"]  # the upload
        called = [name for name in functions.seen if name != "device"]  # torch.device(...)
        assert called == ["ones", "to", "add", "mul", "sum", "item", "nonzero", "ones"]


@pytest.mark.timeout(300)  # the compiler runs
def test_compiled_programs(tmp_path: Path) -> None:
    """They take plain tensors alone, and call kernels that autocast would turn to another dtype."""
    out, _ = child.run(
        """
        from torch.utils._python_dispatch import TorchDispatchMode
        from ltc_core import metrics
        from ltc_core.runtime.launcher import Launcher
        from ltc_core.runtime.placement import Placement
        Launcher.placement = lambda *args: Placement.HERE
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                raise AssertionError(func)
        states = [torch.inference_mode, lambda: torch.autocast("cpu"), Mode, torch.enable_grad]
        host = torch.full((8, 8), 1.001)
        expected = (host @ host).relu() + 1
        weight = host.to(device)
        for state in states * 2:
            with torch.inference_mode():
                weight.copy_(host)
            result = (weight @ weight).relu() + 1
            with state():
                ltc.mark_step()
            assert torch.equal(result.cpu(), expected), state
        print(metrics.counter_value("CompiledProgram"), metrics.counter_value("FailedExecution"))
        """,
        timeout_s=280,
        LTC_COMPILE="sync",
        LTC_COMPILED_CACHE_DIR=empty_cache(tmp_path / "compiled"),
    )
    assert out == "1 None\n"
