"""The devices of this process: contexts, transfers to and from the CPU, exit and fork.

`context(i)` gives a device's context, made on first use. `real`, `fetch` and `upload` move values. At exit pending
work is finished, or dropped with a message; a forked child starts with idle devices. Called by the verbs and the
handlers; calls `device_context`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core import errors, metrics, source
from ltc_core.device import register
from ltc_core.graph.ir import TensorMeta, contiguous_stride
from ltc_core.graph.lens import apply_lens, shares_memory
from ltc_core.graph.passes import count_ops
from ltc_core.record import fast_path
from ltc_core.report import recording
from ltc_core.runtime import fork_gate
from ltc_core.runtime.device_context import DeviceContext
from ltc_core.runtime.launcher import forget_jobs
from ltc_core.settings import rank_in_job, settings
from ltc_core.tensor.handles import Cell, Handle, View, base_of
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap
from ltc_core.thread_state import in_own_state, num_function_modes
from ltc_core.timeline import slices

__all__ = [
    "DeviceContext",
    "at_first_use",
    "become_idle",
    "checked",
    "context",
    "context_of",
    "contexts",
    "fetch",
    "real",
    "upload",
    "upload_all",
    "used",
]

# -- the devices of this process -------------------------------------------------------------------

_contexts: dict[int, DeviceContext] = {}
_forking = threading.local()  # contexts whose locks the forking thread holds
_contexts_lock = threading.Lock()
_at_first_use: list[Callable[[], None]] = []
# Seconds for which a fork waits for devices that other threads use: in all, and for one lock.
_FORK_PATIENCE_S = 60.0
_LOCK_WAIT_S = 0.1
_STANDSTILL_S = 2.0  # cuts of other threads wait for a second at most (`fork_gate`)
metrics.register_gauge(
    "PeakMemory", lambda: max((c.memory.peak_bytes for c in contexts()), default=0)
)


def _count_late() -> None:
    for ctx in contexts():
        ctx.known_reads.count()
        ctx.known_uploads.count()
        ctx.at_once.count()


metrics.register_late_counts(_count_late)


def checked(index: int) -> int:
    """Return `index` if there is such a device."""
    count = register.device_count()
    if not 0 <= index < count:
        name = settings.device_name
        raise errors.DeviceIndexError(
            f"there is no device {name}:{index}",
            got=f"index {index}, this process has {count}: "
            + errors.listed(f"{name}:{i}" for i in range(count)),
            where=source.user_line(),
            next=_where_devices_are(count),
        )
    return index


def _where_devices_are(count: int) -> str:
    _, num_processes = rank_in_job()
    if num_processes > 1 and count == 1:
        return (
            f"each process of this job has a device of its own, torch.device({settings.device_name!r}); a script that "
            f"takes the device of its rank out of all wants LTC_NUM_DEVICES={num_processes}"
        )
    return "set LTC_NUM_DEVICES before the first import, or use a smaller index"


def context(index: int) -> DeviceContext:
    """Return the context of device `index`, made on first use."""
    found = _contexts.get(index)
    if found is None:
        with _contexts_lock:
            found = _contexts.get(index)
            if found is None:
                settings.check_environment()
                slices.start_as_set()
                recording.start_as_set()
                for call in _at_first_use:
                    call()
                found = _contexts[index] = DeviceContext(index)
    return found


def used(index: int) -> DeviceContext | None:
    """The context of device `index`; None if it was not used yet."""
    return _contexts.get(index)


def at_first_use(call: Callable[[], None]) -> None:
    """Register a function that is called before a device is made."""
    _at_first_use.append(call)


def contexts() -> list[DeviceContext]:
    """List the devices used so far."""
    return [_contexts[i] for i in sorted(_contexts)]


def count_pending_ops() -> dict[str, int]:
    """Count the ops that are recorded and not cut, on all devices, by ATen name. Cost: a walk over them."""
    nodes = []
    for ctx in contexts():
        with ctx.trace.lock:
            nodes += [
                step.node for step in ctx.trace.path(ctx.trace.cursor) if step.node is not None
            ]
    return count_ops(nodes)


def context_of(handle: Handle) -> DeviceContext:
    index = handle.trace.device.index
    return _contexts[index]


# -- between the device and the CPU ----------------------------------------------------------------


def real(handle: Handle, reason: str) -> torch.Tensor:
    """Return a handle's values as a CPU tensor that may share memory with the device: not to be written.

    Cost: syncs if they are pending.
    """
    ctx = context_of(handle)
    data = ctx.value_data(base_of(handle), reason, may_probe=True)
    # A mode of the user sees that a tensor is asked what it is.
    is_plain = type(handle) is Cell and type(data) is torch.Tensor and not num_function_modes()
    if is_plain and data.is_cpu and data.dtype is handle.meta.dtype:
        return data  # type: ignore[no-any-return]
    return _view(ctx, data, handle)


@in_own_state
def _view(ctx: DeviceContext, data: Any, handle: Handle) -> torch.Tensor:
    whole = ctx.executor.view(data, base_of(handle).meta)
    if type(handle) is not View:
        return whole
    part = apply_lens(whole, handle.lens)
    if len(handle.lens) > 1 and part.is_contiguous() and _is_where_metas_say(whole, part, handle):
        fast_path.note_elements(handle)
    return part


def _is_where_metas_say(whole: torch.Tensor, part: torch.Tensor, view: View) -> bool:
    """Whether the elements of a view lie where its meta says, in memory that is laid out as that of its cell."""
    of_whole, of_part = view.base.meta, view.meta
    is_whole = whole.stride() == of_whole.stride and whole.size() == of_whole.size
    is_part = (
        of_part.contiguous
        and part.size() == of_part.size
        and part.storage_offset() == of_part.offset
    )
    return is_whole and is_part and not whole.storage_offset() and shares_memory(whole, part)


def fetch(handle: Handle, reason: str = "Fetch") -> torch.Tensor:
    """Copy a handle's values to a new CPU tensor, with the strides eager's `.cpu()` would give it.

    Cost: syncs if they are pending; one copy.
    """
    shared = real(handle, reason)
    with slices.watched("fetch", "transfers") as seen, metrics.timer("TransferFromDeviceTime"):
        if seen is not None:
            seen.note(bytes=shared.nbytes, line=source.user_line())
        result, nbytes = _copied(shared, handle.meta, torch.is_inference_mode_enabled())
    metrics.observe("InboundData", nbytes)
    return result


@in_own_state
def _copied(shared: torch.Tensor, meta: TensorMeta, inference: bool) -> tuple[torch.Tensor, int]:
    """Return a copy for the user, made in the inference mode that the user's thread is in, and its bytes."""
    # Actual sizes: for a few results (statistics of batch norm in eval) meta kernels return others.
    size = shared.size()
    stride = _stride_of_copy(meta) if size == meta.size else contiguous_stride(size)
    with torch.inference_mode(inference):
        result = torch.empty_strided(size, stride, dtype=meta.dtype).copy_(shared)
    return result, result.nbytes


