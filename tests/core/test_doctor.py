"""The report of `python -m ltc_core.doctor`: what it says of a machine that is well, and of one that is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ltc_core.doctor import Findings, _versions
from tests import prepared

ROOT = Path(__file__).parents[2]


def report(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "ltc_core.doctor", *options]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LTC_") or k == "LTC_CACHE_DIR"}
    return prepared.run(
        command, cwd=ROOT, env={**kept, **environ}, capture_output=True, text=True, timeout=200
    )


def test_a_machine_that_is_well() -> None:
    done = report(LTC_BUCKET_MB="16")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "torch",
        "1 ltc on CPU",
        "_ltc_record",
        "loaded in",
        "LTC_BUCKET_MB=16",
    ):
        assert words in done.stdout
    # Eager PyTorch's own losses differ in the last bits in one of 150 new processes on a busy machine.
    difference = re.search(r"losses differ from eager's by (\S+) relative", done.stdout)
    assert difference and float(difference[1]) < 1e-5
    assert done.stdout.endswith("\nno problems\n") and done.stderr == ""


def test_what_is_wrong_is_told_with_what_to_do(tmp_path: Path) -> None:
    shared = tmp_path / "compiled"
    shared.mkdir()
    shared.chmod(0o777)
    done = report(
        "--compile", LTC_COMPILED_CACHE_DIR=str(shared), LTC_DEVICE="cuda", CXX="no-such-compiler"
    )
    assert done.returncode == 1
    *_, told = done.stdout.partition("\n\nproblem: ")
    assert "CXX names no-such-compiler, which is not there)\n  Next: install g++" in told
    assert "LTC_DEVICE=cuda, and PyTorch finds no GPU\n  Next: install PyTorch's CUDA build" in told
    assert "compiled can be written by other users" in told
    assert told.count("  Next: ") == told.count("problem: ") + 1


def test_a_pytorch_that_is_not_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.__version__", "2.16.1")
    found = Findings()
    found.section("Versions", _versions(found))
    assert "torch 2.16.1" in capsys.readouterr().out
    assert [next for _, next in found.problems] == [
        "install one from 2.9 to 2.15: the tests run with these"
    ]
