"""An epoch goes on in other processes, or with other batches, only if it is known which samples are left."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import ltc_dist as ltd
from ltc_core.errors import CheckpointError
from ltc_dist.checkpoint import checkpointer as of_checkpointer
from ltc_dist.checkpoint.resplit import check_dealing, loader_state
from ltc_dist.data.dealing import dealing_of
from tests.dist import spawned

DATA = TensorDataset(torch.arange(48))


class Shard(Sampler[int]):
    """The samples of one process, side by side."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.part = range(48 * rank // world_size, 48 * (rank + 1) // world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)

    def __len__(self) -> int:
        return len(self.part)


def in_turn(
    rank: int, world_size: int, data: Any = DATA, batch_size: int = 2, **options: Any
) -> Any:
    sampler = DistributedSampler(data, world_size, rank, **{"seed": 3, **options})
    return DataLoader(data, batch_size, sampler=sampler)


def part(rank: int, world_size: int) -> Dataset[Any]:
    return Subset(DATA, Shard(rank, world_size).part)


NOT_IN_TURN: dict[str, Callable[[int, int], Any]] = {
    "Shard": lambda rank, n: DataLoader(DATA, 2, sampler=Shard(rank, n)),
    "SequentialSampler": lambda rank, n: DataLoader(part(rank, n), 2),
    "RandomSampler": lambda rank, n: DataLoader(part(rank, n), 2, shuffle=True),
    r"DistributedSampler\(num_replicas=1, rank=0": lambda rank, n: in_turn(0, 1, part(rank, n)),
    r"DistributedSampler\(num_replicas=5, rank=1": lambda rank, n: in_turn(1, 5),
}


def saved_by(make: Callable[[int, int], Any], world_size: int, num_batches: int = 3) -> list[Any]:
    """What `world_size` processes save after so many batches."""
    saved = []
    for rank in range(world_size):
        loader = make(rank, world_size)
        state = {"num_batches": num_batches, "rng_state": None, "order": {"sampler.epoch": 2}}
        saved.append(
            {"state": state, "batch_size": loader.batch_size, "dealing": dealing_of(loader)}
        )
    return saved


def resumed(saved: list[Any], loader: Any, rank: int, world_size: int) -> int:
    """The number of batches after which a process goes on."""
    here = rank, world_size, loader.batch_size
    check_dealing("loader", saved, dealing_of(loader), *here)
    found: int = loader_state("loader", saved, *here)["num_batches"]
    return found


@pytest.mark.parametrize("name", NOT_IN_TURN)
@pytest.mark.parametrize("worlds", [(2, 1), (2, 3), (1, 2)])
def test_shards_cannot_be_dealt_out_again(name: str, worlds: tuple[int, int]) -> None:
    before, now = worlds
    make = NOT_IN_TURN[name]
    words = (
        rf"'loader' was saved by {before} processes and cannot be dealt out to {now}: samples would be lost or come "
        rf"twice\n  got: rank 0 \w.* has {name}.*; expected a DistributedSampler of \d processes, rank 0(.|\n)*"
        rf"Next: start {before} processes, or leave it out: restore\(skip=\['loader'\]\)"
    )
    if before == 1 and "replicas=1" in name:
        words = words.replace(
            "rank 0", r"rank \d"
        )  # one process has all; it is the new ones that have shards
    for rank in range(now):
        with pytest.raises(CheckpointError, match=words):
            resumed(saved_by(make, before), make(rank, now), rank, now)


@pytest.mark.parametrize("name", NOT_IN_TURN)
def test_both_the_old_and_the_new_processes_must_take_turns(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"rank 0 when it was saved has {name}"):
        resumed(saved_by(NOT_IN_TURN[name], 2), in_turn(0, 3), 0, 3)
    with pytest.raises(CheckpointError, match=f"rank 1 here has {name}"):
        resumed(saved_by(in_turn, 2), NOT_IN_TURN[name](1, 3), 1, 3)


@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"shuffle": False}, {"data": TensorDataset(torch.arange(50))}]
)
def test_the_order_that_is_dealt_out_must_be_the_same(other: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="over the same samples in the same order"):
        resumed(saved_by(in_turn, 2), in_turn(0, 3, **other), 0, 3)