def _stride_of_copy(meta: TensorMeta) -> tuple[int, ...]:
    """Strides of a copy that preserves the format: its own if it is dense, else the order of its dims, packed."""
    if meta.contiguous or meta.dense:
        return meta.stride
    return torch.empty_like(meta.meta_tensor()).stride()


def upload(tensor: torch.Tensor, index: int, like: TensorMeta | None = None) -> LazyTensor:
    """A lazy tensor with a CPU tensor's values and the strides of a copy of `like`, by default of the tensor."""
    ctx = context(index)
    (meta,) = _metas_of_copies([tensor], [like])
    return wrap(Cell(ctx.trace, ctx.upload(tensor, meta), meta))


def upload_all(tensors: Sequence[torch.Tensor], index: int) -> list[LazyTensor]:
    """Lazy tensors with copies of CPU tensors' values, with the strides that eager's `.to` would give them.

    Cost: one transfer, where the device has such.
    """
    ctx = context(index)
    metas = _metas_of_copies(tensors, [None] * len(tensors))
    values = ctx.upload_all(tensors, metas)
    return [wrap(Cell(ctx.trace, value, meta)) for value, meta in zip(values, metas, strict=True)]


@in_own_state
def _metas_of_copies(
    tensors: Sequence[torch.Tensor], like: Sequence[TensorMeta | None]
) -> list[TensorMeta]:
    found = [meta or _meta_of(t) for t, meta in zip(tensors, like, strict=True)]
    return [TensorMeta.of(m.size, _stride_of_copy(m), 0, m.dtype) for m in found]


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Meta of a tensor, with offset 0, so that slices of one tensor have one meta."""
    return TensorMeta.of(tensor.size(), tensor.stride(), 0, tensor.dtype)


# -- leaving and forking ---------------------------------------------------------------------------


_is_abandoned = False


def abandon_work() -> None:
    """Let this process end without running the jobs in flight, and without a message."""
    global _is_abandoned
    _is_abandoned = True


def exit_patience_s() -> float:
    """Seconds for which this process waits at exit for jobs in flight."""
    return 0.0 if _is_abandoned else settings.exit_timeout_s


class _Failed:
    """Ends this process with exit code 1 when `sys` is cleared: exit handlers have run, and what they print is out."""

    def __del__(self, leave: Callable[[int], object] = os._exit) -> None:
        leave(1)


def at_exit() -> None:
    """Finish the jobs in flight; warn if they are dropped. An error that nobody has seen is the exit code, too."""
    has_failed = False
    # What has ended the script, if it was an exception; and each step of a loop may fail in the same way.
    told = {str(getattr(sys, "last_value", ""))}
    for ctx in contexts():
        done = ctx.worker.stop(exit_patience_s())
        if not done and not _is_abandoned:
            print(
                f"ltc: {ctx.device} was still running after {settings.exit_timeout_s:g} s; its pending "
                "work is dropped. Next: call wait_device_ops() before the end, or set "
                "LTC_EXIT_TIMEOUT_S.",
                file=sys.stderr,
                flush=True,
            )
        for failure in () if _is_abandoned else ctx.failures:
            if not failure.error.seen:
                has_failed = True
                text = str(failure.error)
                if text not in told:
                    told.add(text)
                    print(
                        f"ltc: an error was not seen before the end: {text}",
                        file=sys.stderr,
                        flush=True,
                    )
        if not done:
            ctx.worker.park()
    if has_failed and not hasattr(sys, "last_value"):  # else an exception of the script's ends it
        vars(sys)["_ltc_failed"] = _Failed()


def before_fork() -> None:
    """Wait for imports of other threads and for running jobs before a fork, and take the locks of recording."""
    fork_gate.await_imports()
    fork_gate.close()
    _forking.held = _held_still(contexts())


def _held_still(chosen: Sequence[DeviceContext]) -> list[DeviceContext]:
    """Take the locks of all devices that become idle, or of none; returns the contexts whose lock is held.

    The jobs end first, while no lock is held: they may need one. A thread that records on two devices may need the lock
    that is held here, so waits for locks are short.
    """
    deadline = time.monotonic() + _FORK_PATIENCE_S
    while True:
        idle = become_idle(chosen, deadline)
        held = []
        for ctx in idle:
            if not ctx.trace.lock.acquire(timeout=_LOCK_WAIT_S):
                break
            held.append(ctx)
        if len(held) == len(idle) and all(ctx.worker.drain(0.0) for ctx in idle):
            return held
        for ctx in reversed(held):
            ctx.trace.lock.release()
        if time.monotonic() > deadline:
            return []


def become_idle(chosen: Sequence[DeviceContext], deadline: float = math.inf) -> list[DeviceContext]:
    """Wait for the jobs of devices; returns those that are idle then.

    A job may wait for the thread that calls this: that is so if all jobs wait for other threads, and none comes for a
    while.

    Args:
        deadline: of `time.monotonic`.
    """
    last_move = time.monotonic()
    while True:
        workers = [ctx.worker for ctx in chosen]
        busy = [w for w in workers if not (w.is_idle or w.is_this_thread)]
        now = time.monotonic()
        if not all(w.is_held_up for w in busy):
            last_move = now
        if not busy or now > min(deadline, last_move + _STANDSTILL_S):
            return [ctx for ctx in chosen if ctx.worker not in busy]
        busy[0].drain(_LOCK_WAIT_S)


def after_fork_in_parent() -> None:
    for ctx in reversed(_forking.held):
        ctx.trace.lock.release()
    _forking.held = []
    fork_gate.open()


def after_fork_in_child() -> None:
    global _contexts_lock
    _contexts_lock = threading.Lock()
    fork_gate.renew_lock()
    forget_jobs()
    held, _forking.held = _forking.held, []
    for ctx in contexts():
        ctx.after_fork(is_whole=ctx in held)
    if _contexts:
        # A forked child must not use the OpenMP threads of its parent: it would wait for them for ever.
        torch.set_num_threads(1)
