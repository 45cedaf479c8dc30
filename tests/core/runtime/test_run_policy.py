"""Where and how a program runs: what is small, and what measuring places and tiers decides."""

import itertools

import pytest

from ltc_core.program.program import StepTimes, Tier
from ltc_core.runtime import lasting, placement
from ltc_core.runtime.family import Family
from ltc_core.runtime.placement import Placement, Places
from ltc_core.runtime.run_cost import RunCost
from ltc_core.runtime.run_policy import RunPolicy

WORKER, SPARING, HERE = Placement


@pytest.fixture(autouse=True)
def lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured lasts for as long as most of these loops."""
    monkeypatch.setattr(lasting, "_FIRST_STEPS", 100)


def test_a_program_is_small_when_its_ops_are_short() -> None:
    cost = RunCost(10)
    assert not cost.is_small  # nothing is known of it yet
    cost.note(10 * 5_000)
    assert cost.is_small
    cost.note(10 * 500_000)
    assert not cost.is_small


def test_a_long_program_is_not_small_however_short_its_ops() -> None:
    cost = RunCost(400)
    cost.note(6_000_000)
    assert not cost.is_small


def test_what_takes_less_than_handing_it_over_is_quicker_here() -> None:
    cost = RunCost(10)
    assert not cost.is_quicker_here(is_awaited=False)
    cost.note(50_000)
    assert cost.is_quicker_here(is_awaited=False)
    cost.note(1_000_000)
    assert not cost.is_quicker_here(is_awaited=False)


def test_a_short_run_that_the_caller_waits_for_is_quicker_here() -> None:
    cost = RunCost(10)
    assert not cost.is_quicker_here(is_awaited=True)
    cost.note(500_000)
    assert cost.is_quicker_here(is_awaited=True)
    assert not cost.is_quicker_here(is_awaited=False)
    cost.note(50_000_000)
    assert not cost.is_quicker_here(is_awaited=True)


def test_one_slow_run_is_forgiven_in_time() -> None:
    cost = RunCost(10)
    for cost_ns in (10 * 100_000, *([10 * 1_000] * 12)):
        cost.note(cost_ns)
    assert cost.is_small


class FakeProgram:
    """A program in two tiers. `told` are the durations that it was told, `kept` those of an earlier run."""

    def __init__(self) -> None:
        self.tier = Tier.REPLAY
        self.is_built = False
        self.can_replay = True
        self.told: list[tuple[bool, StepTimes]] = []
        self.kept: dict[bool, StepTimes] = {}

    def build(self) -> None:
        self.is_built, self.tier = True, Tier.COMPILED

    def prefer(self, tier: Tier) -> None:
        if self.is_built:
            self.tier = tier if self.can_replay else Tier.COMPILED

    def step_times(self, is_waited: bool) -> StepTimes | None:
        return self.kept.get(is_waited)

    def note_steps(self, is_waited: bool, times: StepTimes) -> None:
        self.told.append((is_waited, times))


class Loop:
    """A loop whose steps take `here_ns` if they run where they are cut and `there_ns` in the worker.

    With a thread less there, they take `sparing_ns`; the program alone takes `run_ns` of a processor. `elapsed_ns`
    is what a run takes in the worker.
    """

    def __init__(
        self, here_ns: int, there_ns: int, sparing_ns: int = 1, run_ns: int = 0, elapsed_ns: int = 1
    ) -> None:
        self.policy = RunPolicy(10, Family())
        self.program = FakeProgram()
        self.latest: Places | None = None
        self.may_choose = True
        self.may_spare = False  # fewer threads than cores, or each run is to round alike
        self.is_waited = False
        self.is_disturbed = False  # something else is compiled
        self.is_early = False  # whether what is replayed has begun before it is launched
        self.lengths = {HERE: here_ns, WORKER: there_ns, SPARING: sparing_ns}
        self.run_ns = run_ns or here_ns
        self.elapsed_ns = elapsed_ns
        self.now_ns = 1
        self.cpu_ns, self.recording_ns = 0, 0

    def runs_here(self, is_awaited: bool) -> bool:
        return self.policy.runs_here(is_awaited, self.is_waited)

    def steps(self, n: int, num_threads: int = 2) -> list[Placement]:
        places = []
        for _ in range(n):
            is_early = self.is_early and self.program.tier is Tier.REPLAY
            if self.latest is not None:
                self.latest.note_next(self.now_ns, self.cpu_ns)
            place = self.policy.choose(
                self.program,  # type: ignore[arg-type]
                self.now_ns,
                self.cpu_ns,
                num_threads,
                self.is_waited,
                self.may_choose,
                self.may_spare,
                WORKER if is_early else None,
                self.is_disturbed,
            )
            self.latest = self.policy.latest
            places.append(place)
            self.now_ns += self.lengths[place]
            self.cpu_ns += self.recording_ns
            self.policy.note_run(self.run_ns, self.elapsed_ns)
        return places


def test_both_places_are_tried_and_the_quicker_one_is_kept() -> None:
    for here_ns, there_ns, wanted in ((8, 10, HERE), (10, 8, WORKER)):
        places = Loop(here_ns, there_ns, run_ns=4).steps(60)
        assert places[0] is WORKER and set(places[:30]) == {HERE, WORKER}
        assert set(places[30:]) == {wanted}


def test_a_place_that_was_chosen_is_known_before_the_next_run() -> None:
    """A run in the thread that cuts need not be asked for, but it is still told of, so that it is measured again."""
    for here_ns, there_ns, is_here in ((400_000, 600_000, True), (600_000, 400_000, False)):
        loop = Loop(here_ns, there_ns, run_ns=200_000)
        loop.steps(5)
        assert not loop.runs_here(is_awaited=False)
        loop.steps(55)
        assert loop.runs_here(is_awaited=False) is is_here
        assert loop.runs_here(is_awaited=True)
        assert loop.policy.is_measuring(is_waited=False) or not is_here


def test_a_short_run_is_not_here_where_steps_that_are_waited_for_are_quicker_otherwise() -> None:
    for here_ns, there_ns in ((400_000, 600_000), (600_000, 400_000)):
        loop = Loop(here_ns, there_ns, run_ns=200_000)
        loop.is_waited = True
        loop.steps(60)
        assert loop.runs_here(is_awaited=True) is (here_ns < there_ns)


def test_where_compiled_code_runs_is_not_where_its_replay_does() -> None:
    loop = Loop(10, 8)
    assert loop.steps(60)[-1] is WORKER
    loop.program.build()
    loop.program.can_replay = False
    loop.lengths = {HERE: 8, WORKER: 10, SPARING: 10}
    assert loop.steps(60)[-1] is HERE and loop.policy.is_here
    loop.policy.cost.cost_ns = 1e9
    assert not loop.runs_here(is_awaited=False)


@pytest.mark.parametrize(
    ("recording_ns", "num_cores", "is_tried"), [(900, 64, False), (10, 64, True), (900, 2, True)]
)
def test_where_the_overlap_gains_much_the_thread_that_cuts_is_not_tried(
    recording_ns: int, num_cores: int, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thread on each core it is tried always: what a run there would cost is not known."""
    monkeypatch.setattr(placement, "num_cores", lambda: num_cores)
    loop = Loop(here_ns=1900, there_ns=1000, run_ns=1000)
    loop.recording_ns = recording_ns
    places = loop.steps(60)
    assert (HERE in places) is is_tried and places[-1] is WORKER


