"""`Program`: a graph that can be run. Each executor makes its own; `runtime.launch` runs them."""

from __future__ import annotations

import abc
import dataclasses
import enum
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from ltc_core.program.failure import Salvaged

__all__ = ["Program", "StepTimes", "Tier", "Watch", "run_to_end"]


def run_to_end(steps: Generator[None, None, list[Any]]) -> list[Any]:
    """Results of `run_in_steps`, run to its end without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Tier(enum.Enum):
    """How a program runs.

    Attributes:
        OP_BY_OP: Python calls each op, or launches it; it holds the GIL, so that recording cannot run beside it.
        REPLAY: C++ calls each op; values are eager's.
        COMPILED: code of its own runs; with another number of threads it may round otherwise.
    """

    OP_BY_OP = enum.auto()
    REPLAY = enum.auto()
    COMPILED = enum.auto()

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Durations of a step of the script, in nanoseconds, with a program's ops replayed and with its compiled code.

    `measured_s`: when, in seconds since 1970.
    """

    replay_ns: float
    compiled_ns: float
    measured_s: float = dataclasses.field(default_factory=time.time, compare=False)


class Watch(NamedTuple):
    """Outputs that somebody waits for, while the rest of the program may still run.

    Attributes:
        outputs: their positions among the graph's outputs.
        publish: called at most once, in the thread that runs, with their data as soon as all of them are there.
    """

    outputs: tuple[int, ...]
    publish: Callable[[list[Any]], None]


class Program(abc.ABC):
    """A compiled graph.

    Attributes:
        peak_bytes: peak memory of its intermediate values.
        reuses: output -> donated input whose memory it overwrites.
        tier: how the next run will be made.
    """

    peak_bytes: int = 0
    reuses: dict[int, int]
    tier: Tier = Tier.OP_BY_OP

    @property
    def runs_as(self) -> str:
        """How the next run will be made, in words."""
        return self.tier.words

    @abc.abstractmethod
    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """Data of the graph's outputs, from the data of its inputs, both in the graph's order.

        Donated inputs may be overwritten.

        Raises:
            NodeFailure: an op failed; chained to the op's exception.
        """

    def run_in_steps(
        self, inputs: Sequence[Any], scalars: Sequence[Any], watch: Watch | None = None
    ) -> Generator[None, None, list[Any]]:
        """As `run`, but yield before the program blocks on a collective: the rest may run in another thread.

        Args:
            watch: what to give away early. A program that cannot leaves it alone.
        """
        return self.run(inputs, scalars)
        yield

    @property
    def native(self) -> Any | None:
        """A program in C++ that the next run may be, None if there is none: `run(inputs, scalars)` of two lists.

        It runs in a PyTorch state of its own, and blocks on nothing. Donated inputs are taken out of the list: they die
        at their last use. What it returns goes to `results_of`.
        """
        return None

    def watched_in_native(self, outputs: Sequence[int]) -> tuple[list[int], int] | None:
        """For some outputs of `native`: their numbers, and how many nodes must have run for them. None: at its end."""
        return None

    def results_of(self, found: Any, inputs: list[Any], scalars: Sequence[Any]) -> list[Any]:
        """The results of a run of `native`, which has returned `found`, or raised it.

        Raises:
            NodeFailure: an op failed; chained to the op's exception.
        """
        raise NotImplementedError

    def note_native_cost(self, cost_ns: int) -> None:
        """A run of `native` has taken so much time of the processor."""
        return

    def count_native_runs(self, count: int) -> None:
        """Runs of `native` were made, and none of them has failed."""
        return

    def take_hlo(self) -> list[str] | None:
        """HLO of each program that was compiled since the last call, of this graph or another; None if there is none.

        torch_xla shows no HLO of a program: there it is the graph as text, for each call.
        """
        return None

    def prefer(self, tier: Tier) -> None:
        """Run in this tier from now on, if there is a choice: it is measured, or has been the quicker one."""
        return

    def step_times(self, is_waited: bool) -> StepTimes | None:
        """What is kept of an earlier run of the script; None if steps of this rhythm were not measured in both tiers.

        Args:
            is_waited: whether the script waits for each step.
        """
        return None

    def note_steps(self, is_waited: bool, times: StepTimes) -> None:
        """Steps of a rhythm were measured in both tiers."""
        return

    def salvage(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> Salvaged:
        """What is left of the outputs if the graph cannot run because inputs are lost (None).

        An output is left if it does not depend on a lost input, or has an earlier version among the inputs.
        """
        return Salvaged({})
