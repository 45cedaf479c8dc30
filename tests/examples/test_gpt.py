"""examples/gpt.py: a small GPT learns, in one process and in two; and it writes."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import prepared

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "gpt.py")
SMALL = [
    "--steps",
    "60",
    "--width",
    "32",
    "--layers",
    "2",
    "--log-interval",
    "20",
    "--letters",
    "20",
]


@pytest.mark.dist
@pytest.mark.parametrize("launch", [[], ["-m", "ltc_launch", "--nprocs", "2"]], ids=["one", "two"])
def test_it_learns_to_write(launch: list[str], tmp_path: Path) -> None:
    done = prepared.run(
        [sys.executable, *launch, SCRIPT, *SMALL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LTC_COMPILE": "off", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] and losses[2] < 3.2
    assert "You may " in done.stdout
