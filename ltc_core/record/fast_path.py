"""The fast path of recording: C++ records a call that repeats a known step.

`csrc/ltc_record.cpp` registers a kernel for each op at the dispatcher's key for Python. The kernel records a call that
repeats the next step of its trace, or runs it where ops run at once. Every other call goes on to
`LazyTensor.__torch_dispatch__`; `recorder` and `view_recorder` define what recording is (docs/recording.md). All calls
go there without a C++ compiler, and while the C++ part is being built, which takes place during the first program of a
machine; with LTC_EAGER, those that do not run at once. `ops.dispatch` adds the ops; `setup` and
`runtime.device_context` install the C++ part once it is loaded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ltc_core import source, uninterrupted
from ltc_core.graph.ir import Node, Ref, Scalar, TensorMeta
from ltc_core.graph.lens import NOT_OF_ELEMENTS, RESHAPING
from ltc_core.graph.op_schema import OpSchema
from ltc_core.native_extension import Extension
from ltc_core.record import modules, random_state
from ltc_core.record.at_once import find_lens, find_part
from ltc_core.record.dynamic_shapes import ANY, AnyMeta, Dynamic, Entry
from ltc_core.record.dynamic_steps import OFTEN
from ltc_core.record.trace import Step, Trace, epochs
from ltc_core.settings import settings
from ltc_core.tensor import native_objects
from ltc_core.tensor.buffer import Buffer, MemoryCounter
from ltc_core.tensor.handles import Cell, Value, View
from ltc_core.tensor.lazy_tensor import LazyTensor, make_empty, wrap_in_cpp

__all__ = [
    "extension",
    "add_attention",
    "add_composite",
    "add_op",
    "enable",
    "copied",
    "install",
    "known_cut",
    "known_reads",
    "known_uploads",
    "note_elements",
    "num_calls",
    "num_fast_calls",
    "record_again",
    "run_at_once",
    "traces",
]

extension = Extension("_ltc_record", Path(__file__).parent / "csrc" / "ltc_record.cpp", "-O2")

_native: Any = None
_lock = threading.RLock()  # a signal handler may use an op while this thread adds one
# The ops that C++ records, by name and overload. Ops added before the C++ part is loaded wait here.
_ops: dict[tuple[str, str], tuple[Any, ...]] = {}
_composites: dict[tuple[str, str], bool] = {}
traces: dict[int, Trace] = {}  # index of a device -> its trace, for factories
_takes_attention = False
_DEVICE = vars(settings), "device"  # the setting that decides how attention runs
_is_on: bool | None = None  # None: LTC_EAGER decides, which cuts after each op
_records = True


def after_fork_in_child() -> None:
    """Renew the lock, and undo what a call had begun, in threads that the child does not have."""
    global _lock
    _lock = threading.RLock()
    if _native is not None:
        _native.after_fork()


def install() -> bool:
    """Install the C++ part if it is loaded. Returns whether it is installed. Cost: nothing until it is loaded."""
    global _native
    native = extension.loaded
    if _native is not None or native is None:
        return _native is not None
    types = (
        LazyTensor, Trace, Step, Node, Cell, View, Value, Buffer, TensorMeta, Dynamic, Entry, Ref, Scalar, AnyMeta,
    )  # fmt: skip
    aten = torch.ops.aten
    detach, empty = aten.detach.default, aten.empty_strided.default
    with _lock:
        if _native is None:
            dispatch = LazyTensor.__torch_dispatch__
            native.share_pauses(uninterrupted.calls, uninterrupted.paused)
            if native_objects.native is not None:
                objects = native_objects.native
                native.use_objects(objects.Lock, objects.functions)
            native.setup(
                detach,
                dispatch,
                make_empty,
                empty,
                random_state.stream,
                epochs,
                *types,
                OFTEN,
                ANY,
                source.known_places(),
                modules,
            )
            native.use_traces(traces)
            native.use_view_ops(NOT_OF_ELEMENTS, RESHAPING, aten.as_strided.default)
            wrap_in_cpp(native.wrap)
            LazyTensor.__torch_dispatch__ = native.dispatch  # type: ignore[method-assign]
            # Python never learns of `detach`: `dispatch` handles it. So C++ is told of it here.
            add_op(detach, OpSchema.of(detach), shares=True)
            for names, op in _ops.items():
                native.add(*names, *op)
            for names, keeps_views in _composites.items():
                native.add_composite(*names, keeps_views)
            native.add_kernels()
            if _takes_attention:
                native.add_attention(*_DEVICE)
            # Not `_is_wanted`: the first op reads LTC_EAGER.
            native.enable(_is_on is not False, _records)
            _native = native
    return True


def add_op(
    op: torch._ops.OpOverload,
    schema: OpSchema,
    shares: bool = False,
    is_factory: bool = False,
    needs_values: bool = False,
) -> None:
    """Record calls of an op in C++.

    Args:
        shares: its result holds the handle of its first operand.
        needs_values: it is never recorded: C++ runs it where ops run at once, else it is Python's.
        is_factory: it has no operand; its kernel in Python is that of the device, not that of `LazyTensor`.
    """
    kind = "share" if shares else "view" if schema.view else "recorded"
    kind = "factory" if is_factory else "never" if needs_values else kind
    writes = tuple(name in schema.writes for name in schema.names)
    names = op._schema.name, op._schema.overload_name
    with _lock:
        if names in _ops:  # its handler was chosen anew
            return
        _ops[names] = kind, schema.draws, schema.args, writes, schema
        if _native is not None:
            _native.add(*names, *_ops[names])


def add_composite(op: torch._ops.OpOverload, keeps_views: bool) -> None:
    """Have C++ take an op apart in inference mode, where it comes here whole.

    Args:
        keeps_views: the op has a kernel of its own where autograd notes views.
    """
    names = op._schema.name, op._schema.overload_name
    with _lock:
        if names in _composites:
            return
        _composites[names] = keeps_views
        if _native is not None:
            _native.add_composite(*names, keeps_views)


def add_attention() -> None:
    """Have C++ record `scaled_dot_product_attention` of plain operands as the one op that a CPU has for it."""
    global _takes_attention
    with _lock:
        if not _takes_attention and _native is not None:
            _native.add_attention(*_DEVICE)
        _takes_attention = True


def enable(on: bool, records: bool = True) -> bool:
    """Handle calls in C++, or leave all of them to Python. Returns whether C++ handled them.

    Args:
        records: whether it records them; else those that do not run at once are left to Python.
    """
    global _is_on, _records
    with _lock:
        was_on, _is_on, _records = _is_wanted(), on, records
        if _native is not None:
            _native.enable(on, records)
    return was_on


def _is_wanted() -> bool:
    return not settings.eager if _is_on is None else _is_on


def num_fast_calls() -> int:
    """Number of calls that C++ has recorded so far; 0 without the C++ part."""
    return 0 if _native is None else int(_native.count())


def num_calls() -> tuple[int, int]:
    """Number of calls of ops that C++ may record, so far, and how many of those Python has recorded."""
    return (0, 0) if _native is None else _native.calls()


def copied(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor | None:
    """A copy of a small plain tensor of the CPU that has this dtype and these strides; None for other tensors.

    Cost: 0.5 us.
    """
    if _native is None:
        return None
    found: torch.Tensor | None = _native.copied(tensor, meta)
    return found


def known_cut(
    alive: tuple[int, ...],
    donated: tuple[bool, ...],
    slots: tuple[int, ...],
    outputs: tuple[tuple[int, int], ...],
    peak_bytes: int,
    takes_any_size: bool,
) -> Any | None:
    """A cut that C++ can make again, by `make(step, trace, memory, program)`; None without the C++ part.

    Args:
        alive: numbers of the values that are alive.
        donated: for each input, whether only the trace holds it.
        slots: positions of the inputs that the program reads.
        outputs: bytes of each, and the position among the program's inputs of the memory that it takes (-1: none).
        peak_bytes: of the program, beside the buffers.
        takes_any_size: whether its values may have other sizes than in the graph; `note_sizes` says which ones.
    """
    if _native is None or native_objects.native is None:
        return None
    nbytes, taken = zip(*outputs, strict=True) if outputs else ((), ())
    return _native.known_cut(alive, donated, slots, nbytes, taken, peak_bytes, takes_any_size)


def note_elements(view: View) -> None:
    """The elements of a view lie where its meta says, in memory that is laid out as its cell's meta says."""
    if _native is not None and native_objects.native is not None:
        _native.note_elements(view)


