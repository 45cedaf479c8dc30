"""A training step compiled for a TPU, on a machine without one."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the package libtpu: PYTHONPATH=.libtpu after make tpu-aot",
)


@pytest.mark.parametrize("chips", [1, 4])
def test_a_step_compiles(chips: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "LTC_NUM_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tpu_aot", "mlp", "--chips", str(chips)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d.]+) MiB aliased, +(\d+) collectives, +(\d+) fusions", done.stdout)
    assert found is not None, done.stdout
    # 533,000 parameters of 4 bytes, and AdamW's two moments, are updated in their memory.
    assert float(found[1]) * 2**20 >= 0.95 * 3 * 4 * 533_000 / chips
    assert (int(found[2]) > 0) == (chips > 1)
    assert int(found[3]) > 0
