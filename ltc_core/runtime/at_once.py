"""Ops that run where they are called, as in eager PyTorch, where to record them costs more than it gains.

A step that repeats is recorded by C++, in microseconds an op. Searches, trees and loops over data of any size take
another way each time, which Python records: that takes longer than their ops. There C++ runs an op at once if its
operands are there (`record/csrc/at_once.h`); else it is recorded, and cut before the next op that needs it.

So it is where a script reads a value every few ops, and it may be so where reads cut each step into a few parts, which
wait for each other; that is tried once compiled code has had time to come. Whether it is quicker is measured, by the
time for each op that is called: of recorded ones, where one of the three is so for a while, then of ops that run at
once. The quicker way stays, and the other one is tried again, soon at first and then more and more rarely. Steps that
turn out to repeat are recorded again soon.

Told of cuts by `device_context`, and by C++ of ops that have run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ltc_core import metrics
from ltc_core.executors import Executor, spinning
from ltc_core.record import fast_path
from ltc_core.record.trace import Trace
from ltc_core.runtime import execution_gate
from ltc_core.settings import rank_in_job, settings
from ltc_core.tensor.buffer import MemoryCounter
from ltc_core.timeline import slices
from ltc_core.uninterrupted import uninterrupted

__all__ = ["AtOnce", "sentences"]

_WINDOW_NS = 50_000_000  # for which a way is measured, at least
_FEWEST_CALLS = 100  # in it
_PYTHON_CALL_NS = 50_000  # to record one op in Python, at most
_MUCH = 0.1  # of the time: then another way is worth a trial
_FEW = 8  # calls in a graph, on average: the same
_COMPILED_NS = 20_000_000_000  # of recording, after which compiled code has come to steps in parts, or will not
_STEPS = 2  # steps in parts that are measured together, at least
_WINDOWS = 4  # in a row in which that was so; or in which recording is tried again, until the path is known
_BETTER = 0.9  # of the time that recording takes
_WORSE = 3  # windows in a row in which it is not
_FIRST_WAIT_NS = 2_000_000_000  # until the other way is tried again
_LONGEST_WAIT_NS = 60_000_000_000
_LONGEST_LOOK = 100_000  # ops between two looks at the time
_FIRST_LOOK = 256
_FORMS = 64  # steps that are remembered
_OFTEN = 0.5  # of the steps: they repeat

_OPS, _TIME = "AtOnceOps", "AtOnceMicroseconds"  # counters


class AtOnce:
    """Whether the ops of one device run at once.

    Args:
        trace, memory, executor: those of the device.
        settle: cuts what is recorded, and waits for it.
        is_alone: whether the process uses no other device.
        is_in_parts: whether reads cut each step into parts, none of which is being compiled.
    """

    def __init__(
        self,
        trace: Trace,
        memory: MemoryCounter,
        executor: Executor,
        settle: Callable[[], object],
        is_alone: Callable[[], bool],
        is_in_parts: Callable[[], bool],
    ) -> None:
        self._trace = trace
        self._memory = memory
        self._settle = settle
        self._is_alone = is_alone
        self._is_in_parts = is_in_parts
        self._is_possible = executor.keeps_host_tensors
        self._native: Any = None
        self._window: tuple[int, int, int] = (0, 0, 0)  # when it began; calls so far, and Python's
        self._num_windows = 0  # in a row: see `_WINDOWS`
        self._first: tuple[int, int] = (0, 0)  # when the first of them began, and the calls so far
        self._recorded_for_ns = 0
        self._num_cuts = 0  # in this one
        # For a call; 0: not known. That of ops at once is known where recording is on trial.
        self._recorded_ns = self._at_once_ns = 0.0
        self._due_ns = 0  # when the other way may be tried
        self._wait_ns = _FIRST_WAIT_NS
        # Whether Python recorded much when recording was found to be as quick; else, if it does now, the script has
        # changed.
        self._was_slow = True
        self._forms: deque[int] = deque(maxlen=_FORMS)
        self._num_steps = self._num_repeated = 0
        self._may_repeat = False  # ops run at once although steps repeat
        self._fewest_steps = 0  # that are measured together
        self._num_worse = 0  # windows of ops at once, in a row: see `_WORSE`
        self._counted = (0, 0)  # when ops at once were last counted, and how many there were then
        execution_gate.at_close(self.end)

    @property
    def is_on(self) -> bool:
        return self._native is not None

    # -- while ops are recorded ----------------------------------------------------------------

    def follow(self, now_ns: int, num_cuts: int = 1) -> None:
        """Cuts were made. Cost: 0.2 us, and 2 us for each window."""
        if self._native is not None:
            return
        if settings.at_once == "always" or (settings.eager and settings.at_once != "never"):
            if not _is_seen():
                self._begin(now_ns)
            return
        began_ns = self._window[0]
        self._num_cuts += num_cuts
        if now_ns - began_ns < _WINDOW_NS:
            return
        calls, python = fast_path.num_calls()
        num_calls, num_python = calls - self._window[1], python - self._window[2]
        if num_calls < _FEWEST_CALLS and began_ns:
            return
        self._window = now_ns, calls, python
        num_cuts, self._num_cuts = self._num_cuts, 0
        if not began_ns:
            return
        took_ns = now_ns - began_ns
        self._recorded_for_ns += took_ns
        is_slow = num_python * _PYTHON_CALL_NS > _MUCH * took_ns
        is_due = now_ns >= self._due_ns or (is_slow and not self._was_slow)
        if not is_due or not self._may_begin():
            self._num_windows = 0
            return
        if not self._num_windows:
            self._first = began_ns, calls - num_calls
        self._recorded_ns = (now_ns - self._first[0]) / (calls - self._first[1])
        is_short = num_calls < _FEW * num_cuts
        is_in_parts = self._recorded_for_ns > _COMPILED_NS and self._is_in_parts()
        is_on_trial = self._at_once_ns > 0
        is_worth_it = is_slow or is_short or is_in_parts or is_on_trial
        self._num_windows = self._num_windows + 1 if is_worth_it else 0
        if is_on_trial and not self._is_better(self._at_once_ns):
            self._at_once_ns, self._num_windows, self._due_ns = 0.0, 0, now_ns + self._wait_ns
            self._was_slow = is_slow
        elif self._num_windows >= _WINDOWS:
            # On trial, repeated steps were no quicker.
            self._may_repeat = not is_slow or is_on_trial
            self._fewest_steps = _STEPS if is_in_parts and not is_slow else 0
            self._begin(now_ns)

    def _may_begin(self) -> bool:
        is_wanted = settings.at_once == "auto" and settings.compile != "sync"
        is_free = not execution_gate.is_closed and rank_in_job()[1] == 1 and self._is_alone()
        return self._is_possible and is_wanted and not _is_seen() and is_free

    # -- while they run at once ----------------------------------------------------------------

    @uninterrupted
    def _begin(self, now_ns: int) -> None:
        if not self._is_possible or execution_gate.is_closed or not fast_path.install():
            return
        self._native = fast_path.run_at_once(self._trace, self._memory, self._settle, self._look)
        if self._native is None:
            self._is_possible = False
            return
        self._native.next_look = _FIRST_LOOK
        self._counted, self._due_ns = (now_ns, 0), now_ns + self._wait_ns
        self._window = (now_ns, *fast_path.num_calls())
        self._at_once_ns, self._num_windows, self._num_worse = 0.0, 0, 0
        self._num_steps = self._num_repeated = 0
        self._forms.clear()
        self._settle()

    def end(self) -> None:
        """Record the next ops."""
        native, self._native = self._native, None
        if native is not None:
            fast_path.record_again(self._trace)
            self._count(native)
            self._window = (self._counted[0], *fast_path.num_calls())

    def count(self) -> None:
        """Count the ops that have run at once so far, and the time."""
        if self._native is not None:
            self._count(self._native)

    def _count(self, native: Any) -> None:
        last_ns, last_ops = self._counted
        self._counted = now_ns, num_ops = time.perf_counter_ns(), native.num_ops
        metrics.count(_OPS, num_ops - last_ops)
        metrics.count(_TIME, (now_ns - last_ns) // 1000)

    def end_step(self) -> None:
        """The script ends a step. Cost: 0.1 us while ops are recorded."""
        native = self._native
        if native is None:
            return
        form, native.form = native.form, 0
        if form:
            self._num_steps += 1
            self._num_repeated += form in self._forms
            self._forms.append(form)

    @uninterrupted
    def _look(self) -> None:
        """So many ops have run at once: see whether that is quicker than to record them."""
        native, now_ns = self._native, time.perf_counter_ns()
        if native is None:
            return
        spinning.follow(now_ns)
        calls, python = fast_path.num_calls()
        num_calls, took_ns = max(calls - self._window[1], 1), max(now_ns - self._window[0], 1)
        native.next_look = min(max(int(num_calls * _WINDOW_NS / took_ns), 1), _LONGEST_LOOK)
        is_set = settings.at_once == "always" or settings.eager
        if _is_seen() if is_set else not self._may_begin():
            self.end()
        if is_set or self._native is None:
            return
        if took_ns < _WINDOW_NS / 2 or self._num_steps < self._fewest_steps:
            return
        self._window = now_ns, calls, python
        call_ns = took_ns / num_calls
        self._at_once_ns = (self._at_once_ns + call_ns) / 2 if self._at_once_ns else call_ns
        self._num_worse = 0 if self._is_better(call_ns) else self._num_worse + 1
        # No better than recording was: it may be that the machine is busy now.
        if self._num_worse < _WORSE and not self._repeats() and now_ns < self._due_ns:
            return
        self._due_ns = now_ns
        self._wait_ns = min(2 * self._wait_ns, _LONGEST_WAIT_NS)
        self.end()

    def _is_better(self, at_once_ns: float) -> bool:
        """Whether ops at once, which take so long a call, are much quicker than those that were recorded last."""
        return not self._recorded_ns or at_once_ns <= _BETTER * self._recorded_ns

    def _repeats(self) -> bool:
        """Whether most steps are as one before: then they are recorded in C++."""
        is_often = self._num_repeated > _OFTEN * self._num_steps
        return not self._may_repeat and self._num_steps >= _FORMS / 4 and is_often


def _is_seen() -> bool:
    """Whether somebody looks at what is recorded, cut and run."""
    is_reported = settings.debug or settings.explain or settings.emit_steplog
    return bool(slices.is_watched() or is_reported or settings.save_tensors_file)


def sentences(counters: Mapping[str, int]) -> list[str]:
    """What to say of ops that ran at once, if they did."""
    took_us = counters.get(_TIME, 0)
    if not took_us or settings.eager:
        return []
    return [
        f"For {took_us / 1e6:.3g} s ops ran where they were called, as in eager PyTorch: steps did not repeat, or read "
        "values every few ops, and to record them took longer (LTC_AT_ONCE)."
    ]
