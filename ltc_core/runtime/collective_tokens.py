"""Tokens: values that order the collectives of a group on a device, and tell which of them are recorded but not cut.

Each collective of the graph writes the token of its group and device. Used by `api.c10d`, and by code that waits for
other processes.
"""

from __future__ import annotations

import threading

import torch

from ltc_core.runtime.devices import context, upload
from ltc_core.tensor.handles import base_of
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["are_recorded", "hand_over", "token"]

# (name of a group, index of a device) -> the token there
_tokens: dict[tuple[str, int], LazyTensor] = {}
# name of a group -> the index of the device that recorded its last collective
_last: dict[str, int] = {}
# Reentrant: a signal handler may wait for other processes while this thread holds it.
_lock = threading.RLock()


def renew_lock() -> None:
    """Make a new lock in a forked child: another thread may have held the old one at the fork."""
    global _lock
    _lock = threading.RLock()


def token(group: str, index: int) -> torch.Tensor:
    """The token that the next collective of the group on this device writes.

    Collectives of the group that another device recorded before are handed over first, so that they run in recorded
    order.
    """
    if (group, index) not in _tokens:  # made without the lock, since this may take other locks
        made = upload(torch.zeros(1, dtype=torch.uint8), index)
        _tokens.setdefault((group, index), made)
    with _lock:
        found = _tokens[group, index]
        before, _last[group] = _last.get(group, index), index
        earlier = None if before == index else _tokens[group, before]
    if earlier is not None:
        _cut_if_recorded(earlier, before)
    return found


def hand_over(group: str | None = None) -> None:
    """Hand over the collectives that were recorded and not cut: other processes may wait for them.

    Args:
        group: name of the group whose collectives are handed over; None for all.

    Cost: none where no collective is recorded; else a cut of its device's graph.
    """
    for (name, index), found in _all():
        if group in (None, name):
            _cut_if_recorded(found, index)


def are_recorded() -> bool:
    """Whether there are collectives that were recorded and not cut."""
    return any(_is_recorded(found) for _, found in _all())


def _all() -> list[tuple[tuple[str, int], LazyTensor]]:
    with _lock:
        return list(_tokens.items())


def _is_recorded(found: LazyTensor) -> bool:
    return base_of(found._h).value.buffer is None


def _cut_if_recorded(found: LazyTensor, index: int) -> None:
    if _is_recorded(found):
        context(index).cut("Collective")
