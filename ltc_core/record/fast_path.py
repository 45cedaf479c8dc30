"""Recording without Python what was recorded before: the fast way into `recorder` and `view_recorder`.

`csrc/ltc_record.cpp` stands in front of what PyTorch's dispatcher does for a tensor subclass, op by op. A call that
repeats the next step of its trace is made there; every other one goes on to `LazyTensor.__torch_dispatch__`, and
Python alone says what recording is. Without a C++ compiler, or with LTC_EAGER, all calls go there; so they do while the
C++ part is built, beside the first program of a machine. `ops.dispatch` names the ops, `runtime.device_context`
says when the part may take its place.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.op_schema import OpSchema
from ltc_core.native_extension import Extension
from ltc_core.record import random_state
from ltc_core.record.trace import Step, Trace
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell, Value, View
from ltc_core.tensor.lazy_tensor import LazyTensor, make_empty

__all__ = ["extension", "add_op", "install", "num_fast_calls", "enable"]

extension = Extension("_ltc_record", Path(__file__).parent / "csrc" / "ltc_record.cpp", "-O2")

_native: Any = None
_lock = threading.Lock()
# The ops to follow, by name and overload; those named before the C++ part is there wait for it.
_ops: dict[tuple[str, str], tuple[Any, ...]] = {}
_is_on: bool | None = None  # not decided: by LTC_EAGER, where each op is cut where it is called


def after_fork_in_child() -> None:
    """Make the lock anew: its owner may be a thread that is gone."""
    global _lock
    _lock = threading.Lock()


def install() -> bool:
    """Put the C++ part in its place once it was loaded; give whether it is there. Cost: nothing until then."""
    global _native
    native = extension.loaded
    if _native is not None or native is None:
        return _native is not None
    types = (LazyTensor, Trace, Step, Cell, View, Value, Buffer, TensorMeta)
    aten = torch.ops.aten
    detach, empty = aten.detach.default, aten.empty_strided.default
    with _lock:
        if _native is None:
            dispatch = LazyTensor.__torch_dispatch__
            native.setup(detach, dispatch, make_empty, empty, random_state.stream, *types)
            LazyTensor.__torch_dispatch__ = native.dispatch  # type: ignore[method-assign]
            for names, op in _ops.items():
                native.add(*names, *op)
            native.enable(_is_on is not False)  # LTC_EAGER is read with the first op
            _native = native
    return True


def add_op(op: torch._ops.OpOverload, schema: OpSchema, shares: bool = False) -> None:
    """Let calls of an op be followed; `shares` says that its result is its first operand."""
    kind = "share" if shares else "view" if schema.view else "recorded"
    writes = tuple(name in schema.writes for name in schema.names)
    names = op._schema.name, op._schema.overload_name
    with _lock:
        if names in _ops:  # its handler was chosen anew
            return
        _ops[names] = kind, schema.draws, schema.args, writes
        if _native is not None:
            _native.add(*names, *_ops[names])


def enable(on: bool) -> bool:
    """Follow calls, or leave all of them to Python; gives whether they were followed before."""
    global _is_on
    with _lock:
        was_on, _is_on = _is_wanted(), on
        if _native is not None:
            _native.enable(on)
    return was_on


def _is_wanted() -> bool:
    return not settings.eager if _is_on is None else _is_on


def num_fast_calls() -> int:
    """Count the calls that were followed so far; 0 without the C++ part."""
    return 0 if _native is None else int(_native.count())
