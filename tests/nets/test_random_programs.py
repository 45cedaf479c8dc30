"""Random programs beside eager, other ones for each seed; ten thousand of them: make test-random.

That a program which fails is found, shrunk and named is tested on devices that are made to fail.
"""

import pytest
import torch

from tests.core.beside_eager import Raised, attempt, difference
from tests.nets import random_programs
from tests.nets.random_programs import generate, main, outcome, shrunk


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tier", "count"),
    [("ops", "40"), ("early", "40"), ("at_once", "40"), ("lowered", "12"), ("parts", "4")],
)
def test_random_programs(tier: str, count: str) -> None:
    assert main(["--tier", tier, "--count", count]) == 0


def test_a_number_is_always_the_same_program() -> None:
    assert generate(7) == generate(7) != generate(8)


def test_what_fails_is_shrunk_to_the_lines_that_matter() -> None:
    lines = [
        "t0 = make([3], torch.float32, 1).to(d[0])",
        "t1 = make([3], torch.float32, 2).to(d[0])",
        "t2 = t0 + t1",
        "cut()",
        "t3 = t1.exp()",
        "t0.add_(1)",
        "t4 = t3 * 2",
        "t2.mul_(t4)",
    ]
    found = shrunk(lines, lambda some: any("t4" in line and "mul_" in line for line in some))
    assert found == [line for line in lines if line[:2] in ("t1", "t0", "t2", "t3", "t4")][0:1] + [
        lines[1], lines[2], lines[4], lines[6], lines[7],
    ]  # fmt: skip


def test_a_difference_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["t0 = make([3], torch.float32, 1).to(d[0])", "t1 = t0 + 1", "t0.view(7)"]
    eager = outcome(lines, [torch.device("cpu")])

    def wrong(lines: list[str], devices: list[torch.device]) -> object:
        events, held = outcome(lines, devices)
        return events, held if devices[0].type == "cpu" else {**held, "t1": held["t1"] + 1}

    monkeypatch.setattr(random_programs, "outcome", wrong)
    what = random_programs.check(lines, num_devices=1)
    assert what.startswith("round 1, t1: ") and "not close" in what
    assert isinstance(eager[0][2], Raised) and eager[0][2].type is RuntimeError


def test_what_counts_as_a_difference() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert difference(x, x.clone()) == ""
    assert "dtype" in difference(x, x.double())
    assert "shape" in difference(x, x[:1])
    other_layout = x.t().contiguous().t()
    assert difference(x, other_layout) == ""
    assert "strides" in difference(x, other_layout, strides=True)
    assert "requires_grad" in difference(x, x.clone().requires_grad_())
    assert "structure" in difference([x], (x,))
    assert "eager raises" in difference(x, attempt(lambda: x.view(7)))
    assert "raises" in difference(attempt(lambda: x.view(7)), x)
    seven, five, index = (
        attempt(lambda: x.view(7)),
        attempt(lambda: x.view(5)),
        attempt(lambda: x[9]),
    )
    assert difference(seven, five) == difference(seven, five, errors="class") == ""
    assert difference(seven, seven, errors="text") == ""
    assert "eager raises" in difference(seven, five, errors="text")
    assert "eager raises" in difference(seven, index)
    wide = Raised(NotImplementedError("x"))
    assert difference(wide, seven) == ""
    assert "eager raises" in difference(wide, seven, errors="class")
    assert "eager" in difference(1, 1.0)
    assert difference(x, x + 1e-6, rtol=1e-4, atol=1e-5) == "" != difference(x, x + 1e-6)
    nan = x / 0
    assert difference(nan, nan) == "" != difference(nan, nan, equal_nan=False)
    assert difference(float("nan"), float("nan")) == "" and "not equal" in difference(1.0, 1.5)
