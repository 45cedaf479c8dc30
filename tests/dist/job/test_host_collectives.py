"""Processes that meet on the host: by tag, with payloads, in parts, and in vain."""

import io
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ltc_core.errors import RankError
from ltc_dist.job import host_collectives
from ltc_dist.job.host_collectives import do_on_ordinals, mesh_reduce, rendezvous
from ltc_dist.processes import spawn as xmp
from tests.dist import spawned


def test_alone() -> None:
    assert rendezvous("tag", b"payload") == [b"payload"]
    assert mesh_reduce("tag", 3, sum) == 3
    assert do_on_ordinals(lambda a: a + 1, (2,)) == 3
    assert do_on_ordinals(lambda: 1, ordinals=[1]) is None
    with pytest.raises(TypeError, match="`payload` must be bytes, not <class 'str'>"):
        rendezvous("tag", "text")  # type: ignore[arg-type]
    with pytest.raises(RankError, match="rank 0 cannot come(?s:.*)replicas 1 of 1 processes"):
        rendezvous("tag", b"", [1])


@pytest.mark.dist
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_three_processes_meet(tmp_path: Path, method: str) -> None:
    xmp.spawn(spawned.meet, (str(tmp_path),), nprocs=3, start_method=method)
    found = [torch.load(tmp_path / f"{k}.pt", weights_only=False) for k in range(3)]
    for rank, got in enumerate(found):
        assert got["first"] == [b"made", b"found by 1", b"found by 2"]
        assert got["rounds"] == [[bytes([r, k]) for r in range(3)] for k in range(3)]
        assert got["part"] == ([] if rank == 1 else [b"\2", b"\0"])
        assert (got["sum"], got["mean"]) == (6, 1.0)
        assert got["concatenated"] == [0, 0, 1, 1, 2, 2]
        assert got["tensors"] == [[0, 0], [1, 1], [2, 2]]
        assert got["once"] == (5 if rank == 2 else None)


@pytest.mark.dist
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_that_a_rank_starts_does_not_end_the_rank(method: str) -> None:
    xmp.spawn(spawned.start_others, nprocs=2, start_method=method)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "ended",
            r"rank 1 has ended and will not come to rendezvous 'epoch'(?s:.*)missing: ranks 1",
        ),
        ("slow", r"'epoch' was not complete after 3 s(?s:.*)1 of 2 have come; missing: ranks 1"),
        ("object", "this cannot be sent to other processes"),
    ],
)
def test_in_vain(how: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = "forkserver"
    if how == "slow":
        monkeypatch.setenv("LTC_COLLECTIVE_TIMEOUT_S", "3")
        method = "spawn"
    started = time.monotonic()
    with pytest.raises(RankError, match=text) as caught:
        xmp.spawn(spawned.miss, (how,), nprocs=2, start_method=method)
    assert "raised by rank 0" in caught.value.__notes__[0]
    assert time.monotonic() - started < 30


@pytest.mark.dist
def test_a_process_that_waits_runs_what_others_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTC_COLLECTIVE_TIMEOUT_S", "60")
    xmp.spawn(spawned.wait_elsewhere, (str(tmp_path),), nprocs=2)


@pytest.mark.dist
def test_a_meeting_in_vain_does_not_count() -> None:
    xmp.spawn(spawned.meet_again, nprocs=2, start_method="forkserver")


def test_data_of_another_process_is_checked_where_torch_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = {"loss": torch.ones(2), "counts": np.arange(3), "names": ["a"]}
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    decoded = host_collectives._decode(host_collectives._encode(data))
    assert decoded["loss"].tolist() == [1, 1] and decoded["counts"].tolist() == [0, 1, 2]
    payload = io.BytesIO()
    torch.save(data, payload, _use_new_zipfile_serialization=False)  # a format that is not checked
    with pytest.raises(RankError, match="this cannot be sent to other processes"):
        host_collectives._decode(payload.getvalue())
