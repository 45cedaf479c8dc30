"""Where a program runs: what is small, and what measuring the places decides."""

from ltc_core.runtime.placement import Placement, PlacementPolicy

WORKER, SPARING, HERE = Placement


def test_a_program_is_small_when_its_ops_are_short() -> None:
    placement = PlacementPolicy(10)
    assert not placement.is_small  # nothing is known of it yet
    placement.note_run(10 * 5_000, 1)
    assert placement.is_small
    placement.note_run(10 * 500_000, 1)
    assert not placement.is_small


def test_a_long_program_is_not_small_however_short_its_ops() -> None:
    placement = PlacementPolicy(400)
    placement.note_run(6_000_000, 1)
    assert not placement.is_small


def test_one_slow_run_is_forgiven_in_time() -> None:
    placement = PlacementPolicy(10)
    for cost in (10 * 100_000, *([10 * 1_000] * 12)):
        placement.note_run(cost, 1)
    assert placement.is_small


class Loop:
    """A loop whose steps take `here_ns` if they run where they are cut and `there_ns` in the worker.

    With a thread less there, they take `sparing_ns`; the program alone takes `run_ns` of a processor. `elapsed_ns`
    is what a run takes in the worker.
    """

    def __init__(
        self, here_ns: int, there_ns: int, sparing_ns: int = 1, run_ns: int = 0, elapsed_ns: int = 1
    ) -> None:
        self.placement = PlacementPolicy(10)
        self.lengths = {HERE: here_ns, WORKER: there_ns, SPARING: sparing_ns}
        self.run_ns = run_ns or here_ns
        self.elapsed_ns = elapsed_ns
        self.now_ns = 0

    def steps(self, n: int, num_threads: int = 2) -> list[Placement]:
        places = []
        for _ in range(n):
            places.append(self.placement.choose(self.now_ns, num_threads))
            self.now_ns += self.lengths[places[-1]]
            self.placement.note_run(self.run_ns, self.elapsed_ns)
        return places


def test_both_places_are_tried_and_the_quicker_one_is_kept() -> None:
    for here_ns, there_ns, wanted in ((8, 10, HERE), (10, 8, WORKER)):
        places = Loop(here_ns, there_ns).steps(60)
        assert places[0] is WORKER and set(places[:30]) == {HERE, WORKER}
        assert set(places[30:]) == {wanted}


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


def test_it_is_measured_again_when_the_program_has_run_for_long() -> None:
    loop = Loop(8, 10)
    assert set(loop.steps(1000)[30:]) == {HERE}
    loop.lengths = {HERE: 10, WORKER: 8}
    loop.run_ns = 10
    assert set(loop.steps(4000)[-500:]) == {WORKER}
