"""`expect_success("tests.nets.copies", "--count", "20")`: a net as its command, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["expect_success"]

ROOT = Path(__file__).parents[2]


def expect_success(module: str, *arguments: str, **settings: str) -> None:
    """Run a module with arguments; `settings` are environment variables beside those of the tests.

    Raises:
        AssertionError: its exit code is not 0; the text is what it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