def test_steps_that_are_waited_for_overlap_with_nothing_so_both_places_are_tried() -> None:
    """What a run costs counts the threads that spin, so the worker's steps can look as if they overlapped."""
    loop = Loop(here_ns=900, there_ns=1000, run_ns=1000)
    loop.recording_ns, loop.is_waited = 900, True
    assert loop.steps(60)[-1] is HERE


def test_another_tier_is_measured_anew() -> None:
    loop = Loop(8, 10)
    assert loop.steps(60)[-1] is HERE
    loop.program.build()
    loop.program.can_replay = False
    loop.lengths = {HERE: 10, WORKER: 8, SPARING: 8}
    assert loop.steps(60)[-1] is WORKER


def test_another_rhythm_is_measured_anew_and_the_first_one_is_remembered() -> None:
    loop = Loop(8, 10)
    assert loop.steps(60)[-1] is HERE
    loop.is_waited, loop.lengths = True, {HERE: 10, WORKER: 8, SPARING: 8}
    assert loop.steps(60)[-1] is WORKER
    loop.is_waited, loop.lengths = False, {HERE: 8, WORKER: 10, SPARING: 10}
    assert set(loop.steps(60)) == {HERE}


def test_programs_that_take_turns_do_not_count_each_other_s_steps() -> None:
    """As those of a mixture of experts, or of batches of many lengths."""
    short, long = Loop(8, 10), Loop(3000, 1000)
    for _ in range(60):
        for one, other in ((short, long), (long, short)):
            one.steps(1)
            other.now_ns, other.latest = one.now_ns, one.latest
    assert short.steps(1) == [HERE] and long.steps(1) == [WORKER]


