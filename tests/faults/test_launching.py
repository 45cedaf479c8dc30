"""Faults at the start and of what processes say: told at once, and nothing is left lying about."""

import os
import pickle
import re
import socket
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ltc_dist as ltd
from ltc_core.errors import CheckpointError, RankError
from tests import prepared
from tests.faults.test_processes import TRAINING, TWO
from tests.launching import Job, launcher

pytestmark = pytest.mark.dist


def script(tmp_path: Path, code: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(code))
    return str(path)


class Bad:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this ran",)


def test_row_22_a_pickle_that_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.pt").write_bytes(pickle.dumps(Bad(), protocol=2))
    torch.save(Bad(), tmp_path / "bad.zip")
    for name in ("bad.pt", "bad.zip"):
        with pytest.raises(CheckpointError, match="Next: "):
            ltd.load(tmp_path / name)
    with pytest.raises(RankError, match="this cannot be sent to other processes"):
        ltd.mesh_reduce("bad", Bad(), list)
    assert "this ran" not in capsys.readouterr().out


def test_rows_25_and_30_two_launches_at_once_leave_nothing(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    jobs = [Job([*TWO, TRAINING, "--steps", "3"], directory) for directory in directories]
    for job, directory in zip(jobs, directories, strict=True):
        code, out, err = job.end()  # looks for what is left
        assert code == 0 and err == "" and "final" in out, err
        assert [path.name for path in directory.iterdir()] == ["tmp"]


def test_row_25_the_port_of_several_hosts_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        options = launcher("--nnodes", "2", "--rdzv-endpoint", endpoint)
        code, _, err = Job([*options, TRAINING], tmp_path).end()
    assert code == 75 and "Traceback" not in err
    assert re.search(rf"ltc-launch: .*{endpoint}", err), err


def test_row_26_a_process_ends_before_it_joins(tmp_path: Path) -> None:
    code = """
        import os, sys
        if os.environ["RANK"] == "1":
            sys.exit(3)
        import ltc_dist as ltd
        ltd.rendezvous("begin")
    """
    exit_code, _, err = Job([*TWO, script(tmp_path, code)], tmp_path).end()
    assert exit_code == 3
    assert re.search(r"rank 1 \(pid \d+\) ended with exit code 3; the others were stopped", err)


def test_row_26_who_is_missing_is_said(tmp_path: Path) -> None:
    code = """
        import time
        import ltc_dist as ltd
        if ltd.get_ordinal() == 1:
            time.sleep(60)
        ltd.rendezvous("begin")
    """
    command = [*TWO, script(tmp_path, code)]
    exit_code, _, err = Job(command, tmp_path, LTC_COLLECTIVE_TIMEOUT_S="2").end()
    assert exit_code == 75
    assert "rendezvous 'begin' was not complete after 2 s" in err and "missing: ranks 1" in err


LINES = """
    import os, sys, time
    from pathlib import Path
    out = sys.stdout.buffer
    out.write(b"x" * 3_000_000)
    out.write(b"\\n\\xff\\xfe not text\\n")
    out.write(b"10%\\r20%\\r30%")
    out.flush()
    class Odd(Exception):
        def __reduce__(self): raise TypeError
    written = Path(__file__).with_suffix(".written")
    if os.environ["RANK"] == "0":
        written.touch()
    else:
        while not written.exists():  # whose failure ends the other before it has written
            time.sleep(0.01)
        raise Odd("caf\\u00e9 \\udcff " + "y" * 100_000)
"""


def test_row_28_lines_of_all_sorts_and_an_error_of_its_own_kind(tmp_path: Path) -> None:
    code, out, err = Job([*TWO, script(tmp_path, LINES)], tmp_path).end()
    assert code == 1
    assert len(out) >= 2 * 3_000_000 and out.count("not text") == 2 and out.count("30%") == 2
    assert err.count("Odd: caf") == 1 and "y" * 100_000 in err


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "foo", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
    ],
)
def test_row_33_variables_that_make_no_sense(
    environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    path = script(tmp_path, "import ltc_dist as ltd; ltd.get_ordinal()")
    command = [sys.executable, "-W", "error", path]
    done = prepared.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search(rf"(RankError|SettingsError): .*{words}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--nprocs", "0", TRAINING],
            "--nprocs must be a whole number, 1 or more, or 'auto', not '0'",
        ),
        (["--nprocs", "eight", TRAINING], "not 'eight'"),
        (
            ["--devices", "0,1", "--nprocs", "3", TRAINING],
            "--devices names 2 devices for 3 processes",
        ),
        (["--devices", "a", TRAINING], "--devices must be whole numbers"),
        (["--hang-timeout", "-1", TRAINING], "--hang-timeout must not be negative"),
        (["no/such/script.py"], "there is no script no/such/script.py"),
        (["."], ". is a directory; name the script in it"),
        ([], "the following arguments are required: target"),
        (["--nproc", "2", TRAINING], "there is no option --nproc; did you mean --nprocs"),
    ],
)
def test_row_33_command_lines_that_make_no_sense(
    options: list[str], words: str, tmp_path: Path
) -> None:
    code, out, err = Job([*launcher(), *options], tmp_path).end()
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and words in err
