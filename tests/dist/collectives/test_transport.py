"""Waiting for the other members of a collective: who has come and ended is not taken for one who never came."""

import datetime
from typing import Any

import pytest
import torch.distributed as dist

from ltc_core.errors import PeerEndedError
from ltc_dist.collectives import transport
from ltc_dist.collectives.transport import Line
from ltc_dist.job import protocol
from ltc_dist.job.host_collectives import wait_checking


class Work:
    """A collective that ends, if at all, while the member has looked away; the other one ends with it."""

    def __init__(self, store: Any, is_done: bool) -> None:
        self.store = store
        self.will_be_done = is_done
        self.looks = 0

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.looks += 1
        if self.looks == 1:
            protocol.ENDED.tell(self.store, rank=1)
        if self.looks == 1 or not self.will_be_done:
            raise RuntimeError("the time is up")
        return True

    def is_completed(self) -> bool:
        return False


def waited(is_done: bool) -> Work:
    store = dist.HashStore()
    line = Line("two", (0, 1), 0, store, None)
    call = transport._Call(1, 0, "train.py:3", "all_reduce sum")
    work = Work(store, is_done)
    line.wait(work, call)
    return work


def test_one_that_has_done_its_part_and_ended() -> None:
    assert waited(is_done=True).looks == 2


def test_one_that_has_ended_without() -> None:
    with pytest.raises(PeerEndedError, match="rank 1 has ended while rank 0 waits for it"):
        waited(is_done=False)


@pytest.mark.parametrize("writes", [True, False])
def test_one_that_has_written_its_key_and_ended(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltc_dist.job.host_collectives.LOOK_S", 0.01)
    store = dist.HashStore()

    def check(time_is_up: bool) -> None:
        if writes:
            store.set("key", "here")
        raise PeerEndedError("rank 1 has ended while rank 0 waits for it")

    if writes:
        wait_checking(["key"], check, store)
    else:
        with pytest.raises(PeerEndedError):
            wait_checking(["key"], check, store)
