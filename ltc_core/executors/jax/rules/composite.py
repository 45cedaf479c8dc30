"""Marks of composites: custom calls in programs that are shown or exported, elsewhere nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

from ltc_core.executors.jax.table import RULES, Array, Call
from ltc_core.graph.composite import MARK

__all__ = ["BOUNDARY", "TARGET", "kept_marks"]

# Target of the custom calls, and their attribute with the text of a `Boundary`.
TARGET = "ltc.mark"
BOUNDARY = "ltc.boundary"

_are_kept: ContextVar[bool] = ContextVar("are_kept", default=False)
_mark_p = Primitive("ltc_mark")


@contextlib.contextmanager
def kept_marks() -> Iterator[None]:
    """Leave a custom call for each mark that is traced within."""
    token = _are_kept.set(True)
    try:
        yield
    finally:
        _are_kept.reset(token)


def mark(c: Call, x: Array, boundary: str) -> Array:
    return _mark_p.bind(x, boundary=boundary) if _are_kept.get() else x


RULES[MARK] = mark
_mark_p.def_abstract_eval(lambda x, boundary: x)


def _lower(ctx: Any, x: Any, *, boundary: str) -> Any:
    attributes = {
        "call_target_name": ir.StringAttr.get(TARGET),
        BOUNDARY: ir.StringAttr.get(boundary),
    }
    return ir.Operation.create("stablehlo.custom_call", [x.type], [x], attributes).results


mlir.register_lowering(_mark_p, _lower)
