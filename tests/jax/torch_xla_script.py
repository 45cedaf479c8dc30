"""A script of torch_xla's users in a process of its own, on the device that they know it by."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run"]

ROOT = Path(__file__).parents[2]


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a directory, with the tests' environment but the name of their device."""
    path = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(ROOT)))
    environment = {k: v for k, v in os.environ.items() if k != "LTC_DEVICE_NAME"}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=directory,
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
