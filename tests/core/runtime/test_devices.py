"""A device at work: cuts and their reasons, what runs where, how far recording runs ahead, Ctrl-C.

What is reported of failures is in test_failures.py, threads in test_threads_and_forks.py.
"""

import gc
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch

import ltc_core as ltc
from ltc_core.runtime import devices
from ltc_core.runtime.devices import DeviceContext
from ltc_core.settings import settings
from tests.core import child
from tests.core.counting import Counting
from tests.core.custom_ops import Gate, fail, ran_in, whatever


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


@pytest.fixture
def context(device: torch.device) -> Iterator[DeviceContext]:
    found = devices.context(device.index)
    gc.collect()  # what earlier tests left in cycles would count
    found.wait()
    yield found
    found.wait()


class TestContexts:
    def test_there_is_one_for_each_device(self, context: DeviceContext) -> None:
        found: list[DeviceContext] = []
        threads = [
            threading.Thread(target=lambda: found.append(devices.context(0))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {id(c) for c in found} == {id(context)}
        assert context in devices.contexts() and context.device == torch.device(
            settings.device_name, 0
        )

    def test_a_device_that_is_not_there(self) -> None:
        count = len(ltc.get_lazy_supported_devices())
        for index in (count, -1, 99):
            with pytest.raises(RuntimeError, match=f"there is no device {settings.device_name}:"):
                devices.checked(index)
        assert devices.checked(count - 1) == count - 1

    def test_the_device_of_another_rank_is_not_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        count = len(ltc.get_lazy_supported_devices())
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", "3")
        with pytest.raises(RuntimeError) as raised:
            devices.checked(3)
        asked = "wants LTC_NUM_DEVICES=4" if count == 1 else "set LTC_NUM_DEVICES before"
        assert asked in " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


class TestCut:
    def test_nothing_recorded_is_no_cut(self, context: DeviceContext) -> None:
        with Counting() as counted:
            assert context.cut("MarkStep") is None
        assert not counted.syncs

    def test_nothing_alive_is_no_run(self, context: DeviceContext, device: torch.device) -> None:
        torch.ones(3, device=device).exp()
        with Counting() as counted:
            assert context.cut("MarkStep") is None
        assert not counted.syncs and not counted.ops
        assert not context.trace

    def test_each_is_counted_under_its_reason(
        self, context: DeviceContext, device: torch.device
    ) -> None:
        x = torch.ones(3, device=device)
        with Counting() as counted:
            job = context.cut("MarkStep")
            assert job is not None and job.wait(10)
            (x + 1).tolist()
            (x + 1).sum().item()
            (x + 2).cpu()
            kept = x + 3
            ltc.wait_device_ops()
            x[x > 0].tolist()
            more = x + 4
            ltc.sync_multi([more])
            assert kept is not None
        assert counted.syncs == {
            "MarkStep": 1,
            "ToCpu": 3,
            "Item": 1,
            "Wait": 1,
            "nonzero": 1,
            "SyncMulti": 1,
        }

    def test_a_value_that_was_fetched_is_there(
        self, context: DeviceContext, device: torch.device
    ) -> None:
        x = torch.rand(3, device=device) * 2
        first = x.cpu()
        with Counting() as counted:
            second = x.cpu()
            assert x.sum(0).shape == ()
        assert first.equal(second) and not counted.syncs

    def test_what_was_fetched_is_a_copy(self, context: DeviceContext, device: torch.device) -> None:
        x = torch.zeros(3, device=device)
        host = x.cpu()
        host += 1
        assert x.tolist() == [0.0] * 3
        x += 5
        assert host.tolist() == [1.0] * 3

    def test_what_was_uploaded_is_a_copy(self, context: DeviceContext) -> None:
        host = torch.zeros(3)
        x = devices.upload(host, 0)
        host += 1
        assert x.tolist() == [0.0] * 3
        x += 5
        assert host.tolist() == [1.0] * 3

    def test_memory_nobody_wrote_can_be_read(
        self, context: DeviceContext, device: torch.device
    ) -> None:
        x = torch.empty(2, 3, device=device)
        assert x.cpu().shape == (2, 3)
        ltc.mark_step()
        assert (x * 0).nan_to_num().sum().item() == 0
        assert torch.empty(0, device=device).tolist() == []

    def test_a_fetched_tensor_has_eagers_strides(self, device: torch.device) -> None:
        for make in (
            lambda d: torch.ones(2, 3, device=d).t(),
            lambda d: torch.ones(4, 6, device=d)[:, ::2],
            lambda d: torch.ones(1, 2, 3, 4, device=d).to(memory_format=torch.channels_last),
            lambda d: torch.ones(3, 1, device=d).expand(3, 4),
            lambda d: torch.ones(2, 3, 4, device=d)[:, 1:].transpose(0, 2),
        ):
            assert make(device).cpu().stride() == make("cpu").cpu().clone().stride()

    def test_an_uploaded_tensor_has_eagers_strides(self, context: DeviceContext) -> None:
        for host in (
            torch.ones(2, 3).t(),
            torch.ones(4, 6)[:, ::2].t(),
            torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
            torch.ones(2, 3, 4)[:, 1:].transpose(0, 2),
        ):
            wanted = host.to("cpu", copy=True).stride()
            assert devices.upload(host, 0).cpu().stride() == wanted
            assert devices.upload_all([host], 0)[0].cpu().stride() == wanted


class TestWhereItRuns:
    def test_a_new_program_runs_in_the_worker(self, device: torch.device) -> None:
        ran_in.clear()
        x = whatever(torch.ones(7, device=device))
        ltc.mark_step(wait=True)
        assert [name.startswith("ltc-worker") for name in ran_in] == [True]
        assert x.sum().item() == 7

    def test_recording_goes_on_while_it_runs(
        self, context: DeviceContext, device: torch.device
    ) -> None:
        # A program that has run before may be measured in this thread, where it waits for the worker: this one is new.
        with Gate() as gate:
            held = gate(torch.ones(3, 1, 37, device=device))
            ltc.mark_step()
            assert gate.reached.wait(10)
            more = held * 2
            assert more.shape == (3, 1, 37)
            ltc.mark_step()
            assert not context.worker.is_idle
            gate.open()
            assert more.sum().item() == 2.0 * 3 * 37

    def test_grad_mode_of_a_kernel_is_off(self, device: torch.device) -> None:
        """Kernels run on plain tensors: what they do must not build a graph of its own."""
        seen: list[bool] = []

        @torch.library.custom_op("ltc_probe::grad_mode", mutates_args=())
        def grad_mode(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_grad_enabled())
            return x + 0

        grad_mode.register_fake(torch.empty_like)
        weight = torch.ones(2, device=device, requires_grad=True)
        for _ in range(3):  # in the worker at first, then where it is cut
            kept = grad_mode(weight.detach())
            ltc.mark_step(wait=True)
            assert kept.grad_fn is None
        assert seen == [False] * 3

    def test_recording_runs_ahead_so_far_and_no_further(self, device: torch.device) -> None:
        """The step that is one too many waits; it does not grow the queue."""
        ahead: list[int] = []
        with settings.override(replay="never"), Gate() as gate:
            x = gate(torch.ones(3, device=device))

            def steps() -> None:
                y = x
                for i in range(settings.max_pending_steps + 3):
                    y = y + float(i)
                    ltc.mark_step()
                    ahead.append(i)

            ltc.mark_step()
            assert gate.reached.wait(10)
            thread = threading.Thread(target=steps)
            thread.start()
            thread.join(0.5)
            assert thread.is_alive() and len(ahead) <= settings.max_pending_steps
            gate.open()
            thread.join(20)
            assert not thread.is_alive() and len(ahead) == settings.max_pending_steps + 3

    def test_an_op_that_exits_is_a_failure_not_an_end(self, device: torch.device) -> None:
        lost = fail(torch.ones(3, device=device), 2)
        with pytest.raises(RuntimeError, match="7|exit|SystemExit"):
            ltc.mark_step(wait=True)
        with pytest.raises(RuntimeError):
            lost.cpu()
        assert torch.ones(3, device=device).add(1).sum().item() == 6
        ltc.wait_device_ops()

    def test_running_out_of_memory_is_told_as_such(self, device: torch.device) -> None:
        lost = fail(torch.ones(3, device=device), 1)
        with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
            ltc.mark_step(wait=True)
        assert "custom_ops.py" in str(raised.value) and "  Next: " in str(raised.value)
        del lost


class TestMemory:
    def test_a_parameter_is_updated_in_its_buffer(self, context: DeviceContext) -> None:
        """A step needs no second copy of what it updates."""
        weight = torch.zeros(250_000, device=context.device)
        for _ in range(3):
            weight.add_(1.0)
            ltc.mark_step(wait=True)
        held = context.memory.used_bytes
        context.memory.reset_peak()
        for _ in range(3):
            weight.add_(1.0)
            ltc.mark_step(wait=True)
        assert context.memory.used_bytes == held
        assert context.memory.peak_bytes < held + 500_000
        assert weight[:2].tolist() == [6.0, 6.0]

    def test_an_old_value_that_is_seen_elsewhere_stays(self, device: torch.device) -> None:
        weight = torch.zeros(3, device=device)
        ltc.mark_step()
        seen = [weight.clone()]
        for _ in range(3):
            weight.add_(1.0)
            seen.append(weight.clone())
            ltc.mark_step()
        assert [t.tolist() for t in seen] == [[float(i)] * 3 for i in range(4)]

    def test_operands_are_freed_while_a_step_runs(
        self, context: DeviceContext, device: torch.device
    ) -> None:
        x = torch.ones(100_000, device=device)
        context.wait()
        held = context.memory.used_bytes
        context.memory.reset_peak()
        for _ in range(50):
            x = x * 1.0
        context.wait()
        assert context.memory.used_bytes == held
        assert context.memory.peak_bytes <= held + 3 * 400_000


INTERRUPTED = """
import os, random, signal, threading, time
random.seed(1)

def interrupted_steps(width, times):
    torch.manual_seed(0)
    layers = torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.randn(32, width, device=device)
    def step():
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        ltc.mark_step()
        return loss
    for _ in range(3):
        first = step().item()
    for _ in range(times):
        def interrupt():
            time.sleep(random.uniform(0.001, 0.03))
            os.kill(os.getpid(), signal.SIGINT)
        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            while True:
                step()
        except KeyboardInterrupt:
            thread.join()
        # PyTorch's `optimizer.step` restores grad mode in Python lines, which an interrupt may come between.
        torch.set_grad_enabled(True)
        ltc.wait_device_ops()
        assert step().item() <= first
    print("went on", width)
interrupted_steps(16, 25)    # run where they are cut
interrupted_steps(384, 25)   # run in the worker, which is waited for
"""


def test_ctrl_c_at_any_moment_loses_nothing() -> None:
    """The stop button of a notebook: the loop is left, the model is intact, training can go on."""
    out, _ = child.run(INTERRUPTED)
    assert out.split("\n")[:2] == ["went on 16", "went on 384"]


def test_ctrl_c_while_it_waits_comes_through() -> None:
    out, _ = child.run(
        """
        import os, signal, threading
        from tests.core.custom_ops import Gate
        with Gate() as gate:
            held = gate(torch.ones(3, device=device))
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            for wait in (ltc.wait_device_ops, held.cpu):
                try:
                    wait()
                except KeyboardInterrupt:
                    print("interrupted", held.shape)
                else:
                    print("waited")
                if wait is ltc.wait_device_ops:
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            gate.open()
            print((held + 1).tolist())
        """
    )
    assert out.splitlines() == ["interrupted torch.Size([3])"] * 2 + ["[2.0, 2.0, 2.0]"]


HOST: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "without dims": lambda: torch.tensor(2.5),
    "without elements": lambda: torch.empty(0, 3),
    "bool": lambda: torch.arange(6) % 2 == 0,
    "complex": lambda: torch.complex(torch.arange(3.0), torch.ones(3)),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "every second": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "negated": lambda: torch._neg_view(torch.arange(3.0)),
    "zeros without memory": lambda: torch._efficientzerotensor((2, 3)),
    "needs a gradient": lambda: torch.arange(3.0, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "large": lambda: torch.arange(100_000.0),
    "from numpy": lambda: torch.from_numpy(numpy.arange(3)),
}


@pytest.mark.parametrize("kind", HOST)
def test_uploads_are_copies(kind: str) -> None:
    host = HOST[kind]()
    expected, meta = host.detach().clone(), torch.empty(0, device="ltc")
    made = [
        host.to("ltc"),
        meta.new_empty(host.shape, dtype=host.dtype).copy_(host),
        torch.zeros(host.shape, dtype=torch.complex128, device="ltc").copy_(host),
    ]
    if host.is_contiguous() and not (host.is_conj() or host.is_neg() or host._is_zerotensor()):
        host.detach().fill_(0)
    for t in made:
        assert torch.equal(t.detach().cpu(), expected.to(t.dtype))
    assert made[0]._h.meta.stride == torch.empty_like(expected).stride()  # type: ignore[attr-defined]
    assert made[0].requires_grad == host.requires_grad


def test_uploads_within_vmap() -> None:
    def upload(row: torch.Tensor) -> torch.Tensor:
        return row.to("ltc") * 2

    rows = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.func.vmap(upload)(rows).cpu(), rows * 2)
