"""The ends of steps that nobody marks: scripts for other devices and the loops of libraries never call `mark_step`.

A step ends at `optimizer.step()`, of several optimizers at that of the last one; where nothing is trained it ends when
the next batch is uploaded. Else a graph would end where a value happens to be read, or after thousands of ops. A script
that marks its steps, or has a loader do it, is left alone.

Called by PyTorch's hook of optimizers, by uploads, by `mark_step` and by `DeviceContext`, whose `cut` it calls.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ltc_core import metrics, source
from ltc_core.record.trace import Trace
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = [
    "FoundSteps",
    "leave_alone",
    "note_backward",
    "note_mark",
    "register_optimizer_hook",
]

# A batch may be cast between two uploads of its parts; a model records more than that.
_FEWEST_VALUES = 8
# A script marks its steps if two marks in a row each come after as many steps that were found as the mark before them,
# one or a few: a critic may be trained more often than its generator;
_MARKS_IN_A_ROW = 2
_MOST_BEFORE_MARK = 4
# and no longer does if so many are found without a mark.
_STEPS_WITHOUT_MARK = 8
_STEPS_UNTIL_TOLD = 4


_Variable = tuple[dict[str, Any], str]  # the dict of an object, and an attribute


class _Script:
    """What is known of the script of this process."""

    def __init__(self) -> None:
        self.is_declared = False  # a loader of ours marks its steps, or its interface has it do so
        self.is_marked = False  # it marks them itself
        self.marks_in_a_row = 0
        self.before_mark = 0  # steps that were found before the last mark that came after any
        self.since_mark = 0  # steps that were found since the last mark
        self.is_told = False

    def is_left_alone(self) -> bool:
        return self.is_declared or settings.steps == "marked"

    def found(self) -> bool:
        """Count a step; return whether it is to be ended."""
        if self.since_mark:  # no mark has come after the one before
            metrics.count("FoundStep")
        self.since_mark += 1
        if self.is_marked and self.since_mark > _STEPS_WITHOUT_MARK:
            self.is_marked = False
        return not self.is_marked

    def tell(self) -> None:
        """Say once, in rank 0, that steps are ended; called by the optimizer's hook, after some without a mark."""
        if self.is_told or self.since_mark < _STEPS_UNTIL_TOLD:
            return
        self.is_told = True
        if os.environ.get("RANK", "0") == "0":
            line = source.user_line() or "a library"
            print(
                f"ltc: each optimizer.step() ends a step ({line}), since none is marked; LTC_STEPS=marked leaves it to "
                "mark_step()",
                file=sys.stderr,
            )


_script = _Script()
_of_device: dict[int, FoundSteps] = {}


class FoundSteps:
    """The steps of one device.

    Args:
        trace: that of the device.
        cut: ends a step, for a reason that the metrics count.
    """

    def __init__(self, trace: Trace, cut: Callable[[str], Any]) -> None:
        self._trace = trace
        self._cut = cut
        self._due_in = -1  # the epoch that ends before its next op
        self._backward_in = (
            -1
        )  # the epoch in which gradients were made that no optimizer has used yet
        # Whether each step so far was ended by the read after it. Then nothing is gained by ending it before: the
        # script waits for it anyway, and a short program runs at once in a thread that waits.
        self._is_read_next = True
        self._stepped: list[int] = []  # the optimizers of this round, in the order of their steps
        self._round: frozenset[int] = frozenset()  # those of the round before
        self._last: int | None = None  # the one that ended it
        # A place in the script -> epoch and count of values at its last upload.
        self._uploads: dict[Any, tuple[int, int]] = {}
        _of_device[trace.device.index] = self

    def after_optimizer(self, optimizer: int) -> None:
        """End the step, if this was the round's last optimizer."""
        self._backward_in = -1
        if not self._is_last(optimizer) or not _script.found():
            return
        if not self._trace:
            self._cut("OptimizerStep")  # for those whose ops run at once
            return
        if not self._is_read_next:
            _script.tell()
            self._cut("OptimizerStep")
            return
        self._due_in = self._trace.epoch
        # In the first round another optimizer may follow: the next upload ends the step.
        if self._last is not None:
            self._trace.limit = 0

    def _is_last(self, optimizer: int) -> bool:
        """Learn the order of optimizers, such as the two of a GAN. A step of one that is new counts as the last."""
        if optimizer in self._stepped:
            self._round, self._last = frozenset(self._stepped), self._stepped[-1]
            self._stepped = []
        self._stepped.append(optimizer)
        return optimizer == self._last or optimizer not in self._round

    def end_if_due(self) -> bool:
        """End the step after which there is more to do before a value is read. Return whether it was ended."""
        if self._due_in != self._trace.epoch:
            return False
        self._due_in = -1
        self._trace.limit = self._trace.first_limit
        if self._last is not None:  # else it may not be the last optimizer
            self._is_read_next = False
        self._cut("OptimizerStep")
        return True

    def move(self, epoch: int) -> None:
        """The step goes on after a part of it was cut, in another epoch."""
        if self._backward_in == epoch:
            self._backward_in = self._trace.epoch
        for place, (last, count) in self._uploads.items():
            if last == epoch:
                self._uploads[place] = self._trace.epoch, count - _FEWEST_VALUES

    def variables(self) -> tuple[_Variable, tuple[_Variable, ...]]:
        """What says that an upload ends no step (`record/csrc/known_upload.h`).

        Returns:
            What is not None once the script has used an optimizer: nothing is due to end where nothing is recorded. And
            those of which one is true if it marks its steps.
        """
        script = vars(_script)
        return (vars(self), "_last"), ((script, "is_marked"), (script, "is_declared"))

    def before_upload(self) -> None:
        """End the step of a loop that trains nothing: a call in it uploads again, and nothing was read meanwhile.

        Cost: 2 us.
        """
        if _script.is_marked or _script.is_left_alone():
            return
        if threading.current_thread() is not threading.main_thread():
            return  # it reads ahead
        self.end_if_due()
        place, trace = source.user_place(), self._trace
        epoch, count = self._uploads.get(place, (-1, 0))
        is_loop = epoch == trace.epoch and trace.count - count >= _FEWEST_VALUES
        # Where gradients are made, they are accumulated; what the layers of a model upload is no batch.
        if is_loop and self._backward_in != epoch and not source.is_in_module():
            metrics.count("FoundStep")
            self._cut("Upload")
        self._uploads[place] = trace.epoch, trace.count


def _after_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _of_device or _script.is_left_alone():
        return
    params = (p for group in optimizer.param_groups for p in group["params"])
    for index in {p._h.trace.device.index for p in params if type(p) is LazyTensor}:
        _of_device[index].after_optimizer(id(optimizer))


def register_optimizer_hook() -> None:
    """Have PyTorch call this module after the step of any optimizer; called once."""
    register_optimizer_step_post_hook(_after_optimizer)


def note_backward() -> None:
    """Note that a backward pass begins. Cost: 100 ns for each device."""
    for found in list(_of_device.values()):
        found._backward_in = found._trace.epoch


def note_mark() -> None:
    """Note that the script marks the end of a step."""
    found, _script.since_mark = _script.since_mark, 0
    if found:
        is_next = found == 1 or found == _script.before_mark
        _script.before_mark = found
        _script.marks_in_a_row = (
            _script.marks_in_a_row + 1 if is_next and found <= _MOST_BEFORE_MARK else 0
        )
        _script.is_marked = _script.marks_in_a_row >= _MARKS_IN_A_ROW


def leave_alone() -> None:
    """Look for no steps: a loader of ours marks them, or the script speaks an interface in which it does."""
    _script.is_declared = True
