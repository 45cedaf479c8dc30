"""Importing `ltc_core`: the garbage collector rests meanwhile, and is left as it was."""

import os
import subprocess
import sys

import pytest

from ltc_core.torch_version import check_version
from tests.core.child import ROOT

SHOW = "; import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("import ltc_core", "True True"),
        ("import gc; gc.disable(); import ltc_core", "False True"),
        # What the script has made by then may be garbage later.
        ("import torch; import ltc_core", "True False"),
    ],
)
def test_the_collector_is_left_as_it_was(program: str, shown: str) -> None:
    command = [sys.executable, "-W", "error", "-c", program + SHOW]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.strip(), done.stderr) == (shown, "")


@pytest.mark.parametrize("module", ["ltc_core", "ltc_dist"])
def test_an_old_pytorch_is_refused_in_a_sentence(module: str) -> None:
    program = f"import torch; torch.__version__ = '2.8.0+cu128'; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "VersionError: this PyTorch is too old for ltc\n"
        "  got: torch 2.8.0+cu128, expected 2.9 to 2.15\n"
        "  Next: pip install 'torch>=2.9'"
    )


def test_a_new_pytorch_is_warned_of() -> None:
    for version in ("2.9.0", "2.13.0+cpu", "2.15.1a0", "my build"):
        check_version(version)
    with pytest.warns(UserWarning, match=r"torch 2\.16\.0\+cpu is newer .*2\.9 to 2\.15"):
        check_version("2.16.0+cpu")
