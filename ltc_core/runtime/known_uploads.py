"""Uploads of small tensors that C++ makes: a batch, or a number of the schedule, in each step.

In Python each took 25 us, and 100 after a long step, whose values had driven this code out of the caches. C++ makes
those that end no step (`record/csrc/known_upload.h`); the counters are made up for when somebody reads one.
"""

from __future__ import annotations

from typing import Any

from ltc_core import metrics
from ltc_core.executors import Executor
from ltc_core.record import fast_path
from ltc_core.record.trace import Trace
from ltc_core.runtime.found_steps import FoundSteps
from ltc_core.timeline import slices

__all__ = ["KnownUploads"]

_WATCHED = (vars(slices), "on")


class KnownUploads:
    """The uploads of one device.

    Args:
        trace, executor, steps: those of the device.
    """

    def __init__(self, trace: Trace, executor: Executor, steps: FoundSteps) -> None:
        self._trace = trace
        self._steps = steps
        self._is_possible = executor.keeps_host_tensors
        self._native: Any = None
        trace.uploads = None

    def begin(self) -> None:
        """Python has uploaded a tensor: let C++ upload the next ones. Cost: 0.1 us."""
        if self._native is None and self._is_possible and fast_path.install():
            trains, marks = self._steps.variables()
            self._native = fast_path.known_uploads(self._trace.memory, _WATCHED, trains, marks)
            self._trace.uploads = self._native

    def count(self) -> None:
        """Count what C++ has uploaded. In any thread."""
        if self._native is None:
            return
        count, num_bytes, elapsed_ns = self._native.take_counts()
        if count:
            metrics.count("CreateDataHandles", count)
            metrics.observe_many("OutboundData", num_bytes / count, count)
            metrics.observe_many("TransferToDeviceTime", elapsed_ns / count, count)
