"""PyTorch's operators in the tiers of the compiler: a twentieth lowered and compiled, other ones for each commit.

All of them: make test-opinfo.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.ops.test_opinfo import OPS
from tests.nets.run_opinfo import SKIPPED_IN

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tier", ["lowered", "compiled"])
def test_operators_are_as_eager(tier: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.nets.run_opinfo", "--tier", tier, "--share", "20"],
        cwd=ROOT,
        env={**os.environ, "LTC_COMPILED_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_skipped_operators_exist_and_are_few() -> None:
    for rows in SKIPPED_IN.values():
        assert set(rows) <= set(OPS) and len(rows) < 0.05 * len(OPS)
