"""Scalars for TensorBoard are written while a run goes on, and read back; without the package an error says so."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

import ltc_core as ltc
from ltc_core import profiler
from ltc_core.errors import ProfilerError
from ltc_core.live import scalars


class Writer:
    """Stands in for a SummaryWriter."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.points: list[tuple[str, float, int]] = []
        self.is_closed = False

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        self.points.append((name, value, step))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    made: list[Writer] = []

    def make(directory: str) -> Writer:
        made.append(Writer(directory))
        return made[-1]

    monkeypatch.setattr(scalars, "_writer", make)
    return made


def steps(count: int) -> None:
    x = torch.zeros(3, device=ltc.lazy_device())
    for _ in range(count):
        x += 1
        ltc.mark_step()
        time.sleep(0.02)


def test_points_are_written_at_steps(tmp_path: Path, writers: list[Writer]) -> None:
    with profiler.tensorboard(tmp_path, every_s=0.0):
        steps(10)
    (writer,) = writers
    assert writer.directory == str(tmp_path) and writer.is_closed
    names = {name for name, _, _ in writer.points}
    assert {
        f"ltc/{n}" for n in ("step", "steps_per_s", "ms_per_step", "memory_bytes", "programs")
    } <= names
    at = [step for name, _, step in writer.points if name == "ltc/step"]
    assert at == sorted(set(at)) and len(at) >= 2
    per_step = {(n, step): value for n, value, step in writer.points}
    assert all(0 < value for (n, _), value in per_step.items() if n == "ltc/ms_per_step")
    assert all(0 <= value <= 1 for (n, _), value in per_step.items() if "share" in n)


def test_in_a_job_each_rank_has_a_directory(
    tmp_path: Path, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with profiler.tensorboard(tmp_path):
        pass
    assert writers[0].directory == str(tmp_path / "rank3")


def test_start_and_stop(tmp_path: Path, writers: list[Writer]) -> None:
    curves = profiler.tensorboard(tmp_path)
    with pytest.raises(ProfilerError, match=r"(?s)no scalars are written.*Next: call start"):
        curves.stop()
    curves.start()
    with pytest.raises(ProfilerError, match=r"(?s)are written already.*Next: call stop"):
        curves.start()
    steps(1)
    curves.stop()
    assert writers[0].is_closed and writers[0].points
    curves.start()
    profiler.at_exit()
    assert writers[1].is_closed and not profiler._written


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ProfilerError, match=r"(?s)cannot be written\n  got: .*Next: pip install tensorboard"
    ):
        profiler.tensorboard(tmp_path).start()
    assert os.listdir(tmp_path) == [] and not profiler._written


def test_they_are_read_back(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with profiler.tensorboard(tmp_path, every_s=0.0):
        steps(5)
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    at = [point.step for point in found.Scalars("ltc/steps_per_s")]
    assert at and at == sorted(at)


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(ProfilerError, match=r"(?s)cannot be written to .*file.*Next: name"):
        profiler.tensorboard(tmp_path / "file" / "x").start()
