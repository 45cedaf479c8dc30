"""Where and how one program runs: in which place, and in which tier. Steps of the script are measured for both.

A script that waits for each step, as by `loss.item()`, and one that goes on without have each their own rhythm
(`reads`): what is quicker in one need not be in the other. So each rhythm has measurements of its own.
One for each program, made by `program_cache`, asked by `device_context`.
"""

from __future__ import annotations

from ltc_core.program.program import Program, Tier
from ltc_core.runtime.family import Family
from ltc_core.runtime.placement import Placement, Places, in_worker
from ltc_core.runtime.run_cost import RunCost
from ltc_core.runtime.tier_choice import TierChoice

__all__ = ["RunPolicy"]


class RunPolicy:
    """Chooses for one program.

    Args:
        size: its ops.
        family: programs that share its measurements of places.

    Attributes:
        cost: what its runs cost.
        latest: the places that the last launch which was placed had.
    """

    __slots__ = ("_choices", "_family", "_last_choice", "cost", "latest")

    def __init__(self, size: int, family: Family) -> None:
        self.cost = RunCost(size)
        self._family = family
        self._choices: dict[bool, TierChoice] = {}
        self._last_choice: TierChoice | None = None  # the one that the program was last told of
        self.latest: Places | None = None

    @property
    def is_here(self) -> bool:
        """Whether the last launch that was placed was to run in the thread that cuts."""
        return self.latest is not None and self.latest.chosen is Placement.HERE

    def is_measuring(self, is_waited: bool) -> bool:
        """Whether each launch is to be placed: a place was chosen by time, or replay and compiled code compete."""
        choice = self._choices.get(is_waited)
        return self._is_settled_here(is_waited) or (choice is not None and choice.is_measuring)

    def is_comparing(self, is_waited: bool) -> bool:
        """Whether each step counts, since replay is being compared with compiled code."""
        choice = self._choices.get(is_waited)
        return choice is not None and choice.is_comparing

    def runs_here(self, is_awaited: bool, is_waited: bool) -> bool:
        """Whether the next replay is to be in the thread that cuts, and it need not be asked for a place.

        Args:
            is_awaited: the caller is going to wait for it.
            is_waited: the rhythm of steps.
        """
        return self.is_quicker_here(is_awaited) or self._is_settled_here(is_waited)

    def is_quicker_here(self, is_awaited: bool) -> bool:
        """Whether a replay is quicker where it is cut: it takes less than handing it over.

        In the worker it may have begun before it is cut. Where that was measured, it decides.
        """
        measured = self._family.replay[True] if is_awaited else None
        if measured is not None and measured.is_settled and measured.best is not Placement.HERE:
            return False
        return self.cost.is_quicker_here(is_awaited)

    def _is_settled_here(self, is_waited: bool) -> bool:
        places = self._family.replay[is_waited]
        return places is not None and places.is_settled and places.best is Placement.HERE

    def note_run(self, cost_ns: int, elapsed_ns: int) -> None:
        """Note the CPU time and the duration of a run."""
        self.cost.note(cost_ns)
        if self.latest is not None:
            self.latest.note_run(elapsed_ns)

    def choose(
        self,
        program: Program,
        now_ns: int,
        cpu_ns: int,
        num_threads: int,
        is_waited: bool,
        may_choose: bool,
        may_spare: bool,
        given: Placement | None = None,
        is_disturbed: bool = False,
    ) -> Placement:
        """Placement for the next launch of a program that does not hold the GIL.

        Args:
            program: the program. If another tier is to run next, it is told.
            now_ns: the time.
            cpu_ns: CPU time of the thread that launches, up to now.
            num_threads: available ones.
            is_waited: the rhythm of steps.
            may_choose: whether runs may round otherwise than before, as in another tier.
            may_spare: whether they have a thread on each core, and may round as with one less.
            given: where the launch runs anyway.
            is_disturbed: whether something uses the cores for a while, so that nothing is measured.
        """
        tier = program.tier
        places = self._family.places_of(is_waited, tier)
        if places is not self.latest:
            if self.latest is not None:
                self.latest.pause()
            self.latest = places
        choice = self._choices.get(is_waited)
        if choice is None:
            choice = self._choices[is_waited] = TierChoice()
        # Compiled code has fewer and larger ops than its graph.
        ways = in_worker(may_spare, tier is Tier.COMPILED or self.cost.has_large_ops)
        if is_disturbed:
            placement = places.keep(given, ways)
        else:
            limit_ns = float("inf") if places.is_settled else self._best_ns()
            placement = places.choose(
                now_ns,
                cpu_ns,
                num_threads,
                self.cost.cost_ns,
                ways,
                limit_ns,
                given,
                may_begin=not choice.is_measuring,
            )
        if may_choose:
            self._choose_tier(program, choice, places, is_waited, is_disturbed)
        return placement

    def is_decided(self, is_waited: bool) -> bool:
        """Whether it is known for this rhythm if compiled code is quicker."""
        choice = self._choices.get(is_waited)
        return choice is not None and not choice.is_open

    def _best_ns(self) -> float:
        """Duration of the quickest steps that were measured."""
        known = (places.best_ns for places in self._family.places.values() if places.is_settled)
        return min(known, default=float("inf"))

    def _choose_tier(
        self,
        program: Program,
        choice: TierChoice,
        places: Places,
        is_waited: bool,
        is_disturbed: bool,
    ) -> None:
        tier = program.tier
        # Else its tier is what the other rhythm wants, and says nothing about this one.
        is_own = self._last_choice in (choice, None)
        self._last_choice = choice
        if choice.is_open and is_own:
            known = program.step_times(is_waited) if tier is Tier.COMPILED else None
            if known is not None:
                choice.decide(known)
            elif is_disturbed:
                return choice.put_off(program)
            else:
                choice.note(tier, places, self._family.places_of(is_waited, Tier.REPLAY))
            if choice.times is not None:
                program.note_steps(is_waited, choice.times)
                choice.times = None
        if choice.wanted is not tier:
            program.prefer(choice.wanted)
