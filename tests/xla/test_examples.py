"""The digits on torch_xla's PJRT: in one process the losses of the CPU; in two, each with a device of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


def run_example(name: str, cwd: Path, *arguments: str, launch: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples" / name), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", text)]


def test_a_cnn_has_the_losses_of_the_cpu(tmp_path: Path) -> None:
    # Adadelta at its learning rate of 1 makes 1e-2 of a difference of 1e-5 in three steps; Adam does not.
    short = ("--epochs", "2", "--limit-train", "160", "--batch-size", "32", "--log-interval", "1")
    adam = ("--optimizer", "adam", "--lr", "0.001")
    ours = losses(run_example("mnist.py", tmp_path, *short, *adam))
    eagers = losses(run_example("mnist.py", tmp_path, *short, *adam, "--device", "cpu"))
    assert len(ours) == 10
    assert ours == pytest.approx(eagers, rel=1e-4, abs=1e-5)


@pytest.mark.dist
def test_two_processes_read_digits(tmp_path: Path) -> None:
    launch = ("-m", "ltc_launch", "--nprocs", "2")
    text = run_example(
        "mnist_processes.py", tmp_path, "--epochs", "1", "--accuracy-over", "80", launch=launch
    )
    assert re.search(r"accuracy", text)
