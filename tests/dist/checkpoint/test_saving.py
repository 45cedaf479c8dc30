"""One process writes; the others find the file when `save` returns; nobody waits for those who do not come."""

import io
from pathlib import Path

import pytest
import torch

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core.errors import RankError
from tests.dist import spawned


def test_alone(tmp_path: Path) -> None:
    data = {"x": (torch.ones(2, device=ltc.lazy_device()), 3)}
    ltd.save(data, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["x"][0].tolist() == [1, 1] and found["x"][1] == 3
    buffer = io.BytesIO()
    ltd.save(data, buffer)
    assert buffer.tell() > 0


@pytest.mark.dist
def test_three_processes(tmp_path: Path) -> None:
    ltd.spawn(spawned.write, (str(tmp_path),), nprocs=3, start_method="forkserver")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "all.pt", "master.pt", "own0.pt", "own1.pt", "own2.pt",
    ]  # fmt: skip
    assert torch.load(tmp_path / "all.pt")["x"][0].tolist() == [27, 27, 27]
    assert torch.load(tmp_path / "own2.pt") == 2


@pytest.mark.dist
def test_a_master_that_has_ended(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 has ended and will not come to the saving of"):
        ltd.spawn(spawned.leave_unsaved, (str(tmp_path),), nprocs=2, start_method="forkserver")
