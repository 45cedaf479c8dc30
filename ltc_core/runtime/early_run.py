"""Early runs: a step that the script waits for begins to run while it is still recorded.

Where each step is waited for, as by `loss.item()`, recording and running would take turns. A script repeats itself:
after one program it usually cuts the same next one, as the two of a GAN that take turns. So that program is expected
from the first op on, as long as the recording keeps to its path. Where there is no telling, as with batches of several
lengths in any order, it is the only one of those that came lately whose path the recording is on after some ops.
The worker follows the recording: each time some more ops are recorded, they are given to it, and it runs them without
Python. The cut ends that, and runs the rest. A value that the script is known to read, as the loss, is often there by
then: the read waits for nothing.

No value depends on whether the step ends as expected. What runs early changes no input: a write to an input's memory is
made to a copy, if it is small, and else waits for the cut, as an optimizer's do. If another program is cut, or the
recording leaves the path, the values are dropped, and the cut's program runs from its first instruction on.

To have the worker follow costs 50 us or so. Whether steps are quicker with it is measured in steps of the script. Told
of cuts and reads by `device_context`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ltc_core import metrics
from ltc_core.executors import core_sharing
from ltc_core.executors.openmp import release_team, use_threads
from ltc_core.executors.processor import num_cores
from ltc_core.record.trace import Trace
from ltc_core.runtime.habit import Context, Habit
from ltc_core.runtime.placement import Placement, in_worker
from ltc_core.runtime.program_cache import CompiledGraph
from ltc_core.runtime.reads import Seen
from ltc_core.runtime.switch_interval import shorten
from ltc_core.runtime.worker import Job, Worker
from ltc_core.settings import settings
from ltc_core.timeline import slices
from ltc_core.uninterrupted import uninterrupted

__all__ = ["EarlyRun", "EarlyRuns"]

_LEAST_NS = 700_000  # of recording, and of running
_PART_NS = 250_000  # of recording
_MOST_PARTS = 8
# Between two reads, the first of which may run early: a step may end unread, and a value of the next one be read.
_MOST_CUTS = 2
_MOST_KNOWN = 32  # programs whose paths are compared with the recording
_MISSES = 5  # times in a row that another program was cut: then it runs whole for a while


class EarlyRuns:
    """The steps of one device, between two reads of the script.

    Args:
        trace: that of the device.
        worker: runs them.
        is_possible: whether its programs are those of the reference executor, on the CPU.
        is_disturbed: whether something uses the cores for a while, so that nothing is measured.
    """

    def __init__(
        self,
        trace: Trace,
        worker: Worker,
        is_possible: bool,
        is_disturbed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_disturbed = is_disturbed
        self._trace = trace
        self._worker = worker
        self._is_possible = is_possible
        self._last: CompiledGraph | None = None  # the program of the step before, if it had one
        self._context = Context()  # of that one
        self._expected: CompiledGraph | None = None
        self._is_open = False  # none is expected, and one of `_known` may come
        self._known: dict[int, weakref.ref[CompiledGraph]] = {}  # the last one that came is last
        self._is_first = True  # the next cut, since the last read
        self._due = 0  # count of values at which it begins to run; 0: at none
        self._follower: EarlyRun | None = None  # runs the step, if it has begun to run

    # -- while a step is recorded --------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether more of the step is to be run before the next op is recorded."""
        due = self._due if self._follower is None else self._follower.begun.due
        return 0 < due <= self._trace.count

    @property
    def has_begun(self) -> bool:
        """Whether the step that is recorded has begun to run."""
        return self._follower is not None

    @property
    def expects(self) -> bool:
        """Whether the step that is recorded, or will be, may run early."""
        return self._expected is not None or self._due > 0

    def is_measured(self, compiled: CompiledGraph) -> bool:
        """Whether a program's way is being chosen, by the step that it is about to end among others."""
        choice = compiled.family.choice
        may_come = compiled is self._expected or self._is_open
        return self._is_first and may_come and bool(compiled.habit.path) and not choice.is_known

    def run_more(self) -> None:
        """Have the worker run what is recorded of the step. C++ does the same before a call that it records.

        Cost: 50 us the first time in a step, then 10.
        """
        with self._trace.lock:
            self._run_more()

    @uninterrupted  # a signal handler may read a value, which cuts
    def _run_more(self) -> None:
        trace = self._trace
        trace.limit = trace.first_limit
        follower = self._follower or self._begin()
        if follower is None:
            return
        due = follower.give(trace)
        if due < 0:
            self._drop()
        elif due:
            self._run_at(due)

    def _begin(self) -> EarlyRun | None:
        """Have the worker follow the recording; None if it cannot."""
        due, self._due = self._due, 0
        compiled = self._on_path(due)
        if compiled is None:
            return None
        self._expected, place = compiled, compiled.family.choice.early
        if place is None or compiled.program.native is None or not self._worker.start():
            return None
        release_team()
        follower = EarlyRun(compiled, place, self._trace.epoch, _part(compiled.habit), due)
        self._worker.submit(follower)
        self._follower, self._trace.give_more = follower, follower.begun.give
        return follower

    def _on_path(self, due: int) -> CompiledGraph | None:
        """The program that is expected, now that so many values are recorded; None if there is no telling yet."""
        cursor = self._trace.cursor
        if self._expected is not None and cursor in self._expected.habit.path:
            return self._expected
        found = [each for each in self._programs() if cursor in each.habit.path]
        if len(found) > 1:
            self._begin_at(2 * due)
        return found[0] if len(found) == 1 else None

    def _programs(self) -> list[CompiledGraph]:
        """Those that may run early, and have come lately."""
        return [program for known in self._known.values() if (program := known()) is not None]

    def _run_at(self, count: int) -> None:
        self._trace.limit = min(self._trace.limit, count)

    def _drop(self) -> None:
        """Forget what has run of the step. The worker does it, after what it runs now."""
        follower = self._end()
        if follower is not None:
            self._worker.submit(Job(follower.native.drop))

    def _end(self) -> EarlyRun | None:
        """Give no more of the step. Returns its follower; None if it has not begun to run."""
        follower, self._follower = self._follower, None
        self._trace.give_more = None
        if follower is not None:
            follower.let_end()
        return follower

    # -- cuts and reads ------------------------------------------------------------------------

    def before_cut(self) -> None:
        self._due = 0
        if self._follower is not None:
            self._follower.begun.due = 0

    def after_cut(self, compiled: CompiledGraph) -> EarlyRun | None:
        """A program is about to be launched. The run of it that has begun; None if there is none."""
        self._is_first = False
        follower = self._follower
        if follower is None:
            return None
        if compiled is not self._expected or compiled.program.native is not follower.native:
            self._drop()
            return None
        self._end()
        metrics.count("EarlyRun")
        return follower

    def after_read(self, seen: Seen) -> None:
        """The script goes on with a value that it has read. Cost: 1 us."""
        self._is_first = True
        if seen.is_new:
            self._last, self._expected = None, None
        is_one_step = len(seen.cuts) <= _MOST_CUTS
        first, last = (seen.cuts[0], seen.cuts[-1]) if is_one_step else (None, None)
        expected = self._expected
        if expected is None and self._is_open and first is not None and self._learn(first):
            expected = first
        if expected is not None:
            self._judge(expected, first, seen.now_ns)
        if self._last is not None and first is not None:
            self._last.habit.note_next(first, self._context)
        self._note_context(last)
        self._last, self._expected, self._is_open = last, None, False
        if first is not None and last is not None:
            first.habit.recorded_ns, first.habit.num_values = seen.recorded_ns, seen.num_values
            following = last.habit.next(self._context)
            # See `Launcher.placement`.
            stays_here = seen.is_in_parts and core_sharing.takes_all_cores(torch.get_num_threads())
            if stays_here:
                return
            if following is None:
                self._expect_any()
            elif self._learn(following):
                self._expected = following
                self._begin_at(_due(following))

    def _note_context(self, last: CompiledGraph | None) -> None:
        if last is None:
            self._context = Context()
        elif last is self._last:
            self._context = self._context.again()
        else:
            self._context = Context(0 if self._last is None else id(self._last), 1)

    def _judge(self, expected: CompiledGraph, step: CompiledGraph | None, now_ns: int) -> None:
        """Note how the step ended that was expected to end in a program."""
        habit, choice = expected.habit, expected.family.choice
        # One of other sizes is a step of the same kind: what ran early in vain is part of what this way costs.
        if step is not None and step.family is expected.family:
            if self._is_disturbed():
                choice.put_off()
            else:
                choice.note(now_ns, () if choice.is_known else _ways(expected))
        if step is expected:
            habit.misses = 0
        elif choice.is_early:
            habit.misses += 1
            if habit.misses == _MISSES:
                habit.misses = 0
                choice.rest()

    def skip_to(self, last: CompiledGraph) -> None:
        """C++ has cut and read meanwhile (`known_reads`), this program last."""
        self._last, self._context = last, Context()

    def may_gain(self, step: CompiledGraph) -> bool:
        """Whether a step that ends in this program may be quicker if it runs early."""
        is_long = min(step.habit.recorded_ns, step.policy.cost.cost_ns) >= _LEAST_NS
        is_wanted = is_long and self._is_possible and settings.streaming == "auto"
        if not is_wanted or step.lines or step.path is None:
            return False
        return step.program.native is not None and num_cores() > 1

    def _learn(self, step: CompiledGraph) -> bool:
        """Know the path of a program, if steps that end in it may be quicker early. Whether they may."""
        if not self.may_gain(step):
            return False
        habit = step.habit
        if not habit.path:
            assert step.path is not None
            habit.know_path(self._trace.path(step.path), step.graph.nodes)
        self._known.pop(id(step), None)
        if len(self._known) == _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[id(step)] = weakref.ref(step)
        return True

    def _expect_any(self) -> None:
        self._is_open = True
        self._begin_at(min((due for each in self._programs() if (due := _due(each))), default=0))

    def _begin_at(self, count: int) -> None:
        """The step begins to run at so many values; at 0 it is whole."""
        self._due = count
        if count:
            self._run_at(count)


