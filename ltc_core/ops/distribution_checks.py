"""The checks of `torch.distributions`: whether parameters and samples are legal is known later, and nothing waits.

A distribution asks `torch._is_all_true(valid)`, and raises if the answer is no. The answer here is yes, at once; the
error comes at the next read or `mark_step` (`runtime.later_checks`). LTC_DISTRIBUTION_CHECKS=now waits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributions import Distribution

from ltc_core import errors, source
from ltc_core.runtime.devices import context_of
from ltc_core.settings import settings
from ltc_core.tensor.handles import Cell
from ltc_core.thread_state import in_own_state

__all__ = ["is_all_true"]

_CHECKS_PARAMETERS = Distribution.__init__.__code__
_CHECKS_SAMPLE = Distribution._validate_sample.__code__
_FRAMES = 8  # at most between the check and this file


def is_all_true(args: Any, kwargs: Any) -> torch.Tensor:
    """`aten::_is_all_true`, whose result is a CPU tensor where a distribution asks."""
    found: torch.Tensor = args[0].all()  # as ATen has it; C++ records it
    is_now = settings.distribution_checks == "now" or args[0]._h.trace.at_once is not None
    frame = None if is_now else _frame_of_check()
    if frame is None:
        return found
    handle = found._h  # type: ignore[attr-defined]
    assert type(handle) is Cell
    context_of(handle).check_later(handle, _error(frame))
    return _true()


@functools.cache
@in_own_state
def _true() -> torch.Tensor:
    """The answer; a distribution only asks what it is."""
    return torch.ones((), dtype=torch.bool)


def _frame_of_check() -> FrameType | None:
    """The frame of `Distribution` that asks."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code in (_CHECKS_PARAMETERS, _CHECKS_SAMPLE):
            return frame
        frame = frame.f_back
    return None


def _error(frame: FrameType) -> Callable[[], errors.LtcError]:
    """What makes the error of a check that fails. It holds none of the values, which need not be alive then."""
    seen = frame.f_locals
    kind, size = type(seen["self"]).__name__, tuple(seen["value"].shape)
    if frame.f_code is _CHECKS_PARAMETERS:
        return functools.partial(
            _of_parameter, kind, size, seen["param"], seen["constraint"], source.user_line()
        )
    return functools.partial(_of_sample, kind, size, seen["support"], source.user_line())


def _of_parameter(
    kind: str, size: tuple[int, ...], name: str, constraint: Any, where: str
) -> errors.LtcError:
    what = (
        f"Expected parameter {name} of distribution {kind} to satisfy the constraint {constraint!r}"
    )
    return _illegal(what, size, where)


def _of_sample(kind: str, size: tuple[int, ...], support: Any, where: str) -> errors.LtcError:
    what = (
        f"Expected value argument to be within the support ({support!r}) of the distribution {kind}"
    )
    return _illegal(what, size, where)


def _illegal(what: str, size: tuple[int, ...], where: str) -> errors.LtcError:
    return errors.op_error(
        ValueError(f"{what}, but found invalid values"),
        what="",
        got=f"a tensor of shape {size}; the check waited for nothing, so the error comes late",
        where=where,
        next="LTC_DISTRIBUTION_CHECKS=now checks at once, and shows the values",
    )