class Contest:
    """Compiled code comes for a program whose steps take `beside_compiler_ns` before."""

    def __init__(self, beside_compiler_ns: int = 0, is_early: bool = False) -> None:
        self.loop = Loop(0, 0)
        self.loop.is_early = is_early
        if beside_compiler_ns:
            self.steps(40, beside_compiler_ns, 0)
        self.loop.program.build()

    def steps(self, n: int, replay_ns: int, compiled_ns: int) -> list[Tier]:
        """The tiers that are wanted after each of n steps that take so long."""
        tiers = []
        for _ in range(n):
            ns = replay_ns if self.loop.program.tier is Tier.REPLAY else compiled_ns
            self.loop.lengths = dict.fromkeys(Placement, ns)
            self.loop.run_ns = self.loop.elapsed_ns = ns
            self.loop.steps(1)
            tiers.append(self.loop.program.tier)
        return tiers


class TestReplayBesideCompiledCode:
    @pytest.mark.parametrize("is_early", [False, True])
    @pytest.mark.parametrize("beside_compiler_ns", [0, 100])
    @pytest.mark.parametrize("replay_ns, stays", [(90, Tier.REPLAY), (110, Tier.COMPILED)])
    def test_the_quicker_one_stays(
        self, replay_ns: int, stays: Tier, beside_compiler_ns: int, is_early: bool
    ) -> None:
        contest = Contest(beside_compiler_ns, is_early)
        tiers = contest.steps(300, replay_ns, 100)
        assert Tier.REPLAY in tiers and set(tiers[150:]) == {stays}
        assert contest.loop.program.told == [(False, StepTimes(replay_ns, 100))]

    def test_what_is_near_takes_turns_so_that_a_slow_while_does_not_decide(self) -> None:
        contest = Contest()
        while not contest.loop.policy.is_measuring(is_waited=False):
            contest.steps(1, 90, 100)
        tiers = contest.steps(25, 110, 120)  # others use the cores while replay finds its place
        tiers += contest.steps(100, 90, 100)
        assert sum(a is not b for a, b in itertools.pairwise(tiers)) >= 5
        assert set(tiers[-20:]) == {Tier.REPLAY}

    def test_what_was_much_slower_is_not_tried_again(self) -> None:
        contest = Contest(beside_compiler_ns=300)
        assert set(contest.steps(200, 300, 100)) == {Tier.COMPILED}
        assert contest.loop.program.told == [(False, StepTimes(300, 100))]

    def test_what_is_much_slower_takes_no_turns(self) -> None:
        tiers = Contest(beside_compiler_ns=200).steps(200, 200, 100)
        assert sum(a is not b for a, b in itertools.pairwise(tiers)) == 2

    def test_each_rhythm_has_a_choice_of_its_own(self) -> None:
        contest = Contest()
        assert contest.steps(300, 90, 100)[-1] is Tier.REPLAY
        contest.loop.is_waited = True
        assert contest.steps(300, 110, 100)[-1] is Tier.COMPILED
        contest.loop.is_waited = False
        assert set(contest.steps(20, 90, 100)) == {Tier.REPLAY}
        assert [is_waited for is_waited, _ in contest.loop.program.told] == [False, True]

    def test_rhythms_that_take_turns_do_not_end_each_other_s_comparison(self) -> None:
        contest = Contest()
        for _ in range(40):
            contest.loop.is_waited = False
            contest.steps(12, 110, 100)
            contest.loop.is_waited = True
            last = contest.steps(40, 90, 100)[-1]
        assert last is Tier.REPLAY
        assert {is_waited for is_waited, _ in contest.loop.program.told} == {False, True}

    def test_what_an_earlier_run_has_measured_is_not_measured_again(self) -> None:
        for replay_ns, stays in ((90, Tier.REPLAY), (110, Tier.COMPILED)):
            contest = Contest()
            contest.loop.program.kept = {False: StepTimes(replay_ns, 100)}
            assert set(contest.steps(100, 1, 1)) == {stays}
            assert contest.loop.program.told == []

    def test_while_something_else_is_compiled_it_is_replayed_and_nothing_is_measured(self) -> None:
        contest = Contest()
        contest.loop.is_disturbed = True
        tiers = contest.steps(100, 110, 100)
        assert set(tiers) == {Tier.REPLAY} and contest.loop.program.told == []
        assert contest.loop.policy.is_measuring(is_waited=False)  # each launch is asked for
        assert not contest.loop.policy.is_decided(is_waited=False)
        contest.loop.is_disturbed = False
        assert set(contest.steps(300, 110, 100)[200:]) == {Tier.COMPILED}
        assert contest.loop.program.told == [(False, StepTimes(110, 100))]
        assert contest.loop.policy.is_decided(is_waited=False)

    def test_turns_wait_until_nothing_else_is_compiled(self) -> None:
        contest = Contest()
        while not contest.loop.policy.is_measuring(is_waited=False):
            contest.steps(1, 90, 100)
        contest.steps(12, 90, 100)
        contest.loop.is_disturbed = True
        contest.steps(50, 300, 100)
        contest.loop.is_disturbed = False
        assert set(contest.steps(150, 90, 100)[100:]) == {Tier.REPLAY}
        assert contest.loop.program.told == [(False, StepTimes(90, 100))]

    def test_what_cannot_be_replayed_stays_compiled(self) -> None:
        contest = Contest()
        contest.loop.program.can_replay = False
        assert set(contest.steps(100, 90, 100)) == {Tier.COMPILED}
        assert contest.loop.program.told == []
        assert not contest.loop.policy.is_measuring(is_waited=False)

    def test_tiers_are_not_chosen_where_each_run_is_to_round_alike(self) -> None:
        contest = Contest()
        contest.loop.may_choose = False
        assert set(contest.steps(100, 90, 100)) == {Tier.COMPILED}
        assert contest.loop.program.told == []


