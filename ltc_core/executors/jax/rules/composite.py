"""Marks of composites, and names of ops: custom calls in programs that are shown or exported, elsewhere nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

from ltc_core.executors.jax.table import RULES, Array, Call
from ltc_core.graph.composite import MARK, NAME

__all__ = ["BOUNDARY", "OP_NAME", "TARGET", "kept_marks"]

# Target of the custom calls, and their attribute: the text of a `Boundary`, or a name.
TARGET = "ltc.mark"
BOUNDARY = "ltc.boundary"
OP_NAME = "ltc.name"

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


def _rule(attribute: str) -> Callable[..., Array]:
    def mark(c: Call, x: Array, text: str) -> Array:
        return _mark_p.bind(x, attribute=attribute, text=text) if _are_kept.get() else x

    return mark


RULES[MARK] = _rule(BOUNDARY)
RULES[NAME] = _rule(OP_NAME)
_mark_p.def_abstract_eval(lambda x, attribute, text: x)


def _lower(ctx: Any, x: Any, *, attribute: str, text: str) -> Any:
    attributes = {
        "call_target_name": ir.StringAttr.get(TARGET),
        attribute: ir.StringAttr.get(text),
    }
    return ir.Operation.create("stablehlo.custom_call", [x.type], [x], attributes).results


mlir.register_lowering(_mark_p, _lower)
