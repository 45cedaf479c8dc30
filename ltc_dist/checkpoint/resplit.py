"""Position of each process's loader when a job resumes with another number of processes or another batch size.

DistributedSampler distributes samples in turn. So when every process has taken the same number of batches, the first
samples of the epoch are used, and another number of processes continues after them. `check_dealing` refuses samples
that are distributed otherwise, such as contiguous shards: some would be lost, and some would come twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ltc_core.errors import CheckpointError, listed

__all__ = ["check_dealing", "loader_state"]

_log = logging.getLogger("ltc")


_OF_ALL = ("num_samples", "shuffle", "seed")  # what decides the order that is dealt out


def check_dealing(
    name: str,
    states: Sequence[dict[str, Any]],
    now: dict[str, Any],
    rank: int,
    world_size: int,
    batch_size: Any,
) -> None:
    """Refuse to continue an epoch of which `loader_state` would lose or repeat samples.

    Args:
        name: of the loader, for messages.
        states: by rank: the loader's `state`, its `batch_size` and its `dealing`, see `dealing_of`.
        now: the loader's dealing in this process.

    Raises:
        CheckpointError: samples have been used, and it is not known which.
    """
    is_same_world = len(states) == world_size
    if is_same_world and states[rank]["batch_size"] == batch_size:
        return
    if not any(s["state"].get("num_batches") for s in states):
        return  # the epoch begins; or the position is the loader's own
    if is_same_world:
        saved = states[rank].get("dealing", {})
        if not (saved.get("is_known") and saved == now):
            raise CheckpointError(
                f"{name!r} cannot go on with batches of {batch_size}: samples would be lost or come twice",
                got=f"the order of {_words(saved)} when it was saved, of {_words(now)} here; expected a sampler of "
                "PyTorch's, the same in both",
                next=f"take batches of {states[rank]['batch_size']}, or leave it out: restore(skip=[{name!r}]) begins "
                "its epoch anew.",
            )
        return
    found = [
        (f"rank {k} when it was saved", s.get("dealing", {}), k, len(states))
        for k, s in enumerate(states)
    ]
    first = found[0][1]
    for who, dealing, its_rank, num_replicas in [
        *found,
        (f"rank {rank} here", now, rank, world_size),
    ]:
        is_in_turn = (dealing.get("rank"), dealing.get("num_replicas")) == (its_rank, num_replicas)
        if is_in_turn and all(dealing[part] == first.get(part) for part in _OF_ALL):
            continue
        raise CheckpointError(
            f"{name!r} was saved by {len(states)} processes and cannot be dealt out to {world_size}: samples would be "
            "lost or come twice",
            got=f"{who} has {_words(dealing)}; expected a DistributedSampler of {num_replicas} processes, rank "
            f"{its_rank}, over the same samples in the same order, in each process",
            next=f"start {len(states)} processes, or leave it out: restore(skip=[{name!r}]) begins its epoch anew.",
        )


def _words(dealing: dict[str, Any]) -> str:
    if not dealing:
        return "an order that was not saved"
    details = ", ".join(
        f"{key}={dealing[key]}" for key in ("num_replicas", "rank", *_OF_ALL) if key in dealing
    )
    return f"{dealing['order']}({details})" if details else str(dealing["order"])


def loader_state(
    name: str, states: Sequence[dict[str, Any]], rank: int, world_size: int, batch_size: Any
) -> Any:
    """Return the state for one process of `world_size`, from those of the processes that saved.

    Args:
        name: of the loader, for messages.
        states: by rank: the loader's `state`, and its `batch_size`; its `dealing`, to know when all samples are used.
        batch_size: of the loader now, in this process.

    Raises:
        CheckpointError: the states do not say how many samples were used.
    """
    mine = states[rank] if len(states) == world_size else None
    if mine and (mine["batch_size"] == batch_size or "num_batches" not in mine["state"]):
        return mine["state"]
    before = states[0]["state"]
    counts = {s["state"].get("num_batches") for s in states}
    sizes = {s["batch_size"] for s in states}
    known = type(before.get("num_batches")) is int and type(batch_size) is int
    if not known or len(counts) > 1 or len(sizes) > 1 or type(states[0]["batch_size"]) is not int:
        other = f"be dealt out to {world_size}" if mine is None else "go on with other batches"
        raise CheckpointError(
            f"{name!r} was saved by {len(states)} processes and cannot {other}",
            got=f"batches taken: {listed(counts)}; batch sizes: {listed(sizes)}, now {batch_size}",
            next=f"start {len(states)} processes, or leave it out: restore(skip=[{name!r}]) begins its epoch anew.",
        )
    used = before["num_batches"] * states[0]["batch_size"] * len(states)
    num_batches, again = divmod(used, batch_size * world_size)
    if again and used >= states[0].get("dealing", {}).get("num_samples", used + 1):
        num_batches, again = num_batches + 1, 0  # the last batches were smaller, and none is left
    if again:
        _log.warning(
            "%s: %d samples of the epoch come again: %d were used, and now %d go at a time",
            name, again, used, batch_size * world_size,
        )  # fmt: skip
    if mine:
        return {**mine["state"], "num_batches": num_batches}
    # Only the state of rank 0 is whole. Its generators are not those of the others, except for what deals out.
    state = {key: value for key, value in before.items() if rank == 0 or key != "host_now"}
    if rank > 0 and used == 0 and "order" in state:
        epochs = {path: epoch for path, epoch in state["order"].items() if type(epoch) is int}
        state |= {"rng_state": None, "order": epochs}
    return {**state, "num_batches": num_batches}
