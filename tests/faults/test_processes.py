"""Faults of processes: whoever is killed, stopped or fails, the job ends as one, says why, and leaves nothing."""

import contextlib
import os
import re
import signal
import sys
import time
from functools import cache
from pathlib import Path

import psutil
import pytest

from tests.launching import Job, launcher

pytestmark = pytest.mark.dist
TRAINING = str(Path(__file__).with_name("training.py"))
TWO = launcher("--nprocs", "2")
FINAL = re.compile(r"final (\w+ \S+)")


def final(out: str) -> str:
    found = FINAL.search(out)
    assert found, out
    return found[1]


@cache
def undisturbed(directory: Path) -> str:
    """What two processes come to when nothing goes wrong."""
    place = directory / "undisturbed"
    place.mkdir(exist_ok=True)
    code, out, err = Job([*TWO, TRAINING], place).end()
    assert code == 0 and err == "", err
    return final(out)


@pytest.fixture
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.getbasetemp())


ENDS = [
    ("kill9", 137, "was killed by SIGKILL"),
    ("raise", 1, "LookupError: no such word"),
    ("exit7", 7, "ended with exit code 7"),
    ("segv", 139, "was killed by SIGSEGV"),
]


@pytest.mark.parametrize(("kind", "exit_code", "words"), ENDS)
def test_rows_1_to_4_a_process_ends(kind: str, exit_code: int, words: str, tmp_path: Path) -> None:
    code, out, err = Job([*TWO, TRAINING, "--fault", f"{kind}@1:5"], tmp_path).end()
    assert code == exit_code and "fault at 5" in out and "final" not in out
    assert words in err and "rank 1 (pid " in err.splitlines()[-1]
    tracebacks = out.count("Traceback") + err.count("Traceback")
    assert tracebacks == (kind == "raise")
    if kind == "segv":
        assert re.search(
            r"\[1\] Fatal Python error: Segmentation fault(.|\n)*training.py", err + out
        )


def test_row_1_a_job_that_is_started_again_ends_as_if_nothing_had_been(
    tmp_path: Path, expected: str
) -> None:
    """Rank 0 is killed in the first attempt, rank 1 in the second."""
    again = launcher("--nprocs", "2", "--max-restarts", "2")
    job = Job([*again, TRAINING, "runs", "--fault", "kill9@0:8,kill9@1:11"], tmp_path)
    code, out, err = job.end()
    assert code == 0, err
    first, second = (int(step) for step in re.findall(r"resumed at (\d+)", out))
    # What was being written when a rank was killed does not count.
    assert first in (3, 6) and second in (6, 9)
    assert final(out) == expected
    told = re.findall(
        r"ltc-launch: rank (\d) \(pid \d+\) was killed by SIGKILL.*; all are started again", err
    )
    assert told == ["0", "1"], err


CAUSE_COMES_LATE = """
import os, sys, time

class Mute(LookupError):
    def __str__(self): raise KeyError("no text")

if os.environ["RANK"] == "0":
    sys.exit(1)
time.sleep(1)
error = Mute("the cause")
error.add_note("n" * 300_000)
raise error
"""


def test_row_2_a_process_exits_before_the_one_that_it_has_lost(tmp_path: Path) -> None:
    """What is told last is what was raised, at any length, and though it has no text."""
    (tmp_path / "train.py").write_text(CAUSE_COMES_LATE)
    code, _, err = Job([*TWO, str(tmp_path / "train.py")], tmp_path).end()
    assert code == 1 and "raise error" in err and "n" * 300_000 in err
    assert re.search(r"ltc-launch: rank 1 \(pid \d+\) raised this", err.splitlines()[-1])


ENDS_WITHOUT_THE_OTHERS = """
import sys, torch, torch.distributed as dist, ltc_dist as ltd

def steps(index):
    dist.init_process_group("gloo")
    for step in range(3):
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            sys.exit(0)

if __name__ == "__main__":
    ltd.spawn(steps, nprocs=2)
"""


@pytest.mark.parametrize("command", [TWO, [sys.executable]], ids=["launcher", "spawn"])
def test_row_2_a_process_ends_with_code_0_while_others_wait(
    command: list[str], tmp_path: Path
) -> None:
    """gloo alone says that some peer has closed its connection."""
    (tmp_path / "train.py").write_text(ENDS_WITHOUT_THE_OTHERS)
    code, _, err = Job([*command, str(tmp_path / "train.py")], tmp_path).end()
    assert code == 1 and "gloo" in err
    words = r"rank 0 \(pid \d+\).*, after rank 1 ended with exit code 0 while others waited; the others were stopped"
    assert re.search(words, err), err


