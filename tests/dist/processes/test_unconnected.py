"""A job whose processes train each by itself says so, once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ltc_dist.collectives import process_group
from ltc_dist.processes import unconnected
from tests.launching import Job, launcher

TOLD = (
    "ltc: 2 processes train each by itself: in 10 steps nothing was exchanged between them. Next: "
)
SCRIPT = """
import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(25):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.dist
def test_a_script_that_forgets_to_average_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, err = Job([*launcher("--nprocs", "2"), "train.py"], tmp_path).end()
    assert code == 0
    [line] = err.splitlines()
    assert line.startswith(f"[0] {TOLD}")


@pytest.fixture
def train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Step in what looks like a process of a job; give what is told."""

    def call(steps: int, rank: int = 0, size: int = 2) -> str:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        monkeypatch.setattr(unconnected, "_count", 0)
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        for _ in range(steps):
            unconnected._after_step(optimizer, (), {})
        return capsys.readouterr().err

    return call


def test_it_is_told_once_by_one_process(train: Callable[..., str]) -> None:
    assert train(9) == "" and train(30).count("Next: ") == 1 and train(30, rank=1) == ""
    assert train(30, size=1) == ""


def test_a_job_that_is_connected_is_told_nothing(
    train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_groups", {(0,): None})
    assert train(10)
    monkeypatch.setattr(process_group, "_groups", {(0,): None, (0, 1): None})
    assert train(10) == ""
    monkeypatch.setattr(process_group, "_groups", {})
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert train(10) == ""
