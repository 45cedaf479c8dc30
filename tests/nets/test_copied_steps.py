"""Random programs, recorded by Python and with copies of steps in C++: the same steps (`record/csrc/copied_step.h`)."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.record import fast_path
from ltc_core.record.trace import Cut, Trace
from ltc_core.runtime.devices import context
from ltc_core.runtime.probe import Probes
from ltc_core.settings import settings
from tests.nets.random_programs import generate, outcome
from tests.seed import rotating_seed

COUNT = 60

pytestmark = pytest.mark.skipif(
    fast_path.extension.load() is None, reason="there is no C++ compiler to build it with"
)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What stands in the steps of each cut. What is cut does not depend on the reads before."""
    found: list[Any] = []
    cut = Trace.cut

    def noting(trace: Trace) -> Cut:
        path = trace.path(trace.cursor)
        found.append([_of(step) for step in path] + [type(number) for number in trace.scalars])
        return cut(trace)

    monkeypatch.setattr(Trace, "cut", noting)
    monkeypatch.setattr(Probes, "data", lambda *_: None)
    assert fast_path.install()
    before = fast_path.enable(True)
    copies = fast_path._native.copy_steps(True)
    with settings.override(steps="marked"):
        yield found
    fast_path._native.copy_steps(copies)
    fast_path.enable(before)


def _of(step: Any) -> tuple[Any, ...]:
    node = step.node
    # Not `next_key`: which of the known steps is tried first is no part of a step.
    key = next((key for key, child in step.parent.all_children() if child is step), None)
    return (
        key, step.inputs, step.end, step.num_scalars, str(node.op), repr(node.args), repr(node.kwargs),
        node.first, node.outs, node.writes, node.result, node.uses_default_dtype,
    )  # fmt: skip


# Hooks of tensors that are there keep some programs' values alive, as in eager: they count as this cache's.
_program = functools.cache(generate)


def _recorded(lines: list[str], cuts: list[Any], with_copies: bool) -> list[Any]:
    device = context(0)
    device.wait()
    device.trace.forget()
    device.compiler.forget()
    fast_path._native.copy_steps(with_copies)
    cuts.clear()
    outcome(lines, [torch.device("ltc", 0)] * 2)
    ltc.mark_step()
    return list(cuts)


def test_copied_steps_are_those_that_python_makes(cuts: list[Any]) -> None:
    first = rotating_seed() * COUNT
    num_copied = 0
    for number in range(first, first + COUNT):
        wanted = _recorded(_program(number), cuts, with_copies=False)
        before = fast_path.num_fast_calls()
        got = _recorded(_program(number), cuts, with_copies=True)
        num_copied += fast_path.num_fast_calls() - before
        assert got == wanted, f"program {number}"
    assert num_copied > COUNT


# The view of the second operand is a known step, that of the first is none.
TWO_VIEWS = """
t0 = make([4, 3], torch.float32, 681).to(d[1])
t1 = make([1], torch.int64, 556).to(d[1])
t2 = t0.copysign(t1)
t2.copy_(t2.clone() * 2) if bool((t1 > 0).any()) else t1.square_()
t3 = F.one_hot(safe(t1).to(torch.int64).abs() % 5, 5)
t4 = t2.diagonal()
t4[t4 != t4] = 0
t6 = torch.where(t3 > 0)[0]
cut()
t7 = torch.dist(t4, t6)
""".strip().splitlines()


def test_views_are_recorded_in_the_order_of_the_operands(cuts: list[Any]) -> None:
    wanted = _recorded(TWO_VIEWS, cuts, with_copies=False)
    assert _recorded(TWO_VIEWS, cuts, with_copies=True) == wanted
    assert [step[4] for step in wanted[-1][:2]] == ["aten.diagonal.default", "aten.unbind.int"]
