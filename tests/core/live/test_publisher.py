"""A watched process publishes what it does, from its first use of a device to its end; others do nothing for it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.errors import SettingsError
from ltc_core.live import publisher
from ltc_core.live.board import read_states
from ltc_core.live.state import State
from ltc_core.settings import settings
from ltc_core.timeline import marks, slices
from tests.core import child

PATIENCE_S = 60.0

TRAIN = """
import sys, time
x = torch.zeros(3, device=device)
for _ in range(3):
    x += 1
    ltc.mark_step()
print("ready", flush=True)
"""
BLOCKED = """
import threading
from ltc_core.runtime.devices import context
from ltc_core.runtime.worker import Job
gate = threading.Event()
context(0).worker.submit(Job(gate.wait))
threading.Thread(target=lambda: (sys.stdin.readline(), gate.set()), daemon=True).start()
ltc.wait_device_ops()
"""


def awaited(directory: Path, is_it: Callable[[State], bool]) -> State:
    """The state of the only process, once it is as wanted."""
    deadline = time.monotonic() + PATIENCE_S
    states: list[State] = []
    while time.monotonic() < deadline:
        states = [seen.state for seen in read_states(directory)]
        if len(states) == 1 and is_it(states[0]):
            return states[0]
        time.sleep(0.05)
    raise AssertionError(states)


def test_a_process_says_what_it_does_and_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "watch"
    settings_of_child = {"LTC_WATCH": str(place), "LTC_COMPILE": "off", "LTC_REPLAY": "never"}
    with child.start(TRAIN + BLOCKED, **settings_of_child) as process:
        state = awaited(place, lambda s: s.doing == "waiting for the device" and s.step == 3)
        assert (state.rank, state.job, state.script) == (-1, "", "-c")
        assert state.queue == 1 and state.ran == "op by op" and state.programs == 2
        assert state.compiles == state.cause_number == 2 and state.fallbacks == 0
        assert state.peak_bytes >= state.used_bytes == 12
        assert state.rss_bytes > 1 << 20 and state.cpu_s > 0
        later = awaited(place, lambda s: s.written_ns > state.written_ns)
        assert later.since_ns == state.since_ns < state.written_ns
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait() == 0
        assert process.stderr is not None and process.stderr.read() == ""
    assert list(place.iterdir()) == []


def test_the_file_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with child.start(TRAIN + BLOCKED, LTC_WATCH=str(tmp_path), LTC_COMPILE="off") as process:
        awaited(tmp_path, lambda s: s.step == 3)
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 1
    child.run(TRAIN, LTC_WATCH=str(tmp_path), LTC_COMPILE="off")
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    code = f"""
        import os
        from ltc_core.live import publisher
        from ltc_core.timeline import marks
        x = (torch.ones(3, device=device) + 1).tolist()
        pid = os.fork()
        if pid == 0:
            assert publisher._running is None and marks.on is None
            assert (torch.ones(3, device=device) + 2).tolist() == [3, 3, 3]
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert marks.on is not None and len(os.listdir({str(tmp_path)!r})) == 1
    """
    assert (
        child.run("import sys\n" + code.replace("\n        ", "\n"), LTC_WATCH=str(tmp_path))[1]
        == ""
    )
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        settings.override(watch=str(tmp_path / "a" / "b")),
        pytest.raises(
            SettingsError, match=r"(?s)set in LTC_WATCH\)\n  got: No such file.*Next: let"
        ),
    ):
        publisher.start_as_set()
    with settings.override(watch="off"):
        publisher.start_as_set()
    assert publisher._running is None


def test_unwatched_a_step_does_nothing_for_it() -> None:
    """One context manager for all slices, no thread, no mark; watched, the same programs and counts."""
    assert marks.on is None and slices.watched("cut") is slices.watched("fetch", "transfers")

    def counts() -> dict[str, int | None]:
        ltc.wait_device_ops()
        metrics.clear_all()
        x = torch.zeros(3, device=ltc.lazy_device())
        for _ in range(4):
            x += 1
            ltc.mark_step()
        assert x.tolist() == [4, 4, 4]
        ltc.wait_device_ops()
        return {name: metrics.counter_value(name) for name in metrics.counter_names()}

    counts()
    without = counts()
    marks.on = marks.Marks()
    try:
        assert counts() == without
        assert any(name == "cut" for name, _ in marks.on.spent_ns)
        assert not any(marks.on.now.values())
    finally:
        marks.on = None


def test_marks_nest_and_end_with_an_error() -> None:
    marks.on = marks.Marks()
    try:
        with pytest.raises(KeyError), slices.watched("fetch"):
            with slices.watched("cut") as seen:
                assert seen is None and doing() == "cut"
            assert doing() == "fetch"
            raise KeyError
        assert doing() is None
        assert {name for name, _ in marks.on.spent_ns} == {"fetch", "cut"}
    finally:
        marks.on = None


def doing() -> str | None:
    assert marks.on is not None
    (found,) = marks.on.now.values()
    return found and found.name
