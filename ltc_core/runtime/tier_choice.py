"""Whether a graph runs as compiled code or its ops are replayed: the two take turns until it is known what is quicker.

Compiled code is not always quicker than the kernels of PyTorch. Replay was measured beside the compiler, if at all,
and on a shared machine two steps that are minutes apart cannot be compared. So when compiled code has found its
placement, replay finds its own, and if neither is far ahead they take turns of a few steps each. While something else
is compiled, replay goes on: what would be measured does not last. The durations are kept on disk by the program. One
for each program and rhythm of steps, made and asked by `run_policy`.
"""

from __future__ import annotations

import enum
import statistics

from ltc_core.program.program import Program, StepTimes, Tier
from ltc_core.runtime.placement import Places

__all__ = ["TierChoice"]

# Factor by which replay may have been slower, beside a compiler, to be measured beside compiled code.
_NEAR_BEFORE = 2.5
_NEAR = 1.3  # factor within which the two take turns
_GAIN = 0.97  # factor by which replay must be quicker to stay
_UNSETTLED = 2  # steps after a change that do not count
_TURN = 7  # steps, with those that do not count
_NUM_TURNS = 6


class _Phase(enum.Enum):
    COMPILED_SETTLES = enum.auto()
    REPLAY_SETTLES = enum.auto()
    TURNS = enum.auto()
    KNOWN = enum.auto()


class TierChoice:
    """The choice for one program.

    Attributes:
        wanted: the tier that is to run next.
        is_put_off: whether compiled code is there, and is not tried yet.
        times: durations of a step in both tiers, when they have just been compared; whoever takes them resets it.
    """

    __slots__ = (
        "_compiled_ns",
        "_count",
        "_num_turns",
        "_phase",
        "_samples",
        "is_put_off",
        "times",
        "wanted",
    )

    def __init__(self) -> None:
        self.wanted = Tier.COMPILED
        self.is_put_off = False
        self.times: StepTimes | None = None
        self._phase = _Phase.COMPILED_SETTLES
        self._compiled_ns = 0.0
        self._count = self._num_turns = 0
        self._samples: dict[Tier, list[int]] = {Tier.REPLAY: [], Tier.COMPILED: []}

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet which tier is quicker."""
        return self._phase is not _Phase.KNOWN

    @property
    def is_measuring(self) -> bool:
        """Whether each launch is to be told of."""
        return self.is_put_off or self.is_comparing

    @property
    def is_comparing(self) -> bool:
        """Whether replay is being compared with compiled code: each launch counts."""
        return self._phase in (_Phase.REPLAY_SETTLES, _Phase.TURNS)

    def put_off(self, program: Program) -> None:
        """The program is launched while something else is compiled: let it be replayed, if nothing was tried yet."""
        if self._phase is _Phase.COMPILED_SETTLES:
            self.is_put_off = self.is_put_off or program.tier is Tier.COMPILED
            program.prefer(Tier.REPLAY)

    def decide(self, times: StepTimes) -> None:
        """The tier that these durations favor is used from now on."""
        is_quicker = times.replay_ns < _GAIN * times.compiled_ns
        self.wanted = Tier.REPLAY if is_quicker else Tier.COMPILED
        self._phase = _Phase.KNOWN

    def note(self, tier: Tier, mine: Places, replay: Places) -> None:
        """A launch in a tier, which `mine` has placed, while the choice is open. `replay` are the places of replay."""
        self.is_put_off = False
        if self._phase is _Phase.COMPILED_SETTLES:
            if tier is Tier.COMPILED and mine.is_settled:
                self._compiled_ns = mine.best_ns
                self._try(replay)
        elif tier is not self.wanted:
            # It cannot be replayed, or its compiled code does not fit any more.
            self._phase, self.wanted = _Phase.KNOWN, Tier.COMPILED
        elif self._phase is _Phase.REPLAY_SETTLES:
            if mine.is_settled:
                self._begin_turns(mine.best_ns)
        elif self._phase is _Phase.TURNS and mine.sample_ns:
            self._take(tier, mine.sample_ns)

    def _try(self, replay: Places) -> None:
        if replay.best_ns >= _NEAR_BEFORE * self._compiled_ns:
            return self._end(replay.best_ns, self._compiled_ns)
        replay.begin()
        self.wanted = Tier.REPLAY
        self._phase = _Phase.REPLAY_SETTLES

    def _begin_turns(self, replay_ns: float) -> None:
        if not 1 / _NEAR < replay_ns / self._compiled_ns < _NEAR:
            return self._end(replay_ns, self._compiled_ns)
        self.wanted = Tier.COMPILED
        self._phase = _Phase.TURNS

    def _take(self, tier: Tier, sample_ns: int) -> None:
        self._count += 1
        if self._count > _UNSETTLED:
            self._samples[tier].append(sample_ns)
        if self._count < _TURN:
            return
        self._count = 0
        self._num_turns += 1
        if self._num_turns == _NUM_TURNS:
            replay_ns, compiled_ns = (statistics.median(each) for each in self._samples.values())
            self._end(replay_ns, compiled_ns)
        else:
            self.wanted = Tier.REPLAY if tier is Tier.COMPILED else Tier.COMPILED

    def _end(self, replay_ns: float, compiled_ns: float) -> None:
        self.times = StepTimes(replay_ns, compiled_ns)
        self.decide(self.times)
