"""`while_loop` and `fori_loop` of pure functions as one op: the script does not wait for a condition.

The functions are traced once a call, into the bodies of a loop (`graph.loop`). No gradient flows through a loop whose
number of iterations is not known when backward is recorded: with gradients, `fori_loop` is a `scan`.
Called by `loops` where the executor has loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ltc_core.api.loop_bodies import BodyTracer, NoLoop, Structure
from ltc_core.api.pure_scan import pure_scan
from ltc_core.graph.loop import WHILE
from ltc_core.settings import settings

__all__ = ["pure_fori", "pure_while"]

Tensor = torch.Tensor


class _NeedsGradient(NoLoop):
    """A gradient is to flow through the loop."""


def pure_while(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: tuple[Any, ...],
    rest: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return the last values of `carried`.

    Args:
        cond_fn: returns a tensor of one element.
        body_fn: returns the next values, a tuple.
        carried: structures of tensors.
        rest: more arguments of both functions, the same in each iteration.

    Raises:
        NoLoop: a function draws random numbers, writes to what it is given, looks at values or uses indices; `body_fn`
            returns values of other sizes; or a gradient is to flow through the loop.

    Cost: traces both functions, tenths of a second; then one op is recorded.
    """
    if torch.is_autocast_enabled(settings.device_name):
        raise NoLoop("autocast is on")
    state, others = Structure(carried), Structure(rest)
    tracer = BodyTracer()
    with_grad = torch.is_grad_enabled()
    inputs = [
        tracer.fake(t, with_grad and t.requires_grad) for t in (*state.tensors, *others.tensors)
    ]

    def calls(fn: Callable[..., Any], own: Sequence[Tensor]) -> Structure:
        count = len(state.tensors)
        return Structure(fn(*state.filled(own[:count]), *others.filled(own[count:])))

    def body(*own: Tensor) -> Structure:
        found = calls(body_fn, own)
        for before, after in zip(state.tensors, found.tensors, strict=True):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise NoLoop("it returns values of other sizes or dtypes")
            if after.requires_grad:
                raise _NeedsGradient("a gradient flows through it")
        return found

    def condition(*own: Tensor) -> Structure:
        found = calls(cond_fn, own)
        if [t.numel() for t in found.tensors] != [1]:
            raise NoLoop("its condition is no tensor of one element")
        return found

    for fn in (condition, body):
        tracer.find(partial(fn, *inputs))
    count = len(inputs)

    def flat(fn: Callable[..., Structure]) -> str:
        def run(*own: Tensor) -> list[Tensor]:
            found: Structure = tracer.call(partial(fn, *own[:count]), own[count:])
            return found.tensors

        return tracer.body(run, [*inputs, *tracer.stand_ins])

    names = flat(condition), flat(body)
    found: list[Tensor] = WHILE(state.tensors, [*others.tensors, *tracer.besides], *names)
    last: tuple[Any, ...] = state.filled(found)
    return last


def pure_fori(
    left: Tensor, body_fn: Callable[..., Any], values: tuple[Any, ...], known_by: Any
) -> tuple[Any, ...]:
    """Call `values = body_fn(*values)` as often as `left` says; return what is left of it, then the last values.

    Args:
        body_fn: as in `pure_while`.
        known_by: as in `pure_scan`.

    Raises:
        NoLoop: as `pure_while` does, but for gradients.

    Cost: as `pure_while`; with gradients it waits for `left`.
    """

    def count_down(left: Tensor, *values: Any) -> tuple[Any, ...]:
        return (left - 1, *body_fn(*values))

    try:
        return pure_while(lambda left, *values: left > 0, count_down, (left, *values), ())
    except _NeedsGradient:
        count = int(left)
    if count < 1:
        return (left, *values)
    last, _ = pure_scan(lambda own, _: (body_fn(*own), None), values, (), count, None, known_by)
    return (left - count, *last)
