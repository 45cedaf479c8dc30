"""Draws from the CPU's generator, in the order of the program (LTC_RANDOM=cpu_stream).

Each device has a random stream of its own. A script that draws on the CPU and on the device has one stream in eager
PyTorch on the CPU, and other numbers than here. With this setting a call without a generator draws at once, in the
calling thread, and its numbers are uploaded. `dispatch` and `factories` choose it; see also `random_state.CpuStream`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ltc_core.graph.op_schema import OpSchema
from ltc_core.ops.fallback import run_real
from ltc_core.ops.special import SPECIAL
from ltc_core.record.signature import find_trace
from ltc_core.record.trace import Trace
from ltc_core.runtime.devices import upload
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_core.thread_state import in_own_state

__all__ = ["are_chosen", "draw_at_once", "drawn"]

Handler = Callable[[Any, Any], Any]

aten = torch.ops.aten

# Ops that overwrite their first operand whatever its values are. Others run on real values.
_OVERWRITE = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.cauchy_.default,
}


def are_chosen() -> bool:
    return settings.random == "cpu_stream"


def draw_at_once(schema: OpSchema, record: Handler) -> Handler:
    """The handler of an op that draws; `record` handles a call with a generator."""

    def handle(args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        if schema.given("generator", args, kwargs) is not None:
            return record(args, kwargs)
        x = args[0]
        numbers = None
        if schema.op in _OVERWRITE and type(x) is LazyTensor:
            with contextlib.suppress(RuntimeError):  # a wrong call draws nothing, and raises below
                numbers = _draw_like(schema, *args, **kwargs)
        if numbers is None:
            return run_real(schema, args, kwargs, find_trace(args, kwargs))
        SPECIAL[aten.copy_.default]((x, upload(numbers, x._h.trace.device.index)), None)
        return x

    return handle


def drawn(schema: OpSchema, trace: Trace, args: Any, kwargs: dict[str, Any]) -> LazyTensor:
    """The result of a factory that draws."""
    return upload(_draw(schema, args, kwargs), trace.device.index)


@in_own_state
def _draw_like(schema: OpSchema, x: LazyTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    meta = x._h.meta
    memory = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype)
    return schema.op(memory, *args, **kwargs)  # type: ignore[no-any-return]


@in_own_state
def _draw(schema: OpSchema, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    kept = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")}
    return schema.op(*args, **kept, device="cpu")  # type: ignore[no-any-return]
