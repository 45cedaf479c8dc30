"""Whether views overlap, beside the positions of their elements."""

import random

import torch

from ltc_core.executors.inductor.lowering.overlap_repair import may_overlap

SHAPES = ((3, 4), (4, 3), (2, 6), (12,), (2, 2, 3))


def test_views_that_overlap_are_seen() -> None:
    draw = random.Random(0)
    num_apart = 0
    for _ in range(4000):
        memory = torch.arange(12).view(draw.choice(SHAPES))
        a, b = _view(memory, draw), _view(memory, draw)
        overlap = bool(torch.isin(a.reshape(-1), b.reshape(-1)).any())
        assert may_overlap(a, b) or not overlap, (a, b)
        num_apart += not may_overlap(a, b)
    assert num_apart > 50


def test_columns_rows_and_heads_are_apart() -> None:
    x = torch.empty(2, 8, 6)
    q, k, _ = x.chunk(3, dim=-1)
    assert not may_overlap(q, k) and not may_overlap(q.transpose(0, 1), k)
    assert not may_overlap(x[0], x[1]) and not may_overlap(x[:, :4], x[:, 4:])
    assert not may_overlap(x[:0], x)
    assert may_overlap(q, x) and may_overlap(x[..., ::2], x[..., ::3])
    assert may_overlap(x[1:, 1:], x) and may_overlap(x, x[1:, 1:])


def _view(t: torch.Tensor, draw: random.Random) -> torch.Tensor:
    for _ in range(draw.randint(0, 3)):
        views = [
            t.transpose(0, -1), t[: draw.randint(1, 3)], t[draw.randint(0, 1) :], t[..., draw.randint(0, 2) :],
            t[..., ::2], t.expand(2, *t.shape), t[None],
        ]  # fmt: skip
        t = draw.choice([v for v in views if v.numel()])
    return t