def test_where_it_makes_no_difference_the_caller_is_not_kept_waiting() -> None:
    assert set(Loop(99, 100).steps(60)[30:]) == {WORKER}


def test_launches_that_come_quickly_while_the_queue_fills_do_not_count() -> None:
    assert set(Loop(here_ns=8, there_ns=5, elapsed_ns=10).steps(60)[30:]) == {HERE}
    assert set(Loop(here_ns=8, there_ns=5, elapsed_ns=7).steps(60)[30:]) == {WORKER}


def test_runs_that_are_not_placed_are_not_kept() -> None:
    """A program that costs little is launched by C++, again and again, and never settles."""
    loop = Loop(8, 10)
    loop.steps(2)
    for _ in range(1000):
        loop.policy.note_run(1, 1)
    assert all(len(places._runs) < 20 for places in loop.policy._family.places.values())


def test_places_are_not_measured_while_something_is_compiled() -> None:
    loop = Loop(10, 8)
    loop.is_disturbed = True
    loop.lengths = {HERE: 8, WORKER: 10}
    assert set(loop.steps(60)) == {WORKER}
    loop.is_disturbed, loop.lengths = False, {HERE: 10, WORKER: 8}
    assert set(loop.steps(60)[30:]) == {WORKER}
    loop.is_disturbed, loop.lengths = True, {HERE: 10, WORKER: 100}
    assert set(loop.steps(60)) == {WORKER}


