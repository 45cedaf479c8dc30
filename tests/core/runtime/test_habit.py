"""Whether steps run early is measured in steps of the script: no longer than it takes to tell."""

import pytest

from ltc_core.runtime.habit import Choice, Context, Habit
from ltc_core.runtime.placement import Placement

SPARING, WORKER = Placement.SPARING, Placement.WORKER


def steps(choice: Choice, early_ns: int, whole_ns: int, count: int) -> list[bool]:
    """The way of each of `count` steps, which take so long one way and the other."""
    ways = []
    for _ in range(count):
        ways.append(choice.is_early)
        step(choice, early_ns if choice.is_early else whole_ns)
    return ways


def step(choice: Choice, took_ns: int) -> None:
    choice.note(choice._ended_ns + took_ns, (WORKER,))


def test_steps_are_whole_until_early_ones_were_quicker_in_each_turn() -> None:
    choice = Choice()
    ways = steps(choice, 100, 130, 40)
    assert ways == [False] * 5 + [True] * 5 + [False] * 5 + [True] * 25 and choice.is_known


def test_what_is_much_slower_early_is_given_up_at_the_first_try() -> None:
    choice = Choice()
    ways = steps(choice, 130, 100, 40)
    assert ways.count(True) == 4 and choice.is_known and not choice.is_early


def test_what_was_not_quicker_in_the_first_turn_has_no_second_one() -> None:
    for early_ns, is_early in ((100, True), (104, False)):
        choice = Choice()
        ways = steps(choice, early_ns, 104, 20)
        assert ways.count(True) == (10 if is_early else 5)
        assert choice.is_known and choice.is_early is is_early


@pytest.mark.parametrize("later_ns, num_whole", [(130, 4), (105, 10)])
def test_measured_again_what_was_much_quicker_stays_after_few_steps(
    later_ns: int, num_whole: int
) -> None:
    choice = Choice()
    steps(choice, 100, 130, 20)
    assert choice.is_known and choice.is_early
    ways = steps(choice, 100, later_ns, 100)
    assert ways.count(False) == num_whole and choice.is_early


@pytest.mark.parametrize(
    "sparing_ns, all_ns, num_early, wanted",
    [
        (80, 90, (10, 10), SPARING),
        (90, 80, (10, 10), WORKER),
        (90, 130, (10, 4), SPARING),
        (130, 90, (4, 10), WORKER),
        (130, 99, (4, 5), None),
    ],
)
def test_each_way_to_run_early_is_measured_and_the_quickest_is_kept(
    sparing_ns: int, all_ns: int, num_early: tuple[int, int], wanted: Placement | None
) -> None:
    choice = Choice()
    took = {None: 100, SPARING: sparing_ns, WORKER: all_ns}
    ways = []
    while not choice.is_known:
        ways.append(choice.early)
        choice.note(choice._ended_ns + took[choice.early], (WORKER, SPARING))
    assert choice.early is wanted
    assert (ways.count(SPARING), ways.count(WORKER)) == num_early


def test_one_slow_step_decides_nothing() -> None:
    choice = Choice()
    steps(choice, 100, 100, 7)
    step(choice, 900)
    steps(choice, 90, 100, 12)
    assert choice.is_known and choice.is_early


def test_a_burst_of_other_work_in_whole_steps_decides_nothing() -> None:
    choice = Choice()
    steps(choice, 100, 300, 10)
    steps(choice, 100, 100, 10)
    assert choice.is_known and not choice.is_early


def test_it_is_measured_again_after_a_while() -> None:
    choice = Choice()
    steps(choice, 100, 130, 2100)
    assert choice.is_known
    assert not all(steps(choice, 130, 100, 2100))


def test_what_was_measured_once_is_soon_measured_again_and_what_stays_true_ever_later() -> None:
    """Something else may have used the cores while it was measured for the first time."""
    choice = Choice()
    steps(choice, 130, 100, 20)
    assert not choice.is_early
    steps(choice, 100, 130, 170)
    assert choice.is_early
    steps(choice, 100, 130, 5000)
    assert steps(choice, 100, 130, 4000).count(False) < 4000 / 100


def test_what_is_measured_beside_a_compiler_does_not_decide() -> None:
    choice = Choice()
    steps(choice, 130, 100, 3)
    for _ in range(100):
        choice.put_off()
    assert not choice.is_early and not choice.is_known
    steps(choice, 100, 130, 40)
    choice.put_off()
    assert choice.is_known and choice.is_early


class _Program:
    """Stands for a compiled graph."""

    def __init__(self) -> None:
        self.habit = Habit()


def foreseen(cycle: list[_Program], count: int) -> list[_Program | None]:
    """What was expected before each program of a script that cuts those of a cycle again and again."""
    expected: list[_Program | None] = []
    last, context = cycle[-1], Context(0, 1)
    for k in range(count):
        step = cycle[k % len(cycle)]
        expected.append(last.habit.next(context))
        last.habit.note_next(step, context)
        context = context.again() if step is last else Context(id(last), 1)
        last = step
    return expected


def test_one_program_again_and_again() -> None:
    program = _Program()
    assert foreseen([program], 100)[3:] == [program] * 97


def test_a_program_that_comes_three_times_and_then_another() -> None:
    """As where a mixture of experts reads the rows of each."""
    router, expert, rest = (_Program() for _ in range(3))
    cycle = [router, expert, expert, expert, rest]
    assert foreseen(cycle, 100)[25:] == cycle * 15


def test_what_follows_depends_on_what_came_before() -> None:
    """As where every second step also ends an accumulation."""
    forward, small, large = (_Program() for _ in range(3))
    cycle = [forward, small, forward, large]
    assert foreseen(cycle, 100)[20:] == cycle * 20


def test_a_program_that_is_gone_is_not_expected() -> None:
    first, second = _Program(), _Program()
    foreseen([first, second], 20)
    is_known = first.habit.followers() == [second]
    del second
    assert is_known
    assert first.habit.followers() == [] and first.habit.next(Context()) is None
