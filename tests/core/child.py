"""A Python program in a process of its own, for what belongs to a process: its environment, its end, its children.

The environment is that of the tests without their `LTC_` names, so that a child sees only what its test sets. The
directory of caches is that of the tests: to build the C++ parts once more takes two minutes of a core.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests import prepared

__all__ = ["run", "start"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120

PRELUDE = """
import torch
import ltc_core as ltc
device = ltc.lazy_device()
"""


def _environment(settings: dict[str, str]) -> dict[str, str]:
    kept = {
        name: v
        for name, v in os.environ.items()
        if name == "LTC_CACHE_DIR" or not name.startswith(("LTC_", "XLA_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "LTC_CHECK_GRAPHS": "1", **settings}


def start(code: str, *, prelude: str = PRELUDE, **settings: str) -> subprocess.Popen[str]:
    """Start `prelude` and `code`, in which every warning is an error; `settings` are environment variables."""
    return prepared.start(  # type: ignore[no-any-return]
        [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(settings),
    )


def run(
    code: str,
    *,
    prelude: str = PRELUDE,
    returncode: int = 0,
    timeout_s: float = TIMEOUT_S,
    **settings: str,
) -> tuple[str, str]:
    """Run a program to its end, with the return code that is expected; give what it wrote: (stdout, stderr)."""
    with start(code, prelude=prelude, **settings) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            raise AssertionError(f"it hangs\n{out}\n{err}") from None
    assert child.returncode == returncode, f"rc {child.returncode}\n{out}\n{err}"
    return out, err
