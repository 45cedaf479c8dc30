"""Scripts of libraries' users, native: the losses are those of the same script on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LIBRARIES = {"with_accelerate.py": "accelerate", "with_trainer.py": "transformers"}


def result(command: list[str], directory: Path, **environ: str) -> list[str]:
    """The words of the line that a script prints at its end: the device, the number of processes, the figures."""
    place = directory / str(len(list(directory.iterdir())))
    place.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            *command[:-1],
            str(SCRIPTS / command[-1].split()[0]),
            str(place),
            *command[-1].split()[1:],
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), **environ},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if "result " in line]
    assert len(lines) == 1, done.stdout
    assert ("accelerate trains on ltc" in done.stderr) == (" ltc " in lines[0])
    return lines[0].partition("result ")[2].split(" ", 2)


@pytest.mark.parametrize("script", LIBRARIES)
def test_one_process(script: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[script], reason="not installed: make test-ecosystem")
    device, count, wanted = result([f"{script} --cpu"], tmp_path, LTC_AUTOLOAD="1")
    assert (device, count) == ("cpu", "1")
    assert result([script], tmp_path, LTC_AUTOLOAD="1") == ["ltc", "1", wanted]


@pytest.mark.dist
@pytest.mark.parametrize("script", LIBRARIES)
def test_two_processes(script: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[script], reason="not installed: make test-ecosystem")
    launch = ["-m", "ltc_launch", "--nprocs", "2"]
    device, count, wanted = result([*launch, f"{script} --cpu"], tmp_path)
    assert (device, count) == ("cpu", "2")
    assert result([*launch, script], tmp_path) == ["ltc", "2", wanted]
