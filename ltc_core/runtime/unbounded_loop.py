"""A loop without `mark_step`: it is detected, reported once, and cut at its head.

A trace of more than `settings.trim_graph_size` values without a cut is most likely a training loop without `mark_step`.
The loop begins at the first of the lines of its ops that repeat least often. From then on the trace is cut whenever
that line is reached again, so that each iteration is the same graph. At `settings.max_graph_size` values it is cut
anywhere.

A long trace may also be a single step, as of a loop over time. What was cut once is cut at the same places when it
comes again; `device_context` sees to it that the read which ends the step ends its last part, too.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from ltc_core import source
from ltc_core.record.step import Step
from ltc_core.record.trace import Trace
from ltc_core.settings import settings

__all__ = ["LoopHead", "LoopWatch", "loop_head"]


_READ_AGAIN = 1000  # ops between two looks at the lines


class LoopHead(NamedTuple):
    """The first line of a loop; `repeats`: the loop has no other line."""

    line: str
    repeats: bool = False


def loop_head(lines: list[str]) -> LoopHead:
    """The head of a loop, from the lines of its ops in order; the line is '' if no line repeats.

    A line of an outer loop repeats less often than the lines of inner loops.
    """
    runs = [(line, len(list(ops))) for line, ops in itertools.groupby(lines) if line]
    counts = Counter(line for line, _ in runs)
    late = {line for line, _ in runs[len(runs) // 2 :]}  # ops before the loop are not its head
    again = [n for line, n in counts.items() if n > 1 and line in late]
    if again:
        heads = (line for line, _ in runs if counts[line] == min(again) and line in late)
        return LoopHead(next(heads))
    line, length = max(runs, key=lambda run: run[1], default=("", 0))
    return LoopHead(line, repeats=True) if 2 * length > len(lines) else LoopHead("")


def _known_end(step: Step, most: int) -> int:
    """Count of values at which the path that follows was cut before; 0 if it was not, within `most` steps."""
    following: Step | None = step
    for _ in range(most):
        if following is None:
            break
        if following.programs:
            return following.end
        following = following.next
    return 0


class LoopWatch:
    """Watches one trace; `cut` cuts it."""

    def __init__(self, trace: Trace, cut: Callable[[], Any]) -> None:
        self._trace = trace
        self._cut = cut
        self._warned = False
        self._epoch = 0
        self._head = LoopHead("")
        self._last_line = ""
        self._lines: list[str] = []
        self._look_again = 0  # at this count of values: the loop whose head was found may be over
        trace.first_limit = trace.limit = settings.trim_graph_size

    def on_limit(self) -> None:
        """Called before each op of a trace that is too long."""
        trace = self._trace
        if trace.count < settings.trim_graph_size:
            trace.first_limit = trace.limit = settings.trim_graph_size
            return
        if self._epoch != trace.epoch:
            end = _known_end(trace.cursor, self._stretch)
            if end == trace.count:
                self._cut()
                return
            if end:
                trace.limit = end
                return
        line = source.user_line()
        if self._epoch != trace.epoch:
            self._epoch = trace.epoch
            self._lines = [step.node.line for step in trace.path(trace.cursor) if step.node]
            if line not in self._lines:
                self._lines = []  # recorded by another loop before: collect the lines of this one
            self._head = loop_head(self._lines)
            self._last_line = ""
            self._look_again = trace.count + self._stretch
        elif self._head.line and trace.count >= self._look_again:
            latest = trace.path(trace.cursor)[-self._stretch :]
            self._head = loop_head([step.node.line for step in latest if step.node])
            self._look_again = trace.count + self._stretch
        elif not self._head.line and len(self._lines) < settings.trim_graph_size:
            self._lines.append(line)
            if len(self._lines) % _READ_AGAIN == 0:
                self._head = loop_head(self._lines)
        head = self._head
        anew = head.repeats or self._last_line not in ("", head.line)
        begins = line == head.line != "" and anew
        self._last_line = line
        if begins or trace.count >= settings.max_graph_size:
            self._warn(begins)
            self._cut()

    @property
    def _stretch(self) -> int:
        """Values, or steps, after which another loop may have begun."""
        return settings.trim_graph_size // 4

    def _warn(self, is_loop: bool) -> None:
        if self._warned:
            return
        self._warned = True
        line, inner = source.outer_line(), source.user_line()
        place = line if inner in ("", line) else f"{line} (now at {inner})"
        what = f"the loop around {place}" if is_loop else f"the program up to {place}"
        warnings.warn(
            f"{what} recorded {self._trace.count} values on {self._trace.device} without a step boundary; it is "
            "cut there from now on. Next: if this is the training loop, call mark_step() once in each iteration; a "
            "loop within a step needs nothing.",
            stacklevel=2,
        )
