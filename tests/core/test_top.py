"""`python -m ltc_core.top`: one table of what runs, or a view that leaves the terminal clean."""

import os
import pty
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ltc_core import top
from ltc_core.live.board import StateFile
from ltc_core.live.sampler import Sampler
from tests.core import child
from tests.core.live.test_publisher import BLOCKED, TRAIN, awaited

ROOT = Path(__file__).parents[2]


def test_once_prints_the_step_and_what_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with child.start(TRAIN + BLOCKED, LTC_WATCH=str(tmp_path), LTC_COMPILE="off") as process:
        state = awaited(tmp_path, lambda s: s.doing == "waiting for the device")
        time.sleep(1)
        assert top.main(["--once", "--directory", str(tmp_path)]) == 0
        head, row, compiled = capsys.readouterr().out.splitlines()
        assert head.split()[:3] == ["rank", "pid", "step"]
        assert row.split()[:3] == ["-", str(state.pid), "3"]
        assert "waiting for the device, since " in row and row.endswith("s (-c)")
        assert compiled.startswith("last new program: 2, ")
        assert top.main(["1", "--once", "--directory", str(tmp_path)]) == 1
        assert "none of the processes 1 publishes its state" in capsys.readouterr().err
        process.kill()
    assert top.main(["--once", "--directory", str(tmp_path)]) == 1
    message = (
        f"ltc: no process publishes its state in {tmp_path}. Next: start it with LTC_WATCH=1\n"
    )
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []


def test_in_a_terminal_it_is_redrawn_until_ctrl_c(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    file.write(replace(Sampler().read(), cause=""))
    terminal, end = pty.openpty()
    termios.tcsetwinsize(terminal, (30, 200))  # a narrow one leaves columns out
    process = subprocess.Popen(
        [sys.executable, "-m", "ltc_core.top"],
        stdout=end,
        stderr=end,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LTC_WATCH": str(tmp_path)},
    )
    os.close(end)
    read = b""
    is_told = False
    try:
        while chunk := os.read(terminal, 4096):
            read += chunk
            if read.count(b"rank") >= 3 and not is_told:
                process.send_signal(signal.SIGINT)
                is_told = True
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    file.remove()
    assert process.wait() == 0
    assert b"Traceback" not in read and str(os.getpid()).encode() in read
    assert read.endswith(b"\r\x1b[K\x1b[1A\x1b[K")  # two lines are erased, nothing comes after