def _due(step: CompiledGraph) -> int:
    """Values of a step at which it begins to run; 0: at none."""
    return 0 if step.family.choice.early is None else _part(step.habit)


def _part(habit: Habit) -> int:
    """Values of a part of a step."""
    num_parts = max(2, min(_MOST_PARTS, habit.recorded_ns // _PART_NS))
    return -(-habit.num_values // num_parts)


def _ways(compiled: CompiledGraph) -> tuple[Placement, ...]:
    """Where a program may run early."""
    may_spare = core_sharing.may_share(torch.get_num_threads())
    return in_worker(may_spare, compiled.policy.cost.has_large_ops)


class EarlyRun(Job):
    """Runs a program in the worker, as far as it is given what its instructions need.

    Python switches threads sooner until it runs: the recording thread has the interpreter.

    Args:
        compiled: what becomes of the step.
        place: with all threads, or with one less.
        epoch: of the trace.
        size: values of the trace after which more is given.
        due: count of them at which that begins.
    """

    __slots__ = (
        "_compiled", "_num_shared", "_num_threads", "_watched", "begun", "native", "place"
    )  # fmt: skip

    def __init__(
        self, compiled: CompiledGraph, place: Placement, epoch: int, size: int, due: int
    ) -> None:
        super().__init__(self._follow)
        self._compiled = compiled
        self.place = place
        self._num_threads = torch.get_num_threads()
        self._num_shared = self._num_threads if core_sharing.may_share(self._num_threads) else 0
        if self._num_shared and place is Placement.SPARING:
            self._num_threads, self._num_shared = self._num_threads - 1, 0
        native, habit = compiled.program.native, compiled.habit
        assert native is not None
        self.native: Any = native
        self._watched = compiled.watched
        watched = compiled.program.watched_in_native(compiled.watched) or ([], 0)
        self.begun = native.begin(
            habit.path,
            compiled.input_slots,
            habit.ends,
            epoch,
            habit.num_values,
            size,
            due,
            *watched,
        )
        shorten(1)

    def give(self, trace: Trace) -> int:
        """Let run what is recorded. The count of values at which to give more; 0: at none, -1: drop what has run."""
        begun = self.begun
        rows, scalars = trace.inputs, trace.scalars
        due: int = begun.give(trace.cursor, trace.epoch, begun.due, trace.count, rows, scalars)
        return due

    def outputs(
        self, watched: tuple[int, ...], data: list[Any], scalars: list[Any]
    ) -> list[torch.Tensor]:
        """Outputs at some positions, if the run with these inputs has made them by now; else none. Cost: 2 us."""
        if watched != self._watched:
            return []
        found: list[torch.Tensor] = self.begun.outputs(data, scalars)
        return found

    def let_end(self) -> None:
        self.begun.close()

    def _follow(self) -> None:
        started_cpu_ns = time.thread_time_ns()
        if self._num_threads != torch.get_num_threads():
            use_threads(self._num_threads)
        compiled = self._compiled
        with slices.watched("run early") as seen:
            shorten(-1)
            took_ns = core_sharing.sharing(self._num_shared, self.native.follow, self.begun)
            if seen is not None:
                seen.note(compiled.described(), computed_us=took_ns // 1000)
        cost_ns, elapsed_ns = compiled.begun_ns
        cost_ns += time.thread_time_ns() - started_cpu_ns
        compiled.begun_ns = cost_ns, elapsed_ns + took_ns
