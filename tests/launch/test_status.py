"""The line at the bottom of a terminal: drawn for who looks, and lines of processes stay whole above it."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TRAIN = """
import time
import torch, ltc_dist as ltd
x = torch.zeros(2, device=ltd.lazy_device())
for k in range(20):
    x += 1
    ltd.mark_step()
    time.sleep(0.1)
    print(f"line {k}", flush=True)
"""


@pytest.mark.dist
def test_steps_are_shown_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ltc_launch", "--nprocs", "2", "train.py"],
        cwd=tmp_path,
        stdout=end,
        stderr=end,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    os.close(end)
    read = b""
    try:
        while chunk := os.read(terminal, 4096):
            read += chunk
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert process.wait() == 0
    text = read.decode()
    steps = [int(n) for n in re.findall(r"step (\d+), [\d.]+ steps/s", text)]
    assert steps and steps == sorted(steps) and steps[-1] <= 20
    shown = re.sub(r"step \d+, [\d.]+ steps/s\r?\x1b\[K|\r?\x1b\[K", "", text)
    lines = sorted(line for line in shown.splitlines() if line)
    assert lines == sorted(f"[{rank}] line {k}" for rank in range(2) for k in range(20))
