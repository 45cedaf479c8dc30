"""`with NoNewSteps():` a block in which nothing is new: the trie does not grow, nothing is compiled."""

from types import TracebackType

import ltc_core as ltc
from ltc_core.runtime.devices import context
from tests.core.counting import Counting

__all__ = ["NoNewSteps", "trace_steps"]


def trace_steps() -> int:
    return context(0).trace.steps


class NoNewSteps:
    def __enter__(self) -> None:
        ltc.mark_step(wait=True)
        self.before = trace_steps()
        self.counting = Counting()
        self.counting.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.counting.__exit__(kind, error, traceback)
        if kind is None:
            assert trace_steps() == self.before, "the trie has grown"
            assert self.counting.compiles == 0