def test_row_6_the_launcher_is_killed(tmp_path: Path) -> None:
    job = Job(
        [
            *TWO,
            TRAINING,
            "--num-workers",
            "2",
            "--slow",
            "0.2",
            "--steps",
            "900",
            "--items",
            "9000",
        ],
        tmp_path,
    )
    job.wait_for("step 2", times=2)
    assert len(job.processes()) >= 1 + 2 + 2 * 2
    job.process.kill()
    assert job.end(is_killed=True)[0] == -signal.SIGKILL


@pytest.mark.parametrize("nohup", [False, True])
def test_row_7_the_parent_of_spawn_is_killed(nohup: bool, tmp_path: Path) -> None:
    """Its processes are in a collective that one of them never comes to."""
    command = [sys.executable, TRAINING, "--spawn", "2", "--fault", "sleep@1:3"]
    job = Job(command, tmp_path, ignores_interrupts=nohup)
    job.wait_for("fault at 3")
    time.sleep(0.5)
    assert len(job.processes()) >= 3
    job.process.kill()
    assert job.end()[0] == -signal.SIGKILL


COMMANDS = {
    "launcher": [*TWO, TRAINING],
    "spawn": [sys.executable, TRAINING, "--spawn", "2"],
}


@pytest.mark.parametrize("to", ["parent", "group"])
@pytest.mark.parametrize("how", COMMANDS)
def test_row_8_ctrl_c(how: str, to: str, tmp_path: Path) -> None:
    job = Job([*COMMANDS[how], "--fault", "sleep@1:3"], tmp_path)
    job.wait_for("fault at 3")
    if to == "group":
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        job.process.send_signal(signal.SIGINT)
    code, _, err = job.end()
    assert code in (130, -signal.SIGINT)
    if how == "launcher":
        assert err == "ltc-launch: stopped by SIGINT\n"


FIRST_COLLECTIVE = """
import os, time
import torch, ltc_dist as ltd

print("fault at 0", flush=True)
if os.environ["RANK"] == "1":
    {other}
else:
    x = ltd.all_reduce("sum", torch.ones(2, device=ltd.lazy_device()))
    print(x.tolist())
"""


def test_row_8_ctrl_c_while_the_processes_connect(tmp_path: Path) -> None:
    code = FIRST_COLLECTIVE.format(other="time.sleep(1000)")
    (tmp_path / "train.py").write_text(code)
    job = Job([*TWO, str(tmp_path / "train.py")], tmp_path)
    job.wait_for("fault at 0", times=2)
    time.sleep(2)  # until rank 0 waits for rank 1
    job.process.send_signal(signal.SIGINT)
    assert job.end()[::2] == (130, "ltc-launch: stopped by SIGINT\n")


def test_row_6_a_process_ends_before_its_first_collective(tmp_path: Path) -> None:
    code = FIRST_COLLECTIVE.format(other="pass")
    (tmp_path / "train.py").write_text(code)
    code, _, err = Job([*TWO, str(tmp_path / "train.py")], tmp_path).end()
    assert code == 1
    assert "PeerEndedError: rank 1 has ended while rank 0 waits for it" in err, err
    assert "got: rank 0 connects the ranks 0, 1" in err, err


def test_row_8_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """The processes do not react to the first one: their Python is blocked."""
    job = Job(
        [*launcher("--nprocs", "2", "--grace", "40"), TRAINING, "runs", "--fault", "lock@1:3"],
        tmp_path,
    )
    job.wait_for("fault at 3")
    job.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] in (130, 143)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stop", ", stopped by a signal) made no step"),
        ("sleep", ") made no step"),
        ("lock", ") made no step"),
    ],
)
def test_row_15_a_process_hangs(kind: str, words: str, tmp_path: Path) -> None:
    options = launcher("--nprocs", "2", "--hang-timeout", "8")
    code, out, err = Job([*options, TRAINING, "--fault", f"{kind}@1:5"], tmp_path).end(40)
    assert code == 124
    last = err.splitlines()[-1]
    assert re.search(r"ltc-launch: ranks? .*1 \(pid \d+", last) and words in last, last
    assert re.search(r"steps made: rank 0: \d+, rank 1: \d+; all were stopped$", last), last
    assert (
        "[0] Thread 0x" in err + out or "[0] Current thread 0x" in err + out
    )  # where the others wait
    if kind == "sleep":
        assert re.search(r"\[1\]   File .*training.py.* in train", err + out)