def run_at_once(
    trace: Trace,
    memory: MemoryCounter,
    settle: Callable[[], object],
    look: Callable[[], object],
) -> Any | None:
    """Have the ops of a trace run where they are called, by C++ and as far as it can; None without the C++ part.

    Args:
        memory: counts the bytes of the device's buffers.
        settle: cuts what is recorded, and waits for it.
        look: called once after each `next_look` ops.

    Returns:
        `num_ops` that ran so, and two that may be set: `next_look`, and `form`, a hash of the ops and of the sizes of
        their operands.
    """
    if _native is None or native_objects.native is None:
        return None
    state = _native.at_once(memory, settle, look, TensorMeta.of, find_lens, find_part)
    with trace.lock:
        _native.run_at_once(trace, state)
    return state


def record_again(trace: Trace) -> None:
    """Have the ops of a trace recorded: the opposite of `run_at_once`."""
    with trace.lock:
        _native.run_at_once(trace, None)


def known_reads(
    memory: MemoryCounter,
    failures: deque[Any],
    checks: deque[Any],
    facts: Iterable[tuple[dict[str, Any], str]],
    probe: type,
) -> Any | None:
    """Reads of numbers that C++ may make, for `Trace.reads`; None without the C++ part.

    Args:
        memory: counts the bytes of the device's buffers.
        failures: errors that a read may have to raise; while there is one, Python reads.
        checks: bools that are to be true; Python reads once one is computed and is not.
        facts: dict and key of each variable that has to stay as it is.
        probe: the class of what `Step.probes` holds.
    """
    if _native is None or native_objects.native is None:
        return None
    return _native.known_reads(memory, failures, checks, tuple(facts), probe)


def known_uploads(
    memory: MemoryCounter,
    watched: tuple[dict[str, Any], str],
    trains: tuple[dict[str, Any], str],
    marks: Iterable[tuple[dict[str, Any], str]],
) -> Any | None:
    """Uploads that C++ may make, for `Trace.uploads`; None without the C++ part.

    Args:
        memory: counts the bytes of the device's buffers.
        watched: dict and key of what is not None while somebody looks at each upload; then Python makes them.
        trains: of what is not None if the script trains a model.
        marks: of what is true, one of them, if the script marks its steps.
    """
    if _native is None or native_objects.native is None:
        return None
    return _native.known_uploads(memory, watched, trains, tuple(marks))
