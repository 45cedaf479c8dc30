"""Which program of a graph fits a run, and which scalars have varied."""

from typing import Any

from ltc_core.program.specialize import Specialized


class Made:
    """Stands for a program with one constant."""

    def __init__(self, constant: Any) -> None:
        self.constant = constant

    def fits(self, scalars: Any) -> bool:
        return bool(scalars[0] == self.constant)


def made(constant: Any) -> Any:
    return Made(constant)


def test_a_program_fits_its_scalars_and_its_variant() -> None:
    programs: Specialized[str] = Specialized(4)
    programs.add(made(1), "a")
    programs.add(made(2), "a")
    assert programs.find([2], "a") is programs.newest
    assert programs.find([2], "b") is None and programs.find([3], "a") is None


def test_a_scalar_varies_that_differs_from_the_first_run() -> None:
    programs: Specialized[None] = Specialized(4)
    for scalars in ([1, 0.5, float("nan")], [1, 0.25, float("nan")], [1, 0.5, float("nan")]):
        programs.note(scalars)
    assert programs.varied == {1}
    programs.note([1.0, 0.5, float("nan")])
    assert programs.varied == {0, 1}  # of another type


def test_the_oldest_program_goes() -> None:
    programs: Specialized[None] = Specialized(2)
    for constant in (1, 2, 3):
        assert programs.is_full == (constant == 3)
        programs.add(made(constant), None)
    assert len(programs) == 2 and programs.find([1], None) is None
    assert [program.constant for program in programs] == [2, 3]  # type: ignore[attr-defined]
