"""The clock of rank 0: processes of other hosts find how far theirs is from it."""

import threading
import time

import pytest
import torch.distributed

from ltc_dist.job import clock, host_collectives
from ltc_dist.job.clock import offset_from_rank_0


def test_each_process_finds_its_offset() -> None:
    store = torch.distributed.HashStore()
    ahead_ns = (0, 5_000_000_000, -7_000_000_000)
    found: dict[int, int | None] = {}

    def run(rank: int) -> None:
        def now_ns() -> int:
            return time.perf_counter_ns() + ahead_ns[rank]

        found[rank] = offset_from_rank_0(store, rank, 3, now_ns)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == 0
    for rank in (1, 2):
        offset_ns = found[rank]
        assert offset_ns is not None and abs(offset_ns + ahead_ns[rank]) < 2_000_000_000
    assert store.num_keys() <= 1  # HashStore counts one of its own


def test_without_an_answer_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(host_collectives, "LOOK_S", 0.01)
    assert offset_from_rank_0(torch.distributed.HashStore(), 1, 2) is None
