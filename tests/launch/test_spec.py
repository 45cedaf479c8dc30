"""The command line: what it says, what a file adds, and mistakes told in one line with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from ltc_launch.spec import Spec, parse


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('here')")
    return tmp_path


def test_a_script_and_its_arguments() -> None:
    assert parse(["train.py"]) == Spec("train.py")
    found = parse(["--nprocs", "2", "--env", "A=b=c", "train.py", "--nprocs", "7", "-m", "x"])
    assert found == Spec(
        "train.py", ("--nprocs", "7", "-m", "x"), nprocs=2, env={"A": "b=c"}, prefix=True
    )
    assert parse(["-m", "package.train", "3"]) == Spec("package.train", ("3",), is_module=True)
    assert parse(["--nprocs", "2", "--no-prefix", "train.py"]).prefix is False
    assert parse(["--nprocs", "auto", "train.py"]).nprocs >= 1


def test_several_hosts() -> None:
    found = parse(
        ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "10.0.0.1:29500", "train.py"]
    )
    assert (found.nnodes, found.node_rank, found.endpoint) == (2, 1, "10.0.0.1:29500")
    assert found.prefix and found.backend == "static"


def test_a_file(here: Path) -> None:
    (here / "pyproject.toml").write_text(
        '[tool.ltc]\nnprocs = 4\nmax-restarts = 2\nenv = {A = "1"}\n[tool.other]\nx = 1\n'
    )
    found = parse(["train.py"])
    assert (found.nprocs, found.max_restarts, found.env) == (4, 2, {"A": "1"})
    assert parse(["--nprocs", "3", "train.py"]).nprocs == 3
    (here / "more.toml").write_text("nprocs = 5\nprefix = false\n")
    found = parse(["--config", "more.toml", "train.py"])
    assert (found.nprocs, found.max_restarts, found.prefix) == (5, 0, False)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--nprocs", "0", "train.py"],
            "--nprocs must be a whole number, 1 or more, or 'auto', not '0'",
        ),
        (["--nprocs", "-1", "train.py"], "not '-1'"),
        (["--nprocs", "eight", "train.py"], "not 'eight'"),
        (["no.py"], "there is no script no.py"),
        (["."], ". is a directory; name the script in it"),
        ([], "the following arguments are required: target"),
        (["--nproc", "2", "train.py"], "--nproc"),
        (["--nnodes", "2", "train.py"], "several hosts need --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "host", "train.py"], "must be HOST:PORT, not 'host'"),
        (["--nnodes", "2", "--node-rank", "2", "train.py"], "--node-rank 2 of --nnodes 2"),
        (["--env", "A", "train.py"], "--env needs NAME=VALUE, not 'A'"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts must not be negative"),
        (["--log-dir", "train.py", "train.py"], "--log-dir train.py cannot be used: File exists"),
        (["--log-dir", "/proc/x", "train.py"], "--log-dir /proc/x cannot be used: "),
        (["--config", "no.toml", "train.py"], "no.toml cannot be read"),
        (["--config", "bad.toml", "train.py"], "bad.toml has no option 'nproc'; legal are"),
    ],
)
def test_mistakes(
    here: Path, argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.toml").write_text("nproc = 2\n")
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    told = capsys.readouterr().err
    assert caught.value.code == 2 and told.startswith("ltc-launch: ") and text in told
    assert told.count("\n") == 1


def test_reading_a_command_line_imports_no_pytorch() -> None:
    code = (
        "import sys, ltc_launch.spec as s; s.parse(['train.py']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
