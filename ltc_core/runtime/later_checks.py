"""Checks of values that do not wait for them: what is wrong is told at the next read or `mark_step`.

A check holds a bool of the device that is to be true. Once a run has computed it, it is looked at; a failed check is a
failure of the device like that of an op. One list for each device, filled by `ops.distribution_checks`. A read that C++
makes looks at them as `look` does (`record/csrc/known_read.h`), and leaves a check that fails to Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ltc_core.errors import LtcError
from ltc_core.runtime.launch import Failure
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell

__all__ = ["LaterChecks"]


class LaterChecks:
    """The checks of one device that were not looked at yet.

    Args:
        is_true: the value of a bool of the device, from its cell and its data.
        failures: of the device.

    Attributes:
        waiting: (bool, what makes the error) of each check, in the order in which they are computed.
    """

    def __init__(self, is_true: Callable[[Cell, Any], bool], failures: deque[Failure]) -> None:
        self._is_true = is_true
        self._failures = failures
        self.waiting: deque[tuple[Cell, Callable[[], LtcError]]] = deque()

    def add(self, cell: Cell, error: Callable[[], LtcError]) -> None:
        """Look at a bool of no dims later; if it is false, there is a failure with this error."""
        self.waiting.append((cell, error))

    def look(self) -> None:
        """Look at those that are computed; they are so in the order of the checks. Cost: 1 us each."""
        while self.waiting:
            cell, error = self.waiting[0]
            buffer = cell.value.buffer
            if buffer is None or buffer.is_pending:
                return
            self.waiting.popleft()
            # A failed op has told its own error.
            if buffer.error is None and not self._is_true(cell, buffer.data):
                self._failures.append(Failure(error()))

    def pending(self) -> list[Buffer]:
        """What the runs are to compute that are under way."""
        buffers = (cell.value.buffer for cell, _ in self.waiting)
        return [each for each in buffers if each is not None and each.is_pending]

    def clear(self) -> None:
        self.waiting.clear()
