"""How much time may go into looking for code that an earlier process has compiled, while graphs run op by op.

To look for a graph's code, it is divided as for compiling and its text is hashed: half a second for 20,000 ops, in
which nothing runs. A script of many such graphs would wait for all of them. Asked by `tiers`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["LookBudget"]

_SHARE = 0.1  # of the time since the first look was asked for
_AT_ONCE_S = 0.1
_S_PER_OP = 25e-6  # expected


class LookBudget:
    """One for the process. Threads of several devices may take a little more than the share."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._taken_s = 0.0

    def has(self, num_ops: int) -> bool:
        """Whether there is time to look for the code of a graph of so many ops."""
        now = time.monotonic()
        self._since_s = self._since_s or now
        allowed = _AT_ONCE_S + _SHARE * (now - self._since_s)
        return self._taken_s + _S_PER_OP * num_ops <= allowed

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Count the time of the block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._taken_s += time.monotonic() - started
