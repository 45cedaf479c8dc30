"""Graphs in parts, lowered: on random graphs they give what eager gives, to the last bit.

The lowered FX graphs are run as they are, without the compiler: this finds what partition, lowering and
the chain of parts do wrong, in milliseconds a graph.
"""

from typing import Any

import pytest
import torch

from ltc_core.executors.inductor.compiled_subgraph import compiled_program
from ltc_core.executors.inductor.lowering.lower import lower
from ltc_core.executors.inductor.partition import partition
from ltc_core.program.partitioned import PartitionedProgram
from tests.core.random_graphs import RandomGraph, random_graph
from tests.core.stand_ins import Interpreted, ended


def chain_of(
    found: RandomGraph,
    varied: frozenset[int] = frozenset(),
    refused: frozenset[str] = frozenset(),
) -> PartitionedProgram:
    parts = partition(found.graph, found.scalars, varied, refused)
    models: dict[int, Any] = {}
    for k, part in enumerate(parts):
        if part.compiled:
            lowered = lower(part, "cpu")
            models[k] = (Interpreted(lowered.module), lowered.returned)
    return compiled_program(found.graph, parts, models, torch.device("cpu"))


@pytest.mark.parametrize("num_ops", [4, 12, 30])
def test_random_graphs_give_what_eager_gives(num_ops: int) -> None:
    for seed in range(40):
        found = random_graph(seed, num_ops)
        everything = frozenset(range(len(found.scalars)))
        for varied in (frozenset(), everything):
            chain = chain_of(found, varied)
            assert chain.fits(found.scalars)
            got, _ = ended(chain.run_in_steps(found.fresh_inputs(), found.scalars))
            for a, b, value in zip(got, found.expected, found.graph.outputs, strict=True):
                assert torch.equal(a, b), (seed, value)
