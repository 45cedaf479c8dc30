"""`ltc-launch --watch`: what each rank does is shown below the output; nothing of it is left."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TRAIN = """
import os, signal, time
import torch, ltc_dist as ltd
rank = int(os.environ["RANK"])
x = torch.zeros(2, device=ltd.lazy_device())
def step():
    global x
    x = ltd.all_reduce("sum", x + 1)
    ltd.mark_step()
"""


def watched(
    tmp_path: Path, code: str, returncode: int = 0, interrupt_at: str = "", nprocs: int = 2
) -> str:
    """What a terminal of 200 columns is sent by a job of two ranks.

    Args:
        interrupt_at: words at which Ctrl-C is pressed.
    """
    (tmp_path / "train.py").write_text(TRAIN + code)
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ltc_launch", "--watch", "--nprocs", str(nprocs), "train.py"],
        cwd=tmp_path,
        stdout=end,
        stderr=end,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "LTC_COMPILE": "off"},
    )
    os.close(end)
    read = b""
    try:
        while chunk := os.read(terminal, 4096):
            read += chunk
            if interrupt_at and interrupt_at.encode() in read:
                process.send_signal(signal.SIGINT)
                interrupt_at = ""
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert process.wait() == returncode, read.decode()
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")}
    assert left == {"train.py"}
    return read.decode().replace("\r\n", "\n")


def rows(text: str, rank: int) -> list[str]:
    return re.findall(rf"^ +({rank} +\d+ +\d+ .*)$", text, re.MULTILINE)


@pytest.mark.dist
def test_the_steps_of_both_ranks_are_shown_below_what_they_print(tmp_path: Path) -> None:
    code = """
for k in range(20):
    step()
    time.sleep(0.1)
    print(f"line {k}", flush=True)
"""
    text = watched(tmp_path, code)
    for rank in range(2):
        steps = [int(row.split()[2]) for row in rows(text, rank)]
        assert steps == sorted(steps) and 0 < steps[-1] <= 20
        lines = re.findall(rf"\x1b\[K\[{rank}\] (line \d+)\n", text)
        assert lines == [f"line {k}" for k in range(20)]
    assert "last new program" in text
    # The view is erased at the end: nothing is written after the last erasure.
    assert re.search(r"(\r\x1b\[K|\x1b\[1A\x1b\[K)\Z", text)


def test_one_process_prints_above_the_view_too(tmp_path: Path) -> None:
    code = (
        "for k in range(10):\n    step()\n    time.sleep(0.2)\n    print('line', k, flush=True)\n"
    )
    text = watched(tmp_path, code, nprocs=1)
    assert re.findall(r"\x1b\[K(line \d+)\n", text) == [f"line {k}" for k in range(10)]
    assert re.search(r"^ +- +\d+ +\d+ .*\(train.py\)$", text, re.MULTILINE)


@pytest.mark.dist
def test_a_straggler_is_named(tmp_path: Path) -> None:
    text = watched(tmp_path, "step()\ntime.sleep(3 * rank)\nstep()\n(x + 0).tolist()\n")
    assert any(re.search(r"waiting for other processes, rank 1", row) for row in rows(text, 0))
    assert "slowest: rank 1, which others wait for now" in text
    assert "rank 0 waits for rank 1" in text
    assert "rank 1 waits" not in text


@pytest.mark.dist
def test_a_killed_rank_is_shown_as_ended(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher gives it three seconds
step()
x.tolist()
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.1)
"""
    text = watched(tmp_path, code, returncode=137)
    assert any(row.endswith("ended") for row in rows(text, 1))
    assert not any(row.endswith("ended") for row in rows(text, 0))
    assert "ltc-launch: rank 1 " in text.rpartition("\x1b[K")[2]


@pytest.mark.dist
def test_ctrl_c_leaves_the_terminal_clean(tmp_path: Path) -> None:
    code = "while True:\n    step()\n    time.sleep(0.1)\n"
    text = watched(tmp_path, code, returncode=130, interrupt_at="steps/s")
    assert text.rpartition("\x1b[K")[2] == "ltc-launch: stopped by SIGINT\n"


def test_without_a_terminal_a_sentence_says_that_nothing_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('line')")
    done = subprocess.run(
        [sys.executable, "-m", "ltc_launch", "--watch", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (0, "line\n")
    assert done.stderr.startswith(
        "ltc-launch: --watch shows nothing: the output goes to no terminal."
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.dist
def test_top_shows_the_job_too(tmp_path: Path) -> None:
    """Also one whose output goes to no terminal, as the launcher says."""
    (tmp_path / "train.py").write_text(TRAIN + "while True:\n    step()\n    time.sleep(0.1)\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "LTC_COMPILE": "off"}
    job = subprocess.Popen(
        [sys.executable, "-m", "ltc_launch", "--watch", "--nprocs", "2", "train.py"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environ,
    )
    try:
        for _ in range(60):
            top = subprocess.run(
                [sys.executable, "-m", "ltc_core.top", "--once"],
                capture_output=True,
                text=True,
                env=environ,
            )
            ranks = [line.split()[0] for line in top.stdout.splitlines()[1:3] if line.split()]
            if top.returncode == 0 and ranks == ["0", "1"]:
                break
            time.sleep(0.5)
        assert ranks == ["0", "1"], top.stdout + top.stderr
    finally:
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=60) == 130
