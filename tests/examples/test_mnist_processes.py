"""examples/mnist_processes.py: one script, made processes by spawn or by a launcher, that learns and saves once."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import prepared

ROOT = Path(__file__).parents[2]
SETTINGS = {"PYTHONPATH": str(ROOT), "LTC_COMPILE": "off", "OMP_NUM_THREADS": "1"}
SCRIPT = str(ROOT / "examples" / "mnist_processes.py")


@pytest.mark.dist
@pytest.mark.parametrize(
    "command",
    [
        [SCRIPT],
        ["-m", "ltc_launch", "--nprocs", "2", SCRIPT],
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT],
    ],
    ids=["spawn", "ltc-launch", "torchrun"],
)
def test_it_learns(tmp_path: Path, command: list[str]) -> None:
    done = prepared.run(
        [sys.executable, *command, "--epochs", "3"],
        cwd=tmp_path,
        env={**os.environ, **SETTINGS, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        starts_processes=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    [(count, percent)] = re.findall(r"(\d) processes, test accuracy: ([\d.]+) %", done.stdout)
    assert count == "2" and float(percent) > 80
    assert (tmp_path / "mnist_processes.pt").exists()


@pytest.mark.dist
def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def run(*options: str) -> str:
        done = prepared.run(
            [sys.executable, "-m", "ltc_launch", "--nprocs", "2", SCRIPT, *options],
            cwd=tmp_path,
            env={**os.environ, **SETTINGS, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            starts_processes=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = run("--epochs", "3")
    run("--epochs", "2", "--checkpoints", "runs")
    rest = run("--epochs", "3", "--checkpoints", "runs")
    assert re.search(r"going on after step \d+", rest)
    assert (
        rest.splitlines()[-2:] == whole.splitlines()[-2:]
    )  # the loss of the last epoch, the accuracy
