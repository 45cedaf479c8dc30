"""Scalars of a run for TensorBoard: a thread writes a point of each curve once a second.

The values are those of the live view (`sampler`); the horizontal axis is the step. Steps quicker
than the interval share a point. `profiler.tensorboard` starts and stops it. The package
`tensorboard` is no dependency.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from typing import Any

from ltc_core.errors import ProfilerError, first_line
from ltc_core.live.sampler import Sampler
from ltc_core.live.state import State
from ltc_core.settings import rank_in_job

__all__ = ["Scalars"]

_LEAST_S = 0.02  # between two looks at the step
_JOIN_S = 10.0


class Scalars:
    """The thread and the writer.

    Args:
        directory: of the event files; in a job each rank has a directory of its own in it, rank0, rank1 and so on.
        every_s: seconds between two points; 0 for a point at each step that a look, 50 a second, finds.

    Raises:
        ProfilerError: the package `tensorboard` is not installed, or the directory cannot be written to.
    """

    def __init__(self, directory: str, every_s: float) -> None:
        rank, _ = rank_in_job()
        self._directory = directory if rank is None else os.path.join(directory, f"rank{rank}")
        self._writer = _writer(self._directory)
        self._every_s = max(every_s, _LEAST_S)
        self._sampler = Sampler(window_s=0.0)
        self._sampler.read()
        self._step = -1
        self._ending = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ltc-tensorboard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._every_s):
                self._note()
        except Exception as error:  # a full disk must not end the training
            self._writer = None
            warnings.warn(
                f"no more scalars are written to {self._directory}: {error}. Training goes on.",
                stacklevel=2,
            )

    def _note(self) -> None:
        """Write a point of each curve, if a step has ended since the last one."""
        if self._sampler.num_steps() == self._step:
            return
        state = self._sampler.read()
        self._step = state.step
        now_s = time.time()
        for name, value in _curves(state).items():
            self._writer.add_scalar(name, value, state.step, walltime=now_s)

    def stop(self) -> None:
        """Write the last point and close the files.

        Raises:
            ProfilerError: they could not be written.
        """
        self._ending.set()
        self._thread.join(_JOIN_S)
        if self._writer is None or os.getpid() != self._pid:  # in a forked child the parent's
            return
        try:
            self._note()
            self._writer.close()
        except OSError as error:
            raise _not_writable(self._directory, error) from None


def _curves(state: State) -> dict[str, float]:
    """Name -> value. Shares are those of the time since the point before."""
    found = {
        "ltc/step": state.step,  # over the wall clock
        "ltc/steps_per_s": state.steps_per_s,
        "ltc/share_waiting_for_batches": state.batch_share,
        "ltc/share_waiting_for_device": state.device_share,
        "ltc/share_waiting_for_compiler": state.compiler_share,
        "ltc/memory_bytes": state.used_bytes,
        "ltc/memory_peak_bytes": state.peak_bytes,
        "ltc/rss_bytes": state.rss_bytes,
        "ltc/programs": state.programs,
        "ltc/compiles": state.compiles,
        "ltc/fallbacks": state.fallbacks,
    }
    if state.steps_per_s > 0:
        found["ltc/ms_per_step"] = 1000 / state.steps_per_s
    return found


def _writer(directory: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ProfilerError(
            "scalars for TensorBoard cannot be written",
            got=f"no package that writes them: {first_line(error)}",
            next="pip install tensorboard",
        ) from None
    try:
        return SummaryWriter(directory)
    except OSError as error:
        raise _not_writable(directory, error) from None


def _not_writable(directory: str, error: OSError) -> ProfilerError:
    return ProfilerError(
        f"scalars cannot be written to {directory}",
        got=error.strerror or str(error),
        next="name a directory that can be written to",
    )