def test_a_place_that_was_given_for_a_while_does_not_replace_the_best_one() -> None:
    loop = Loop(8, 10)
    assert loop.steps(60)[-1] is HERE
    loop.is_early = True
    assert set(loop.steps(20)) == {WORKER}
    loop.is_early = False
    assert set(loop.steps(20)) == {HERE}


@pytest.mark.parametrize("is_waited", [False, True])
class TestAThreadLess:
    """Programs with a thread on each core."""

    def loop(self, is_waited: bool, *lengths: int) -> Loop:
        loop = Loop(*lengths)
        loop.may_spare, loop.is_waited = True, is_waited
        return loop

    def large(self, is_waited: bool, is_compiled: bool, *lengths: int) -> Loop:
        loop = self.loop(is_waited, *lengths)
        if is_compiled:
            loop.program.can_replay = False
            loop.program.build()
        else:
            loop.run_ns = 10 * 200_000
            loop.policy.note_run(loop.run_ns, loop.elapsed_ns)
        return loop

    @pytest.mark.parametrize(
        "here_ns, there_ns, sparing_ns, wanted",
        [(90, 110, 80, SPARING), (80, 110, 90, HERE), (90, 80, 85, WORKER)],
    )
    def test_small_ops_have_a_thread_less_first(
        self, is_waited: bool, here_ns: int, there_ns: int, sparing_ns: int, wanted: Placement
    ) -> None:
        places = self.loop(is_waited, here_ns, there_ns, sparing_ns).steps(80)
        assert places[0] is (HERE if is_waited else SPARING) and places[10] is not WORKER
        assert set(places[:40]) == {HERE, SPARING, WORKER} and set(places[40:]) == {wanted}

    @pytest.mark.parametrize("is_compiled", [False, True])
    @pytest.mark.parametrize(
        "here_ns, there_ns, sparing_ns, wanted",
        [(90, 110, 80, SPARING), (80, 110, 90, HERE), (90, 80, 90, WORKER)],
    )
    def test_large_ops_and_compiled_code_have_all_threads_first(
        self,
        is_waited: bool,
        is_compiled: bool,
        here_ns: int,
        there_ns: int,
        sparing_ns: int,
        wanted: Placement,
    ) -> None:
        places = self.large(is_waited, is_compiled, here_ns, there_ns, sparing_ns).steps(80)
        assert places[0] is (HERE if is_waited else WORKER) and places[10] is not SPARING
        assert set(places[:40]) == {HERE, SPARING, WORKER} and set(places[40:]) == {wanted}

    def test_all_are_not_tried_where_a_thread_less_is_far_ahead(self, is_waited: bool) -> None:
        places = self.loop(is_waited, 100, 10, 80).steps(80)
        assert set(places[:30]) == {HERE, SPARING} and set(places[30:]) == {SPARING}

    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_a_thread_less_is_not_tried_where_all_are_far_ahead(
        self, is_waited: bool, is_compiled: bool
    ) -> None:
        places = self.large(is_waited, is_compiled, 100, 80, 10).steps(80)
        assert set(places[:30]) == {HERE, WORKER} and set(places[30:]) == {WORKER}

    def test_it_leaves_a_core_to_what_else_is_compiled(self, is_waited: bool) -> None:
        loop = self.loop(is_waited, 90, 110, 80)
        loop.is_disturbed = True
        assert set(loop.steps(20)) == {SPARING}

    def test_not_where_each_run_is_to_round_alike(self, is_waited: bool) -> None:
        loop = self.loop(is_waited, 90, 110, 1)
        loop.may_spare = False
        assert set(loop.steps(80)) == {HERE, WORKER}


