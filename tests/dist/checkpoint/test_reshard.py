"""Divided state and parameters go on in another number of processes, with the same losses."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.checkpoint.zero_training import batch, groups, net
from tests.launching import Job, launcher

TRAINING = str(Path(__file__).with_name("zero_training.py"))
STEPS_EACH = 2


def eager(num_steps: int) -> list[float]:
    """Losses of one process on the CPU that trains without a pause."""
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses = []
    for step in range(num_steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.dist
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ((2, 1, 3, 2), ()),
        ((4, 2, 4), ("--precise",)),
        ((2, 1, 3, 2), ("--divided", "each")),
        ((3, 2, 1), ("--divided", "rows")),
    ],
    ids=["float32", "precise", "divided", "rows"],
)
def test_a_job_goes_on_in_other_processes(
    counts: tuple[int, ...], options: tuple[str, ...], tmp_path: Path
) -> None:
    losses: list[float] = []
    for k, count in enumerate(counts):
        steps = ["--steps", str(STEPS_EACH * (k + 1))]
        command = [*launcher("--nprocs", str(count)), TRAINING, "runs", *steps, *options]
        code, out, err = Job(command, tmp_path, LTC_COMPILE="off").end()
        assert code == 0, f"{count} processes after {counts[:k]}: {err}"
        losses += map(float, out.split("losses")[1].split())
    assert losses == pytest.approx(eager(STEPS_EACH * len(counts)), rel=1e-4, abs=1e-6)
