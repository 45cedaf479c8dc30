"""How processes agree to join their devices: threads stand for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed

from ltc_core.executors.companions import NotTogether
from ltc_dist.job import companions, protocol
from ltc_dist.job.companions import JobCompanions


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = torch.distributed.HashStore()
    for name in ("job_store", "connected"):
        monkeypatch.setattr(companions, name, lambda: made)
    monkeypatch.setattr(companions, "_PATIENCE_S", 2.0)
    return made


def met(refusals: list[str], count: int) -> list[str]:
    """What each of the processes that come is told: the address, or why they are not joined."""

    def meet(rank: int) -> str:
        try:
            return JobCompanions(rank, count, is_one_host=True).meet(refusals[rank])
        except NotTogether as error:
            return f"not: {error}"

    with ThreadPoolExecutor(len(refusals)) as pool:
        return list(pool.map(meet, range(len(refusals))))


def test_all_are_told_one_address(store: Any) -> None:
    addresses = met(["", "", ""], 3)
    assert len(set(addresses)) == 1
    host, _, port = addresses[0].rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0


def test_if_one_cannot_join_none_does(store: Any) -> None:
    assert met(["", "it has 2 devices"], 2) == ["not: rank 1: it has 2 devices"] * 2


def test_one_that_does_not_come_is_named_and_hears_it_later(store: Any) -> None:
    why = "rank 2 did not make its device within 2 s"
    assert met(["", ""], 3) == [f"not: {why}"] * 2
    with pytest.raises(NotTogether, match=why):
        JobCompanions(2, 3, is_one_host=True).meet("")


def test_one_that_has_ended_is_named(store: Any) -> None:
    protocol.ENDED.tell(store, rank=1)
    assert met([""], 2) == ["not: rank 1 has ended"]


def test_a_process_that_a_rank_has_started_is_not_its_rank(store: Any) -> None:
    protocol.DEVICES.tell(store, f"{os.getpid() + 1}\n\n", stage="come", rank=1)
    with pytest.raises(NotTogether, match="another process of rank 1 has made its devices"):
        JobCompanions(1, 2, is_one_host=True).meet("")


def test_a_job_of_one_process_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert companions.find() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = companions.find()
    assert found is not None and (found.rank, found.count) == (1, 2)