def test_a_checkpoint_that_does_not_say_how_samples_were_dealt_out() -> None:
    saved = [{k: v for k, v in s.items() if k != "dealing"} for s in saved_by(in_turn, 2)]
    with pytest.raises(CheckpointError, match="has an order that was not saved"):
        resumed(saved, in_turn(0, 1), 0, 1)
    assert resumed(saved, in_turn(1, 2), 1, 2) == 3  # as many processes: nothing is dealt out


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 4), (4, 2), (3, 2)])
@pytest.mark.parametrize("num_samples", [48, 43])
@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_in_turn_come_once(
    worlds: tuple[int, int], num_samples: int, drop_last: bool
) -> None:
    """After each step: those used, and those that come in the new processes, are all, but for what a sampler drops."""
    data = TensorDataset(torch.arange(num_samples))
    before, now = worlds
    old = [in_turn(rank, before, data, drop_last=drop_last) for rank in range(before)]
    new = [in_turn(rank, now, data, drop_last=drop_last) for rank in range(now)]
    for loader in [*old, *new]:
        loader.sampler.set_epoch(2)
    old_batches = [[b.tolist() for (b,) in loader] for loader in old]
    new_batches = [[b.tolist() for (b,) in loader] for loader in new]
    for taken in range(len(old[0]) + 1):
        saved = saved_by(lambda rank, n: old[rank], before, taken)
        at = resumed(saved, new[0], 0, now)
        assert {resumed(saved, new[rank], rank, now) for rank in range(now)} == {at}
        used = [k for batches in old_batches for b in batches[:taken] for k in b]
        left = [k for batches in new_batches for b in batches[at:] for k in b]
        lost = set(range(num_samples)) - set(used) - set(left)
        assert len(lost) < max(worlds) if drop_last else not lost
        again = len(set(used) & set(left))
        padding = max(-num_samples % n for n in worlds)
        assert again <= padding + (len(used) % (2 * now) if taken < len(old[0]) else 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: DataLoader(DATA, size, sampler=Shard(0, 1)),
        lambda size: DataLoader(DATA, size, num_workers=0, sampler=list(range(48))),
    ],
)
def test_other_batches_of_an_unknown_order_are_refused(make: Callable[[int], Any]) -> None:
    saved = saved_by(lambda rank, n: make(2), 1)
    words = r"cannot go on with batches of 4: samples would be lost(.|\n)*Next: take batches of 2, or leave it out"
    with pytest.raises(CheckpointError, match=words):
        resumed(saved, make(4), 0, 1)
    assert resumed(saved, make(2), 0, 1) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda rank, n, size: DataLoader(part(rank, n), size),
        lambda rank, n, size: DataLoader(part(rank, n), size, sampler=RandomSampler(part(rank, n))),
        lambda rank, n, size: DataLoader(DATA, size, sampler=SequentialSampler(DATA)),
        lambda rank, n, size: in_turn(rank, n, batch_size=size),
    ],
)
def test_other_batches_of_a_known_order_go_on(make: Callable[[int, int, int], Any]) -> None:
    saved = saved_by(lambda rank, n: make(rank, n, 2), 2, 4)
    assert [resumed(saved, make(rank, 2, 4), rank, 2) for rank in range(2)] == [2, 2]


def test_an_epoch_that_begins_can_be_dealt_out_by_anything() -> None:
    """Each process keeps the generators it has: those of rank 0 would shuffle alike in all."""
    make = NOT_IN_TURN["RandomSampler"]
    saved = saved_by(make, 2, 0)
    for s in saved:
        s["state"]["order"]["sampler.generator"] = torch.zeros(4)
    assert [resumed(saved, make(rank, 3), rank, 3) for rank in range(3)] == [0, 0, 0]
    orders = [loader_state("loader", saved, rank, 3, 2)["order"] for rank in range(3)]
    assert [sorted(order) for order in orders] == [
        ["sampler.epoch", "sampler.generator"],
        ["sampler.epoch"],
        ["sampler.epoch"],
    ]


# -- through a checkpoint --------------------------------------------------------------------------


def run(directory: Path, loader: Any) -> tuple[Any, Any]:
    wrapped = ltd.MpDeviceLoader(loader, ltd.lazy_device())
    return wrapped, ltd.Checkpointer(directory, model=nn.Linear(1, 1), loader=wrapped)


def test_a_checkpoint_says_how_samples_were_dealt_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, checkpointer = run(tmp_path, DataLoader(DATA, 2, sampler=Shard(0, 1)))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    checkpointer.save(3)
    checkpointer.close()
    loader.close()

    loader, checkpointer = run(tmp_path, DataLoader(DATA, 4, sampler=Shard(0, 1)))
    with pytest.raises(
        CheckpointError, match="got: the order of Shard when it was saved, of Shard here"
    ):
        checkpointer.restore()
    assert checkpointer.restore(skip=["loader"]).step == 3
    checkpointer.close()

    asked: list[Any] = []
    monkeypatch.setattr(of_checkpointer, "check_dealing", lambda *args: asked.append(args))
    loader, checkpointer = run(tmp_path, in_turn(0, 1))
    checkpointer.restore()
    checkpointer.close()
    ((name, saved, now, rank, world_size, batch_size),) = asked
    assert (name, rank, world_size, batch_size) == ("loader", 0, 1, 2)
    assert saved[0]["dealing"]["order"] == "Shard" and now == dealing_of(loader)


@pytest.mark.dist
def test_one_process_goes_on_behind_two_that_took_turns(tmp_path: Path) -> None:
    ltd.spawn(spawned.deal_out, (str(tmp_path), True), nprocs=2, start_method="forkserver")
    used = [int(k) for rank in range(2) for k in (tmp_path / f"taken{rank}").read_text().split()]
    loader, checkpointer = run(tmp_path, in_turn(0, 1))
    assert checkpointer.restore().step == 3
    left = [k for (batch,) in loader for k in batch.tolist()]
    checkpointer.close()
    assert len(used) == 12 and sorted(used + left) == list(range(48))


@pytest.mark.dist
def test_one_process_refuses_the_shards_of_two(tmp_path: Path) -> None:
    ltd.spawn(spawned.deal_out, (str(tmp_path), False), nprocs=2, start_method="forkserver")
    loader, checkpointer = run(tmp_path, DataLoader(DATA, 2))
    words = r"saved by 2 processes(.|\n)*rank 0 when it was saved has SequentialSampler; expected a DistributedSampler"
    with pytest.raises(CheckpointError, match=words):
        checkpointer.restore()
    assert checkpointer.restore(skip=["loader"]).step == 3
    assert len(list(loader)) == 24
    checkpointer.close()
