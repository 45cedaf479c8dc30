"""Traces: what is recorded and what is run is in them, from all threads; scopes are; one at a time."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core import profiler
from ltc_core.errors import LtcError
from ltc_core.profiler import ProfilerError, StepTrace, Trace
from tests.core import child
from tests.core.counting import Counting

ONE_AT_A_TIME = r"Profile has already been started. Only one profile may be run at a time\."


@pytest.fixture(autouse=True)
def no_trace_is_left() -> Iterator[None]:
    ltc.wait_device_ops()
    yield
    assert profiler._running is None


def events(directory: Path) -> list[dict[str, Any]]:
    (file,) = directory.glob("*.pt.trace.json")
    return [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]


def names(directory: Path) -> Counter[str]:
    return Counter(e["name"] for e in events(directory))


def multiply() -> None:
    x = torch.ones(4, 4, device=ltc.lazy_device())
    torch.mm(x, x)
    y = torch.mm(x, x)
    ltc.mark_step()
    del y


class TestTraces:
    def test_ops_are_in_it_when_recorded_and_when_run(self, tmp_path: Path) -> None:
        for _ in range(3):
            multiply()  # the first times it is also run on meta tensors
        ltc.wait_device_ops()  # what was handed over before and runs later would be in it, too
        profiler.start_trace(tmp_path / "new" / "logs")
        multiply()
        profiler.stop_trace()
        # One of the two is dead, and not run.
        assert names(tmp_path / "new" / "logs")["aten::mm"] == 3

    def test_it_does_not_cut(self, tmp_path: Path) -> None:
        with Counting() as counted:
            profiler.start_trace(tmp_path)
            x = torch.ones(2, device=ltc.lazy_device()) + 1
            profiler.stop_trace()
        assert counted.syncs == {}
        assert x.tolist() == [2, 2]

    def test_another_thread_can_trace_this_one(self, tmp_path: Path) -> None:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                multiply()

        worker = threading.Thread(target=work)
        worker.start()
        profiler.trace(tmp_path, duration_ms=300, delay_ms=1)
        stop.set()
        worker.join()
        found = [e for e in events(tmp_path) if e["name"] == "aten::mm"]
        assert worker.native_id in {e["tid"] for e in found}

    def test_a_trace_can_be_stopped_elsewhere_and_begun_again(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            profiler.start_trace(str(tmp_path / name))
            with Trace(name):
                multiply()
            stopping = threading.Thread(target=profiler.stop_trace)
            stopping.start()
            stopping.join()
        assert names(tmp_path / "a")["a"] == names(tmp_path / "b")["b"] == 1
        assert names(tmp_path / "b")["a"] == 0

    def test_one_at_a_time(self, tmp_path: Path) -> None:
        with pytest.raises(ProfilerError, match="No profile started"):
            profiler.stop_trace()
        profiler.start_trace(tmp_path)
        with pytest.raises(RuntimeError, match=ONE_AT_A_TIME):
            profiler.start_trace(tmp_path)
        with pytest.raises(LtcError, match=ONE_AT_A_TIME):
            profiler.trace(tmp_path, duration_ms=0)
        profiler.stop_trace()
        with torch.profiler.profile(), pytest.raises(ProfilerError, match=ONE_AT_A_TIME):
            profiler.start_trace(tmp_path)

    def test_only_to_a_directory_of_this_machine(self, tmp_path: Path) -> None:
        with pytest.raises(ProfilerError, match=r"(?s)to another machine.*got: gs://bucket/logs"):
            profiler.start_trace("gs://bucket/logs")
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError, match="file"):
            profiler.start_trace(tmp_path / "file")

    def test_one_that_is_open_at_exit_is_written(self, tmp_path: Path) -> None:
        code = f"""
            from ltc_core.profiler import start_trace
            start_trace({str(tmp_path)!r})
            y = torch.ones(2, device=device).exp()
            ltc.mark_step()
        """
        child.run(code, LTC_COMPILE="off")
        assert names(tmp_path)["aten::exp"] >= 2


class TestScopes:
    def test_their_names(self) -> None:
        assert Trace("forward").name == "forward"
        assert StepTrace("train", step_num=0).name == "train#0"
        assert Trace("load", step_num=2, epoch=1, part="a").name == "load#2 epoch=1 part=a"

    def test_they_are_in_the_trace_and_nest(self, tmp_path: Path) -> None:
        @profiler.trace_me("backward")
        def run_backward(loss: torch.Tensor, *, times: int) -> int:
            """Run it."""
            loss.backward()
            return times

        x = torch.ones(3, device=ltc.lazy_device(), requires_grad=True)
        profiler.start_trace(tmp_path)
        with StepTrace("train", step_num=7), Trace("forward") as scope:
            assert run_backward((x * x).sum(), times=2) == 2
            ltc.mark_step()  # an error in torch_xla
        with pytest.raises(KeyError), Trace("fails"):
            raise KeyError
        profiler.stop_trace()
        assert scope.name == "forward" and x.grad is not None
        assert (run_backward.__name__, run_backward.__doc__) == ("run_backward", "Run it.")
        found = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events(tmp_path)}
        step, forward, backward = found["train#7"], found["forward"], found["backward"]
        assert step[0] <= forward[0] <= backward[0] < backward[1] <= forward[1] <= step[1]
        assert "fails" in found

    def test_pytorchs_own_profiler_sees_them_too(self) -> None:
        with torch.profiler.profile() as profile, Trace("scope"):
            pass
        assert [e.key for e in profile.key_averages() if e.key == "scope"] == ["scope"]

    def test_without_a_profiler_they_do_nothing(self, tmp_path: Path) -> None:
        with Trace("before"):
            profiler.start_trace(tmp_path)
        profiler.stop_trace()
        assert names(tmp_path)["before"] == 0

    def test_a_step_ends_with_its_scope_whatever_happens(self) -> None:
        values = []
        with Counting() as counted:
            for k in range(3):
                with StepTrace("step", step_num=k):
                    values.append(torch.ones(2, device=ltc.lazy_device()) + k)
                ltc.mark_step()  # as a loader does before its next batch
            with pytest.raises(KeyError), StepTrace("step"):
                values.append(torch.ones(2, device=ltc.lazy_device()) + 3)
                raise KeyError
        assert counted.syncs == {"MarkStep": 4}
        assert [v.tolist() for v in values] == [[k + 1.0] * 2 for k in range(4)]
