"""200 random programs of views and writes give what eager PyTorch gives, some with gradients too.

A program starts from one small tensor; each step makes a view of a tensor or writes one, and now
and then cuts or reads. A failing program is found again by its number.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from tests.core.beside_eager import assert_same
from tests.core.view_kinds import Make

NUM_PROGRAMS = 200
NUM_STEPS = 12


def random_view(t: Tensor, rng: random.Random, differentiable: bool) -> Make | None:
    """Choose a view of a tensor of this shape; None where the choice has none.

    Autograd lets nobody write one of several views that one call returned, so it is given none.
    """
    dims = t.dim()
    kind = rng.choice(
        "select slice step transpose permute unsqueeze squeeze expand diagonal unfold chunk unbind "
        "flatten reshape detach data strided movedim narrow rows".split()
    )
    if differentiable and kind in ("chunk", "unbind"):
        return None
    if dims == 0:
        return (lambda t: t.unsqueeze(0)) if kind == "unsqueeze" else (lambda t: t.detach())
    d, e = rng.randrange(dims), rng.randrange(-dims, dims)
    n = t.shape[d]
    if n == 0:
        return lambda t: t.transpose(d, e)
    i, step = rng.randrange(-n, n), rng.randint(1, 3)
    start, length = (i + n) % n, rng.randint(1, n)
    order = rng.sample(range(dims), dims)
    if kind == "expand":
        return lambda t: t.unsqueeze(d).expand(*t.shape[:d], 2, *t.shape[d:])
    if kind == "diagonal":
        return (lambda t: t.diagonal(step - 2, 0, 1)) if dims > 1 else None
    if kind == "reshape":
        return lambda t: t.reshape(-1) if step == 1 else t.reshape(*t.shape[::-1])
    if kind == "strided":
        # Relative to the memory's own start, and only where the tensor is that memory.
        whole = t._base is None and t.is_contiguous() and t.storage_offset() == 0
        count = (t.numel() - 1) // step + 1
        return (lambda t: t.as_strided((count,), (step,))) if whole and t.numel() else None
    table: dict[str, Make] = {
        "select": lambda t: t.select(d, i),
        "slice": lambda t: t.narrow(d, start, n - start),
        "step": lambda t: t[(slice(None),) * d + (slice(start % 2, None, step),)],
        "transpose": lambda t: t.transpose(d, e),
        "permute": lambda t: t.permute(order),
        "unsqueeze": lambda t: t.unsqueeze(e),
        "squeeze": lambda t: t.squeeze(d),
        "unfold": lambda t: t.unfold(d, length, step),
        "chunk": lambda t: t.chunk(2, d)[-1],
        "unbind": lambda t: t.unbind(d)[start],
        "flatten": lambda t: t.flatten(0, d),
        "detach": lambda t: t.detach(),
        "data": lambda t: t.data,
        "movedim": lambda t: t.movedim(d, e),
        "narrow": lambda t: t.narrow(d, start, min(length, n - start)),
        "rows": lambda t: t[..., start // 2 :],
    }
    return table[kind]


def random_write(rng: random.Random) -> Callable[[int, int, list[Tensor]], Any]:
    """Choose a write to the tensor of one number, which may read that of another."""
    value, low = rng.randint(-3, 3), rng.randint(-5, 5)
    call: Callable[[Tensor, Tensor], Any] = rng.choice(
        [
            lambda t, o: t.add_(value),
            lambda t, o: t.mul_(value),
            lambda t, o: t.fill_(value),
            lambda t, o: t.copy_(torch.arange(t.numel(), device=t.device).view(t.shape)),
            lambda t, o: t.add_(o.sum() % 7),
            lambda t, o: t.sub_(o.max() if o.numel() else 0),
            lambda t, o: t.masked_fill_(t > low, value),
            lambda t, o: t.__setitem__(t == low, value),
            lambda t, o: t.clamp_(low, low + 6),
            lambda t, o: t.__setitem__(..., t.flip(0) if t.dim() else t + 1),
            lambda t, o: t.remainder_(11),
            lambda t, o: t.neg_(),
            lambda t, o: t.copy_(t.clone() * 2),
            lambda t, o: torch.add(t.clone(), value, out=t),
        ]
    )
    return lambda which, other, tensors: call(tensors[which], tensors[other])


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("block", range(10))
def test_random_programs(block: int) -> None:
    for number in range(block * NUM_PROGRAMS // 10, (block + 1) * NUM_PROGRAMS // 10):
        check_random_program(number)


def check_random_program(number: int) -> None:
    """Run one program on both devices, step by step; what eager refuses, the device refuses too.

    Half of those with floats are differentiated at the end.
    """
    rng = random.Random(number)
    shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    dtype = rng.choice([torch.float32, torch.int64])
    start = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(number)).to(dtype)
    leaves = [start.clone(), start.to(ltc.lazy_device())]
    differentiable = dtype.is_floating_point and rng.random() < 0.5
    eager, lazy = ([leaf.requires_grad_(differentiable) * 1] for leaf in leaves)
    for _ in range(NUM_STEPS):
        which, other = rng.randrange(len(eager)), rng.randrange(len(eager))
        if rng.random() < 0.5:
            view = random_view(eager[which], rng, differentiable)
            if view is not None:
                eager.append(view(eager[which]))
                lazy.append(view(lazy[which]))
        else:
            write = functools.partial(random_write(rng), which, other)
            both_or_neither(write, eager, lazy)
        event = rng.random()
        if event < 0.15:
            ltc.mark_step()
        elif event < 0.25:
            assert_same(lazy[which], eager[which])
    for found, wanted in zip(lazy, eager, strict=True):
        assert_same(found, wanted)
    if differentiable:
        both_or_neither(lambda on: sum(t.square().sum() for t in on).backward(), eager, lazy)
        assert_same(leaves[1].grad, leaves[0].grad)


def both_or_neither(
    call: Callable[[list[Tensor]], Any], eager: list[Tensor], lazy: list[Tensor]
) -> None:
    try:
        call(eager)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            call(lazy)
    else:
        call(lazy)
