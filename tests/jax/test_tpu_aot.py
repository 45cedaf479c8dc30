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


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("model", "parameters", "state", "chips"),
    [("mlp", 533_000, 2, 1), ("mlp", 533_000, 2, 4), ("mnist", 1_199_000, 1, 1)],
)
def test_a_step_compiles(model: str, parameters: int, state: int, chips: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "LTC_NUM_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tpu_aot", model, "--chips", str(chips)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d.]+) MiB aliased, +(\d+) collectives, +(\d+) fusions", done.stdout)
    assert found is not None, done.stdout
    # Parameters of 4 bytes, and the optimizer's state for each of them, are updated in their memory.
    assert float(found[1]) * 2**20 >= 0.95 * (1 + state) * 4 * parameters / chips
    assert (int(found[2]) > 0) == (chips > 1)
    assert int(found[3]) > 0