def test_a_place_that_was_given_only_is_not_chosen() -> None:
    loop = Loop(8, 10)
    loop.is_waited = loop.is_early = True
    assert set(loop.steps(40)) == {WORKER}
    loop.is_early = False
    assert loop.steps(60)[-1] is HERE


def test_a_step_that_is_interrupted_now_and_then_does_not_decide() -> None:
    loop = Loop(8, 10)
    for _ in range(30):
        loop.steps(1)
        if loop.now_ns % 5 == 0:
            loop.now_ns += 1  # an uneven clock
    loop.now_ns += 10**9
    assert set(loop.steps(30)) == {HERE}


class TestSlowSteps:
    def test_what_is_much_slower_is_not_measured_to_the_end(self) -> None:
        # Two that do not count, and three.
        assert Loop(10, 1000, run_ns=10).steps(60).count(WORKER) == 5

    def test_what_is_clearly_slower_than_another_place_is_left_after_three_steps(self) -> None:
        loop = Loop(10, 13)
        loop.is_waited = True
        # The one that ends the other place, two that do not count, and three.
        assert loop.steps(60).count(WORKER) == 6

    def test_places_are_measured_again_when_steps_become_slow(self) -> None:
        loop = Loop(10, 20)
        assert set(loop.steps(60)[40:]) == {HERE}
        loop.lengths |= {HERE: 1000, WORKER: 100}
        assert set(loop.steps(100)[60:]) == {WORKER}

    def test_a_long_pause_does_not_count(self) -> None:
        loop = Loop(10, 20)
        loop.steps(60)
        for _ in range(5):
            assert set(loop.steps(10)) == {HERE}
            loop.now_ns += 10**9


def test_it_is_measured_again_when_the_program_has_run_for_long() -> None:
    loop = Loop(8, 10)
    assert loop.steps(1000)[-1] is HERE
    loop.lengths = {HERE: 10, WORKER: 8}
    loop.run_ns = 10
    assert loop.steps(4000)[-1] is WORKER


def test_what_was_measured_once_is_soon_measured_again_and_what_stays_true_ever_later() -> None:
    """Something else may have used the cores while it was measured for the first time."""
    loop = Loop(10, 8)
    assert loop.steps(60)[-1] is WORKER
    loop.lengths = {HERE: 8, WORKER: 10}
    loop.run_ns = 10
    assert loop.steps(150)[-1] is HERE
    loop.steps(5000)
    tried = loop.steps(4000).count(WORKER)
    assert 0 < tried < 4000 / 100


@pytest.mark.parametrize("often, wanted", [(7, WORKER), (3, HERE)])
def test_steps_that_are_long_again_and_again_count_and_a_burst_does_not(
    often: int, wanted: Placement
) -> None:
    loop = Loop(100, 90)
    for number in range(60):
        loop.lengths[WORKER] = 300 if number % often == 0 else 80
        loop.steps(1)
    assert loop.policy.is_here is (wanted is HERE)


def test_measured_again_what_was_the_best_comes_first() -> None:
    """So that little time is lost with the others."""
    loop = Loop(1000, 2000, sparing_ns=900)
    loop.may_spare = True
    loop.program.build()  # compiled code has all threads first
    assert loop.steps(60)[-1] is SPARING
    later = loop.steps(150)
    assert later.count(HERE) == 10
    assert later.count(WORKER) == 6  # it is clearly slower


def test_compiled_code_and_replay_are_not_placed_anew_while_they_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_FIRST_STEPS", "_MOST_STEPS"):
        monkeypatch.setattr(lasting, name, 12)
    loop = Loop(8, 10, sparing_ns=10)
    loop.steps(60)
    loop.program.build()
    places = loop.steps(20)
    while not loop.policy.is_decided(is_waited=False):
        places += loop.steps(1)
    assert len(places) > 60 and places.count(WORKER) <= 2 * 10  # each tier once
