"""Position of each process's loader when a job resumes with another number of processes or another batch size.

DistributedSampler distributes samples in turn. So when every process has taken the same number of batches, the first
samples of the epoch are used, and another number of processes continues after them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ltc_core.errors import CheckpointError, listed

__all__ = ["loader_state"]

_log = logging.getLogger("ltc")


def loader_state(
    name: str, states: Sequence[dict[str, Any]], rank: int, world_size: int, batch_size: Any
) -> Any:
    """Return the state for one process of `world_size`, from those of the processes that saved.

    Args:
        name: of the loader, for messages.
        states: by rank: the loader's `state`, and its `batch_size`.
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
    if again:
        _log.warning(
            "%s: %d samples of the epoch come again: %d were used, and now %d go at a time",
            name, again, used, batch_size * world_size,
        )  # fmt: skip
    return {**before, "num_batches": num_batches}
