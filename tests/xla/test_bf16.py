"""The models of the parity tests with float32 stored as bfloat16: eager's losses within its rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.core.models import MODELS, Run

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
NUM_STEPS = 8
TRAINED = f"""
import json, torch, ltc_core as ltc
from tests.core.models import MODELS, Run
losses = {{}}
for name in MODELS:
    run = Run(name, "adam", ltc.lazy_device(), ltc.mark_step).train({NUM_STEPS})
    losses[name] = torch.stack(ltc.to_cpu(run.losses)).tolist()
    stored = {{str(p._h.value.buffer.take().dtype) for p in run.net.parameters()}}
    assert stored == {{"torch.bfloat16"}} and all(p.dtype is torch.float32 for p in run.net.parameters())
print(json.dumps(losses))
"""


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    """What a process has whose tensors are stored narrow: that is a setting of the process."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINED],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LTC_USE_BF16": "1"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_eagers_within_the_rounding(model: str, losses: dict[str, list[float]]) -> None:
    eagers = torch.stack(Run(model, "adam").train(NUM_STEPS).losses)
    ours = torch.tensor(losses[model])
    # Eight bits, a step after another: the first losses are nearest.
    torch.testing.assert_close(ours[:2], eagers[:2], rtol=0.02, atol=0.02)
    torch.testing.assert_close(ours, eagers, rtol=0.1, atol=0.05)
