"""The line at the bottom of a terminal: drawn for who looks, and lines of processes stay whole above it."""

import os
import pty
import re
import socket
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


def started(directory: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """A launcher of train.py with a terminal, and the terminal's other end."""
    (directory / "train.py").write_text(TRAIN)
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ltc_launch", *arguments, "train.py"],
        cwd=directory,
        stdout=end,
        stderr=end,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
    )
    os.close(end)
    return process, terminal


def read_on(terminal: int, until: bytes = b"") -> str:
    """What is written to a terminal, until its end or until it contains something."""
    read = b""
    try:
        while chunk := os.read(terminal, 4096):
            read += chunk
            if until and until in read:
                break
    except OSError:  # the other end is closed
        pass
    return read.decode()


@pytest.mark.dist
def test_steps_are_shown_in_a_terminal(tmp_path: Path) -> None:
    process, terminal = started(tmp_path, "--nprocs", "2")
    text = read_on(terminal)
    os.close(terminal)
    assert process.wait() == 0
    steps = [int(n) for n in re.findall(r"step (\d+), [\d.]+ steps/s", text)]
    assert steps and steps == sorted(steps) and steps[-1] <= 20
    shown = re.sub(r"step \d+, [\d.]+ steps/s\r?\x1b\[K|\r?\x1b\[K", "", text)
    lines = sorted(line for line in shown.splitlines() if line)
    assert lines == sorted(f"[{rank}] line {k}" for rank in range(2) for k in range(20))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("node", "backend", "awaited"),
    [
        ("0", "static", b"waits for hosts 1; 1 of 2 are there, since "),
        ("1", "static", b"waits for the first host, which is to listen at 127.0.0.1:"),
        ("0", "c10d", b"waits for other hosts, since "),
    ],
)
def test_hosts_that_are_waited_for_are_shown(
    node: str, backend: str, awaited: bytes, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process, terminal = started(
        tmp_path,
        *("--nnodes", "2", "--node-rank", node, "--rdzv-backend", backend),
        *("--rdzv-endpoint", f"127.0.0.1:{port}"),
    )
    found = read_on(terminal, awaited)
    assert awaited.decode() in found
    assert "ltc-launch: waits" not in found  # said after 5 seconds
    process.terminate()
    read_on(terminal)
    os.close(terminal)
    assert process.wait(20) != 0
