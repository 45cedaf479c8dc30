"""Runs a piece of code as a script for torch_xla: in a fresh interpreter, since serving the old names lasts."""

import os
import sys
from pathlib import Path

from tests import prepared

ROOT = Path(__file__).parents[2]


def run(directory: Path, code: str, is_served: bool = True, **environ: str) -> str:
    """Run a script in a fresh interpreter, where the old names are served or not; give what it prints."""
    script = directory / "script.py"
    script.write_text(code)
    places = {"PYTHONPATH": os.fspath(ROOT), "LTC_COMPILE": "off"}
    done = prepared.run(
        [sys.executable, "-W", "error", *(("-m", "ltc_dist.compat") if is_served else ()), os.fspath(script)],
        cwd=directory, env={**os.environ, **places, **environ}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
