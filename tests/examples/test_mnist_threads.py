"""examples/mnist_threads.py: two devices of one process learn together."""

import os
import re
import sys
from pathlib import Path

from tests import prepared

ROOT = Path(__file__).parents[2]


def test_it_learns(tmp_path: Path) -> None:
    settings = {"LTC_NUM_DEVICES": "2", "LTC_COMPILE": "off", "TMPDIR": str(tmp_path)}
    done = prepared.run(
        [sys.executable, str(ROOT / "examples" / "mnist_threads.py"), "--epochs", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [(count, percent)] = re.findall(r"(\d) devices, test accuracy: ([\d.]+) %", done.stdout)
    assert count == "2" and float(percent) > 80
