"""`torch_xla.experimental.fori_loop`: loops, over `ltc_core.api.loops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltc_core.api.loops import fori_loop, while_loop

__all__ = ["_xla_while_loop_wrapper", "fori_loop", "while_loop"]


def _xla_while_loop_wrapper(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] | None = None,
    fake_tensor: bool = False,
) -> Any:
    """The same as `while_loop`. `fake_tensor` is accepted: nothing is traced."""
    return while_loop(cond_fn, body_fn, carried_inputs, additional_inputs)
