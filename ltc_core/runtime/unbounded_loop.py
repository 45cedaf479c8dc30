"""The loop that forgets to cut: found, named once, and cut at its head.

A trace that has grown past `settings.trim_graph_size` values without a cut is most likely a training loop without
`mark_step`. The lines of its ops then say where the loop begins: the first line that comes again least often.
From then on the trace is cut whenever that line begins anew, so that each piece is the same graph. At
`settings.max_graph_size` it is cut wherever it is.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from ltc_core import source
from ltc_core.record.trace import Trace
from ltc_core.settings import settings

__all__ = ["LoopHead", "LoopWatch", "loop_head"]


_READ_AGAIN = 1000  # ops after which the lines read so far are looked at


class LoopHead(NamedTuple):
    """The line a loop begins with; `repeats` says that the whole loop is that one line."""

    line: str
    repeats: bool = False


def loop_head(lines: list[str]) -> LoopHead:
    """Find where a loop begins, from the lines of its ops in order; the line is '' if nothing comes again.

    An outer loop's line comes again less often than the lines of loops inside it.
    """
    runs = [(line, len(list(ops))) for line, ops in itertools.groupby(lines) if line]
    counts = Counter(line for line, _ in runs)
    late = {line for line, _ in runs[len(runs) // 2 :]}  # what went before the loop is not its head
    again = [n for line, n in counts.items() if n > 1 and line in late]
    if again:
        heads = (line for line, _ in runs if counts[line] == min(again) and line in late)
        return LoopHead(next(heads))
    line, length = max(runs, key=lambda run: run[1], default=("", 0))
    return LoopHead(line, repeats=True) if 2 * length > len(lines) else LoopHead("")


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
        trace.first_limit = trace.limit = settings.trim_graph_size
        trace.on_limit = self._on_limit

    def _on_limit(self) -> None:
        """Called before each op of a trace that is too long."""
        trace = self._trace
        if trace.count < settings.trim_graph_size:
            trace.first_limit = trace.limit = settings.trim_graph_size
            return
        line = source.user_line()
        if self._epoch != trace.epoch:
            self._epoch = trace.epoch
            self._lines = [step.node.line for step in trace.path(trace.cursor) if step.node]
            if line not in self._lines:
                self._lines = []  # recorded first by another loop: read the lines of this one
            self._head = loop_head(self._lines)
            self._last_line = ""
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

    def _warn(self, is_loop: bool) -> None:
        if self._warned:
            return
        self._warned = True
        line, inner = source.outer_line(), source.user_line()
        place = line if inner in ("", line) else f"{line} (now at {inner})"
        what = f"the loop around {place}" if is_loop else f"the program up to {place}"
        warnings.warn(
            f"{what} recorded {self._trace.count} values on {self._trace.device} without a step boundary; it is "
            "cut there from now on. Next: call mark_step() once in each iteration.",
            stacklevel=2,
        )