def test_row_15_a_job_that_hung_is_started_again(tmp_path: Path, expected: str) -> None:
    options = launcher("--nprocs", "2", "--hang-timeout", "8", "--max-restarts", "1")
    code, out, err = Job([*options, TRAINING, "runs", "--fault", "sleep@1:8"], tmp_path).end()
    assert code == 0 and "all are started again" in err
    assert final(out) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_row_17_sigterm_becomes_a_checkpoint(workers: int, tmp_path: Path, expected: str) -> None:
    options = ["--slow", "0.05", "--every", "100", "--num-workers", str(workers)]
    job = Job([*TWO, TRAINING, "runs", *options], tmp_path)
    job.wait_for("step 3")
    job.process.terminate()
    code, out, err = job.end()
    assert code == 143 and "final" not in out, err
    assert re.search(r"stopped by SIGTERM; step \d+ is in ", err + out)
    assert err.splitlines()[-1] == "ltc-launch: stopped by SIGTERM"
    assert "Traceback" not in err + out
    code, out, err = Job([*TWO, TRAINING, "runs"], tmp_path).end()
    assert code == 0 and "resumed at " in out
    assert final(out) == expected


@pytest.mark.parametrize(
    ("how", "loader"),
    [("launcher", "MpDeviceLoader"), ("spawn", "MpDeviceLoader"), ("launcher", "DataLoader")],
)
def test_row_17_everybody_is_told_again_and_again(how: str, loader: str, tmp_path: Path) -> None:
    """As schedulers do, which tell all processes of a job: parent, those that train, those that load data."""
    begin = TWO if how == "launcher" else [sys.executable]
    options = ["runs", "--slow", "0.3", "--every", "100", "--num-workers", "1", "--steps", "900"]
    options += ["--items", "9000", *(["--spawn", "2"] if how == "spawn" else [])]
    options += ["--plain"] if loader == "DataLoader" else []
    job = Job([*begin, TRAINING, *options], tmp_path)
    job.wait_for("step 2")
    while job.process.poll() is None:
        for process in job.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        time.sleep(0.2)
        if list((tmp_path / "runs").glob("step_*[0-9]")):  # the checkpoint is whole
            break
    code, out, err = job.end()
    assert code == (143 if how == "launcher" else -signal.SIGTERM), err
    assert re.search(r"stopped by SIGTERM; step \d+ is in ", err + out), err + out
    assert len(list((tmp_path / "runs").glob("step_*"))) == 1
    assert "Traceback" not in err + out


def test_row_17_one_process_alone_is_told_to_end(tmp_path: Path, expected: str) -> None:
    """All of them save after the same step, and are started again if that is allowed."""
    options = launcher("--nprocs", "2", "--max-restarts", "1")
    job = Job([*options, TRAINING, "runs", "--every", "100", "--fault", "term@1:2"], tmp_path)
    code, out, err = job.end()
    assert code == 0 and "resumed at " in out, err
    assert final(out) == expected


def test_row_17_who_takes_longer_than_the_grace_is_killed(tmp_path: Path) -> None:
    options = launcher("--nprocs", "2", "--grace", "1")
    job = Job([*options, TRAINING, "runs", "--fault", "sleep@1:3"], tmp_path)
    job.wait_for("fault at 3")
    job.process.terminate()
    code, _, err = job.end()
    assert code == 143
    assert "stopped by SIGTERM; what still ran after 1 s was killed" in err


def test_row_17_the_parent_of_spawn_hands_sigterm_on(tmp_path: Path) -> None:
    command = [sys.executable, TRAINING, "runs", "--spawn", "2", "--slow", "0.05", "--every", "100"]
    job = Job(command, tmp_path)
    job.wait_for("step 3")
    job.process.terminate()
    code, _, err = job.end()
    assert code == -signal.SIGTERM and re.search(r"step \d+ is in ", err), err
    assert len(list((tmp_path / "runs").glob("step_*"))) == 1


def test_row_29_everything_is_killed_at_once(tmp_path: Path) -> None:
    job = Job(
        [
            *TWO,
            TRAINING,
            "--num-workers",
            "1",
            "--slow",
            "0.2",
            "--steps",
            "900",
            "--items",
            "9000",
        ],
        tmp_path,
    )
    job.wait_for("step 2")
    for process in job.processes():
        process.kill()
    job.end(is_killed=True)
    code, _, err = Job([*TWO, TRAINING], tmp_path).end(is_killed=True)
    assert code == 0, err
    assert not list((tmp_path / "tmp").glob("ltc-launch-*"))  # the next one has cleared up
