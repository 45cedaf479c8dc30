"""Eager mode: each op runs, and fails, where it is called. LTC_EAGER=1 turns it on from the start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ltc_core.ops.dispatch import choose_anew
from ltc_core.settings import settings

__all__ = ["eager_mode", "eager_mode_context", "is_eager_mode"]


def is_eager_mode() -> bool:
    """Whether each op runs where it is called."""
    return settings.eager


def eager_mode(enable: bool) -> None:
    """Run each op where it is called from now on, in all threads; or record again.

    Cost: 2 us an op more than in eager PyTorch, on the CPU; else, and for the first call of each op, the op is a graph
    of its own, run and waited for. What was recorded before runs with the first of them.

    Source: `torch_xla.experimental.eager_mode`.
    """
    if enable != settings.eager:
        settings.eager = bool(enable)
        choose_anew()


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[bool]:
    """Context manager: switch eager mode; yields the previous mode."""
    before = settings.eager
    eager_mode(enable)
    try:
        yield before
    finally:
        eager_mode(before)
