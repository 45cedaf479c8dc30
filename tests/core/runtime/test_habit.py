"""Whether steps run early is measured in steps of the script: no longer than it takes to tell."""

from ltc_core.runtime.habit import Choice


def steps(choice: Choice, early_ns: int, whole_ns: int, count: int) -> list[bool]:
    """The way of each of `count` steps, which take so long one way and the other."""
    ways = []
    for _ in range(count):
        ways.append(choice.is_early)
        choice.note(early_ns if choice.is_early else whole_ns)
    return ways


def test_what_is_much_slower_whole_is_tried_four_times() -> None:
    choice = Choice()
    ways = steps(choice, 100, 130, 40)
    assert ways.count(False) == 4 and choice.is_known and choice.is_early


def test_what_is_much_slower_early_is_given_up_at_the_second_try() -> None:
    choice = Choice()
    ways = steps(choice, 130, 100, 40)
    assert ways.count(True) == 5 + 1 and choice.is_known and not choice.is_early


def test_what_is_close_is_measured_to_the_end() -> None:
    for early_ns, is_early in ((100, True), (104, False)):
        choice = Choice()
        ways = steps(choice, early_ns, 104, 20)
        assert ways.count(True) == 10
        assert choice.is_known and choice.is_early is is_early


def test_one_slow_step_decides_nothing() -> None:
    choice = Choice()
    steps(choice, 100, 100, 5)
    choice.note(900)
    steps(choice, 100, 90, 14)
    assert choice.is_known and not choice.is_early


def test_it_is_measured_again_after_a_while() -> None:
    choice = Choice()
    steps(choice, 100, 130, 2100)
    assert choice.is_known
    assert not all(steps(choice, 130, 100, 2100))
