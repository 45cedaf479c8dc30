"""benchmarks.compiling: the compiler is stopped in every other window, and goes on in the end."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch

from benchmarks import compiling
from benchmarks.compiling import Figures, measure, report


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A process that computes, in the place of a compiler."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    process = psutil.Process(child.pid)
    monkeypatch.setattr(compiling, "_compiler", lambda: [process])
    monkeypatch.setattr(compiling, "_WINDOW_S", 0.02)
    num_threads = torch.get_num_threads()
    yield process
    torch.set_num_threads(num_threads)
    child.kill()
    child.wait()


@pytest.mark.parametrize("is_waited", [True, False])
def test_steps_beside_a_process_that_computes(compiler: psutil.Process, is_waited: bool) -> None:
    found = measure("actor_critic", 1, is_waited, rounds=3)
    assert (found.model, found.threads, found.is_waited, found.rounds) == (
        "actor_critic", 1, is_waited, 3,
    )  # fmt: skip
    assert found.alone_ms > 0 and found.ratio > 0 and found.cores >= 0
    assert compiler.status() != psutil.STATUS_STOPPED


def test_the_table() -> None:
    lines = report([Figures("unet", 2, True, 10.0, 1.0234, 0.051, 8)]).splitlines()
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells == ["unet", "2", "waited for", "10.00", "1.02", "0.05"]
