"""Collectives that are recorded do not wait for a script that records no more."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ltc_core.runtime import execution_gate, idle_collectives
from tests.launching import Job, launcher

SCRIPT = str(Path(__file__).with_name("waiting_by_a_file.py"))


@pytest.mark.dist
def test_a_process_that_waits_for_a_file_holds_nobody_up(tmp_path: Path) -> None:
    job = Job([*launcher("--nprocs", "2"), SCRIPT, str(tmp_path / "file")], tmp_path)
    code, out, err = job.end()
    assert code == 0, err
    assert out.count("[1.0, 1.0, 2.0, 2.0] [1.0, 1.0, 2.0, 2.0]") == 2, out


class Device:
    """A device that has recorded collectives from `record` on, until they are handed over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_recorded = False
        self.handed_over = threading.Semaphore(0)
        self.trace = SimpleNamespace(epoch=1, count=0)
        tokens: Any = SimpleNamespace(
            are_recorded=lambda: self.is_recorded, hand_over=self.hand_over
        )
        monkeypatch.setattr(idle_collectives, "collective_tokens", tokens)
        monkeypatch.setattr(
            idle_collectives, "contexts", lambda: [SimpleNamespace(trace=self.trace)]
        )
        monkeypatch.setattr(idle_collectives, "_LOOK_S", 0.05)
        monkeypatch.setattr(idle_collectives, "_watch", idle_collectives._Watch())

    def record(self) -> None:
        self.is_recorded = True
        self.trace.count += 1
        idle_collectives.watch()

    def hand_over(self) -> None:
        self.is_recorded = False
        self.handed_over.release()


def test_what_is_left_is_handed_over_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    for _ in range(3):
        device.record()
        assert device.handed_over.acquire(timeout=30)
    assert not device.handed_over.acquire(timeout=0.2)


def test_a_step_that_is_being_recorded_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.record()
    stop = threading.Event()

    def record() -> None:
        while not stop.wait(0.001):
            device.trace.count += 1

    recorder = threading.Thread(target=record)
    recorder.start()
    handed = device.handed_over.acquire(timeout=0.5)
    stop.set()
    recorder.join()
    assert not handed
    assert device.handed_over.acquire(timeout=30)


def test_a_block_that_is_one_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    execution_gate.close()
    try:
        device.record()
        assert not device.handed_over.acquire(timeout=0.3)
    finally:
        execution_gate.open()
    assert device.handed_over.acquire(timeout=30)


def test_an_error_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    hand_over = device.hand_over

    def fail() -> None:
        hand_over()
        raise RuntimeError("the graph could not be compiled")

    monkeypatch.setattr(idle_collectives.collective_tokens, "hand_over", fail)
    for _ in range(2):
        device.record()
        assert device.handed_over.acquire(timeout=30)


def test_the_thread_sleeps_where_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.record()
    device.hand_over()
    end = time.monotonic() + 30
    while idle_collectives._watch.is_awake:
        assert time.monotonic() < end
        time.sleep(0.01)
