"""Rules for views against ATen's kernels for `meta`, on operands of any size, order and offset."""

import random
from typing import Any

import pytest
import torch

from ltc_core.graph.ir import TensorMeta
from ltc_core.shapes.view_rules import _RULES, view_of
from tests.seed import rotating_seed

aten = torch.ops.aten


def operand(draw: random.Random, rank: int) -> TensorMeta:
    """A view of some memory: dims in any order, with gaps, some of them expanded, of size 0 or 1."""
    size = [draw.choice((0, 1, 1, 2, 3, 5)) for _ in range(rank)]
    stride, step = [0] * rank, draw.choice((1, 1, 2))
    for dim in draw.sample(range(rank), rank):
        stride[dim] = draw.choice((step, step, step, 0))
        step *= max(size[dim], 1) + draw.choice((0, 0, 2))
    return TensorMeta.of(size, stride, draw.choice((0, 0, 7)), torch.float32)


def arguments(op: Any, x: TensorMeta, draw: random.Random) -> tuple[Any, ...]:
    rank = len(x.size)
    dim = draw.randrange(-rank - 1, rank + 1)
    near = [None, *range(-7, 8), 2**63 - 1]
    if op is aten.slice.Tensor:
        every = (dim, draw.choice(near), draw.choice(near), draw.choice((1, 1, 2, 3, 0)))
        return every[: draw.randrange(5)]
    if op is aten.select.int:
        return dim, draw.randrange(-4, 4)
    if op is aten.unbind.int:
        return draw.choice(((), (dim,)))
    if op is aten.permute.default:
        return ([d - draw.choice((0, rank)) for d in draw.sample(range(rank), rank)],)
    if op is aten.transpose.int:
        return dim, draw.randrange(-rank - 1, rank + 1)
    if op is aten.unsqueeze.default:
        return (dim,)
    if op is aten.expand.default:
        more = [draw.choice((0, 1, 3)) for _ in range(draw.randrange(3))]
        wanted = [draw.choice((n, n, -1, 4)) for n in x.size]
        return ([*more, *wanted],)
    return ()


def by_aten(op: Any, x: TensorMeta, given: tuple[Any, ...]) -> Any:
    try:
        found = op(x.meta_tensor(), *given)
    except (RuntimeError, IndexError):
        return None
    if isinstance(found, torch.Tensor):
        return TensorMeta.like(found)
    return [TensorMeta.like(part) for part in found]


@pytest.mark.parametrize("op", _RULES, ids=str)
def test_a_rule_says_what_aten_does(op: Any) -> None:
    draw = random.Random(rotating_seed())
    num_sure = 0
    for _ in range(400):
        x = operand(draw, draw.randrange(5))
        given = arguments(op, x, draw)
        found = view_of(op, (x, *given), {})
        wanted = by_aten(op, x, given)
        if found is not None:
            num_sure += 1
            assert wanted == found, f"{x.size} {x.stride} {x.offset} {given}"
    assert num_sure > 40


def test_no_rule_for_other_calls() -> None:
    x = TensorMeta.packed((2, 3), torch.float32)
    assert view_of(aten.view.default, (x, (3, 2)), {}) is None
    assert view_of(aten.select.int, (x,), {"dim": 0, "index": 1}) is None
    assert view_of(aten.select.int, (x, 0, 9), {}) is None
