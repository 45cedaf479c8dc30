"""Where a program runs: what is small, and what measuring the places decides."""

import itertools

import pytest

from ltc_core.program.program import StepTimes, Tier
from ltc_core.runtime import placement
from ltc_core.runtime.placement import Placement, PlacementPolicy

WORKER, YIELDING, SPARING, HERE = Placement


def test_a_program_is_small_when_its_ops_are_short() -> None:
    policy = PlacementPolicy(10)
    assert not policy.is_small  # nothing is known of it yet
    policy.note_run(10 * 5_000, 1)
    assert policy.is_small
    policy.note_run(10 * 500_000, 1)
    assert not policy.is_small


def test_a_long_program_is_not_small_however_short_its_ops() -> None:
    policy = PlacementPolicy(400)
    policy.note_run(6_000_000, 1)
    assert not policy.is_small


def test_what_takes_less_than_handing_it_over_is_quicker_here() -> None:
    policy = PlacementPolicy(10)
    assert not policy.is_quicker_here(is_awaited=False)
    policy.note_run(50_000, 1)
    assert policy.is_quicker_here(is_awaited=False)
    policy.note_run(1_000_000, 1)
    assert not policy.is_quicker_here(is_awaited=False)


def test_a_short_run_that_the_caller_waits_for_is_quicker_here() -> None:
    policy = PlacementPolicy(10)
    assert not policy.is_quicker_here(is_awaited=True)
    policy.note_run(500_000, 1)
    assert policy.is_quicker_here(is_awaited=True)
    assert not policy.is_quicker_here(is_awaited=False)
    policy.note_run(50_000_000, 1)
    assert not policy.is_quicker_here(is_awaited=True)


def test_one_slow_run_is_forgiven_in_time() -> None:
    policy = PlacementPolicy(10)
    for cost in (10 * 100_000, *([10 * 1_000] * 12)):
        policy.note_run(cost, 1)
    assert policy.is_small


class Loop:
    """A loop whose steps take `here_ns` if they run where they are cut and `there_ns` in the worker.

    With a thread less there, they take `sparing_ns`; the program alone takes `run_ns` of a processor. `elapsed_ns`
    is what a run takes in the worker.
    """

    def __init__(
        self, here_ns: int, there_ns: int, sparing_ns: int = 1, run_ns: int = 0, elapsed_ns: int = 1
    ) -> None:
        self.placement = PlacementPolicy(10)
        self.tier = Tier.REPLAY
        self.may_compete = True
        self.is_early = False  # whether what is replayed has begun before it is launched
        self.lengths = {HERE: here_ns, WORKER: there_ns, SPARING: sparing_ns, YIELDING: there_ns}
        self.run_ns = run_ns or here_ns
        self.elapsed_ns = elapsed_ns
        self.now_ns = 0

    def steps(self, n: int, num_threads: int = 2) -> list[Placement]:
        places = []
        for _ in range(n):
            if self.is_early and self.tier is Tier.REPLAY:
                self.placement.note_begun(self.now_ns, self.tier, self.may_compete)
                places.append(WORKER)
            else:
                places.append(
                    self.placement.choose(
                        self.now_ns, num_threads, self.tier, True, self.may_compete
                    )
                )
            self.now_ns += self.lengths[places[-1]]
            if self.placement.wanted is not None:
                self.tier = self.placement.wanted
            self.placement.note_run(self.run_ns, self.elapsed_ns)
        return places


def test_both_places_are_tried_and_the_quicker_one_is_kept() -> None:
    for here_ns, there_ns, wanted in ((8, 10, HERE), (10, 8, WORKER)):
        places = Loop(here_ns, there_ns).steps(60)
        assert places[0] is HERE and set(places[:30]) == {HERE, WORKER}
        assert set(places[30:]) == {wanted}


def test_another_tier_is_measured_anew() -> None:
    loop = Loop(8, 10)
    assert loop.steps(60)[-1] is HERE
    loop.tier, loop.lengths = Tier.COMPILED, {HERE: 10, WORKER: 8, SPARING: 8}
    assert loop.steps(60)[-1] is WORKER


