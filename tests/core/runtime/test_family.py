"""Programs of one structure are measured together, whatever their sizes."""

import torch

from ltc_core.runtime.devices import context
from ltc_core.runtime.family import Families
from ltc_core.settings import settings


def graph_of_a_step(rows: int, scale: float = 2.0, more: bool = False):  # type: ignore[no-untyped-def]
    """Graph of a small step with so many rows."""
    x = torch.ones(rows, 3).to("ltc")
    y = (x * scale).exp() + x
    if more:
        y = y.tanh()
    assert float(y.sum()) > 0
    newest = context(0).compiler.newest
    assert newest is not None
    return newest.graph


def test_sizes_and_numbers_make_no_difference() -> None:
    with settings.override(dynamic_shapes="never"):
        first, other, scaled = (
            graph_of_a_step(17),
            graph_of_a_step(19),
            graph_of_a_step(17, scale=3.0),
        )
        assert first is not other
        families = Families()
        assert families.of(first) is families.of(other) is families.of(scaled)


def test_what_is_twice_as_large_is_measured_by_itself() -> None:
    with settings.override(dynamic_shapes="never"):
        families = Families()
        small, large = families.of(graph_of_a_step(20)), families.of(graph_of_a_step(20_000))
        assert small is not large


def test_other_ops_are_measured_by_themselves() -> None:
    with settings.override(dynamic_shapes="never"):
        families = Families()
        plain, longer = (
            families.of(graph_of_a_step(21)),
            families.of(graph_of_a_step(21, more=True)),
        )
        assert plain is not longer


def test_a_family_is_forgotten_with_its_last_program() -> None:
    families = Families()
    with settings.override(dynamic_shapes="never"):
        family = families.of(graph_of_a_step(22))
        family.choice.rest()
        del family
        assert not families.of(graph_of_a_step(22)).choice.is_known


def test_a_graph_of_many_sizes_is_measured_with_those_of_one() -> None:
    families = Families()
    with settings.override(dynamic_shapes="never"):
        one = families.of(graph_of_a_step(24, more=True))
    graphs = [graph_of_a_step(rows, more=True) for rows in range(24, 31)]
    assert graphs[-1].dynamic and families.of(graphs[-1]) is one
