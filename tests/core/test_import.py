"""Importing `ltc_core`: the garbage collector rests meanwhile, and is left as it was."""

import os
import subprocess
import sys

import pytest

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