class TestReplayBesideCompiledCode:
    told: list[StepTimes]

    def contest(
        self,
        replay_ns: int,
        compiled_ns: int,
        beside_compiler_ns: int = 0,
        may_compete: bool = True,
        is_early: bool = False,
    ) -> list[Tier]:
        """The tiers of steps from the first compiled one on. `told` are the durations that were compared."""
        self.told = []
        loop = Loop(0, 0)
        loop.may_compete, loop.is_early = may_compete, is_early

        def last(ns: int) -> None:
            loop.lengths = dict.fromkeys(Placement, ns)
            loop.run_ns = loop.elapsed_ns = ns

        if beside_compiler_ns:
            last(beside_compiler_ns)
            loop.steps(40)
        loop.tier, tiers = Tier.COMPILED, []
        for _ in range(200):
            last(replay_ns if loop.tier is Tier.REPLAY else compiled_ns)
            loop.steps(1)
            tiers.append(loop.tier)
            if loop.placement.times is not None:
                self.told.append(loop.placement.times)
                loop.placement.times = None
        return tiers

    @pytest.mark.parametrize("is_early", [False, True])
    def test_the_quicker_one_stays(self, is_early: bool) -> None:
        for replay_ns, compiled_ns, stays in ((90, 100, Tier.REPLAY), (100, 90, Tier.COMPILED)):
            for beside_compiler_ns in (0, 100):
                tiers = self.contest(replay_ns, compiled_ns, beside_compiler_ns, is_early=is_early)
                assert Tier.REPLAY in tiers and set(tiers[100:]) == {stays}

    def test_what_was_much_slower_is_not_tried_again(self) -> None:
        assert set(self.contest(300, 100, beside_compiler_ns=300)) == {Tier.COMPILED}

    def test_both_durations_are_told_when_they_are_known(self) -> None:
        for replay_ns, beside_compiler_ns in ((90, 0), (110, 100), (300, 300)):
            self.contest(replay_ns, 100, beside_compiler_ns)
            assert self.told == [StepTimes(replay_ns, 100)]

    def test_what_must_not_compete_is_not_compared(self) -> None:
        self.contest(90, 100, may_compete=False)
        assert self.told == []


def test_where_it_makes_no_difference_the_caller_is_not_kept_waiting() -> None:
    assert set(Loop(99, 100).steps(60)[30:]) == {WORKER}


def test_launches_that_come_quickly_while_the_queue_fills_do_not_count() -> None:
    assert set(Loop(here_ns=8, there_ns=5, elapsed_ns=10).steps(60)[30:]) == {HERE}
    assert set(Loop(here_ns=8, there_ns=5, elapsed_ns=7).steps(60)[30:]) == {WORKER}


class TestAThreadLess:
    def test_is_tried_where_recording_takes_longer_than_it_would_cost(self) -> None:
        for sparing_ns, wanted in ((70, SPARING), (99, HERE)):
            places = Loop(90, 110, sparing_ns, run_ns=50).steps(80)
            assert SPARING in places and set(places[50:]) == {wanted}

    def test_is_not_tried_where_the_program_needs_all(self) -> None:
        assert SPARING not in Loop(90, 110, 1, run_ns=80).steps(80)

    def test_is_not_tried_where_there_is_one(self) -> None:
        assert SPARING not in Loop(90, 110, 1, run_ns=10).steps(80, num_threads=1)


def test_a_step_that_is_interrupted_now_and_then_does_not_decide() -> None:
    loop = Loop(8, 10)
    for _ in range(30):
        loop.steps(1)
        if loop.now_ns % 5 == 0:
            loop.now_ns += 1  # an uneven clock
    loop.now_ns += 10**9
    assert set(loop.steps(30)) == {HERE}


class TestBusyCores:
    """Other processes use the cores: threads that give up theirs where they wait are much quicker."""

    @pytest.fixture(autouse=True)
    def cores_are_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "can_spin_briefly", lambda: True)
        monkeypatch.setattr(placement, "_lost_cores", itertools.count(0, 1000).__next__)

    def busy(self) -> Loop:
        loop = Loop(1000, 1000)
        loop.lengths[YIELDING] = 10
        return loop

    def test_threads_give_up_their_cores(self) -> None:
        assert set(self.busy().steps(60)[40:]) == {YIELDING}

    def test_what_is_much_slower_is_not_measured_to_the_end(self) -> None:
        assert (
            self.busy().steps(60).count(WORKER) == 6
        )  # two that do not count, three, and the next choice

    def test_not_where_no_core_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placement, "_lost_cores", lambda: 0)
        assert YIELDING not in self.busy().steps(60)

    def test_not_where_there_is_one_thread(self) -> None:
        assert YIELDING not in self.busy().steps(60, num_threads=1)

    def test_not_where_the_user_has_said_how_threads_wait(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(placement, "can_spin_briefly", lambda: False)
        assert YIELDING not in self.busy().steps(60)

    def test_places_are_measured_again_when_steps_become_slow(self) -> None:
        loop = Loop(10, 20)
        assert set(loop.steps(60)[40:]) == {HERE}
        loop.lengths |= {HERE: 1000, WORKER: 1000, SPARING: 1000}
        assert set(loop.steps(100)[60:]) == {YIELDING}

    def test_a_long_pause_does_not_count(self) -> None:
        loop = Loop(10, 20)
        loop.steps(60)
        for _ in range(20):
            assert set(loop.steps(10)) == {HERE}
            loop.now_ns += 10**9


def test_it_is_measured_again_when_the_program_has_run_for_long() -> None:
    loop = Loop(8, 10)
    assert set(loop.steps(1000)[30:]) == {HERE}
    loop.lengths = {HERE: 10, WORKER: 8}
    loop.run_ns = 10
    assert set(loop.steps(4000)[-500:]) == {WORKER}
