"""What is seen of a script between two reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from ltc_core.runtime.reads import MOST_CUTS, Reads

FIRST, SECOND = "first program", "second program"


def reads() -> Any:
    return Reads(SimpleNamespace(count=7))  # type: ignore[arg-type]


def cut(there: Any, program: str, is_awaited: bool = False, is_marked: bool = True) -> None:
    there.before_cut()
    there.after_cut(program, is_awaited)
    there.end_step(is_marked)


def test_cuts_between_two_reads_are_told_once() -> None:
    there = reads()
    cut(there, FIRST)
    assert there.after_read(is_held=False).is_new
    cut(there, FIRST)
    cut(there, SECOND)
    seen = there.after_read(is_held=False)
    assert (seen.cuts, seen.num_values, seen.is_new) == ([FIRST, SECOND], 7, False)
    assert 0 < seen.recorded_ns <= seen.took_ns
    assert there.after_read(is_held=False) is None


def test_a_script_that_reads_nothing_is_not_remembered() -> None:
    there = reads()
    for _ in range(20):
        cut(there, FIRST)
    assert there.after_read(is_held=False).cuts == [FIRST] * MOST_CUTS


def test_another_thread_takes_over_only_if_something_was_cut_and_nothing_is_held() -> None:
    there = reads()
    cut(there, FIRST)
    there.after_read(is_held=False)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(there.after_read, False).result() is None
        cut(there, FIRST)
        assert other.submit(there.after_read, True).result() is None
        assert there.is_of_reader
        assert other.submit(there.after_read, False).result().is_new
        assert not there.is_of_reader


def rhythms(script: str) -> str:
    """The rhythm after each cut of a script; `r`: a value was read since the one before."""
    there, found = reads(), ""
    for read in script:
        if read == "r":
            there.after_read(is_held=False)
        cut(there, FIRST)
        found += "r" if there.is_waited else "."
    return found


def test_a_rhythm_changes_when_a_few_steps_in_a_row_are_of_the_other() -> None:
    assert rhythms("rrrr....") == "..rrrr.."
    assert rhythms(".........r" * 3) == "." * 30
    assert rhythms("r." * 9) == "." * 18


def in_parts(script: str) -> str:
    """After each marked step of a script, whether steps are in parts; `r`: a read cuts the step before its end."""
    there, found = reads(), ""
    for step in script:
        if step == "r":
            cut(there, FIRST, is_awaited=True, is_marked=False)
        if step == "c":
            there.skip(1)  # C++ has done the same
        cut(there, SECOND)
        found += "p" if there.is_in_parts else "."
    return found


def test_a_step_is_in_parts_if_reads_cut_it_before_its_end() -> None:
    assert in_parts("rrrr....") == "..pppp.."
    assert in_parts("cccc....") == "..pppp.."
    assert in_parts("r." * 9) == "." * 18


def test_reads_between_steps_that_nobody_marks_make_no_parts() -> None:
    there = reads()
    for _ in range(20):
        cut(there, FIRST, is_awaited=True, is_marked=False)
    assert not there.is_in_parts
