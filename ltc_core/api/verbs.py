"""The verbs of a training script: devices, step boundaries, random state, data to and from the device.

Names and semantics are those of torch_xla's `xla_model`, torch._lazy and lazy_tensor_core.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core import errors, metrics, source
from ltc_core.api import closures
from ltc_core.api.closures import add_step_closure
from ltc_core.debug.dump import graph_text
from ltc_core.device import register
from ltc_core.device.hardware import hardware_kind
from ltc_core.graph.ir import Graph
from ltc_core.graph.passes import prune
from ltc_core.record import random_state
from ltc_core.record.view_recorder import make_operands
from ltc_core.runtime.devices import DeviceContext, checked, context, contexts, fetch, upload
from ltc_core.runtime.found_steps import note_mark
from ltc_core.serialization.plain import save
from ltc_core.settings import settings
from ltc_core.tensor import pickling
from ltc_core.tensor.handles import base_of
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_core.timeline import slices

__all__ = [
    "add_step_closure",
    "check_view_sharing",
    "dump_ir",
    "fork_rng",
    "get_lazy_supported_devices",
    "get_memory_info",
    "get_rng_state",
    "is_lazy_tensor",
    "lazy_device",
    "lazy_device_hw",
    "manual_seed",
    "mark_step",
    "save",
    "send_cpu_data_to_device",
    "set_rng_state",
    "step",
    "sync_multi",
    "to_cpu",
    "unlazy",
    "wait_device_ops",
]

DeviceLike = torch.device | str | int | None


# -- devices -------------------------------------------------------------------------------------


def lazy_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return lazy device `n`, or the current one.

    Args:
        n: index of the device.
        devkind: accepted for old scripts; the executor decides what the device stands for.

    Raises:
        DeviceIndexError: there is no device of that index.
        SettingsError: a variable was set after its setting was used.
    """
    settings.check_environment()
    index = register.current_device() if n is None else checked(int(n))
    return torch.device(settings.device_name, index)


def get_lazy_supported_devices(
    max_devices: int | None = None, devkind: str | None = None
) -> list[str]:
    """List the devices of this process as strings, at most `max_devices`."""
    names = [f"{settings.device_name}:{i}" for i in range(register.device_count())]
    return names if max_devices is None else names[:max_devices]


def lazy_device_hw(device: DeviceLike = None) -> str:
    """Hardware that a device computes on: 'CPU', 'CUDA', 'TPU', or what else PJRT_DEVICE names."""
    _index(device)
    return hardware_kind()


def is_lazy_tensor(tensor: object) -> bool:
    """Whether a tensor lives on a lazy device."""
    return type(tensor) is LazyTensor


def _index(device: DeviceLike) -> int:
    if device is None or device == "":
        return register.current_device()
    if isinstance(device, int):
        return checked(device)
    wanted = torch.device(device)
    if wanted.type != settings.device_name:
        raise errors.DeviceError(
            f"{wanted} is not a lazy device",
            got=f"{wanted}, expected one of {', '.join(get_lazy_supported_devices())}",
            where=source.user_line(),
            next="use lazy_device()",
        )
    return register.current_device() if wanted.index is None else checked(wanted.index)


def get_memory_info(device: DeviceLike = None) -> dict[str, int]:
    """Return a device's memory figures, under the names of both generations of scripts.

    Returns:
        bytes_used, bytes_limit, peak_bytes_used; kb_free, kb_total.
    """
    index = _index(device)
    free, total = getattr(torch, settings.device_name).mem_get_info(index)
    memory = context(index).memory
    return {
        "bytes_used": memory.used_bytes,
        "bytes_limit": total,
        "peak_bytes_used": memory.peak_bytes,
        "kb_free": free // 1024,
        "kb_total": total // 1024,
    }


# -- step boundaries -----------------------------------------------------------------------------

_steps = 0


def mark_step(wait: bool = False, reset_scope: bool = True, *, device: DeviceLike = None) -> None:
    """End the step: hand what was recorded to the device, and run the step's closures.

    Args:
        wait: block until the device has run it.
        reset_scope: accepted for old scripts.
        device: cut this device only; all that recorded something by default, in a replica's thread its own.

    Raises:
        LtcError: an op of an earlier step failed in the background, and no tensor that can be read carries its error.

    Cost: asynchronous; compiles if the step was never seen before.
    """
    global _steps
    note_mark()
    wait = wait or settings.sync_wait
    with slices.watched("mark_step"):
        for ctx in _chosen(device):
            ctx.cut("MarkStep")
    metrics.count("MarkStep")
    _steps += 1
    if settings.metrics_file is not None:
        metrics.append_step(_steps)
    if wait:
        for ctx in _chosen(device):
            ctx.wait()
    for ctx in _chosen(device):
        ctx.raise_failure(all_of_them=False)
    closures.run_step_closures()


def _chosen(device: DeviceLike) -> list[DeviceContext]:
    if device is not None and device != "":
        return [context(_index(device))]
    own = getattr(_thread, "device", None)
    return contexts() if own is None else [context(own)]


_thread = threading.local()


@contextlib.contextmanager
def alone_on(index: int) -> Iterator[None]:
    """Restrict this thread's steps to one device: they do not cut what other threads record on theirs."""
    _thread.device = index
    try:
        yield
    finally:
        del _thread.device


def wait_device_ops(devices: Iterable[DeviceLike] | DeviceLike = None) -> None:
    """Block until everything recorded for the devices (all of them by default) has run.

    Asynchronous step closures are waited for too; one of them that calls this waits for the devices alone.

    Raises:
        LtcError: an op failed in the background.
    """
    if devices is None or isinstance(devices, str | int | torch.device):
        chosen = _chosen(devices)
    else:
        wanted = list(devices)
        chosen = [context(_index(d)) for d in wanted] if wanted else contexts()
    for ctx in chosen:
        ctx.wait()
    closures.drain_closures()


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Context manager: the block is one step, cut before and after it. Source: `torch_xla.step`."""
    mark_step()
    try:
        yield
    finally:
        mark_step()


def sync_multi(
    tensors: Iterable[torch.Tensor], devices: Iterable[DeviceLike] = (), wait: bool = True
) -> None:
    """Run what the tensors need and, by default, block until their values are there."""
    handles = [t._h for t in _listed(tensors) if type(t) is LazyTensor]
    for ctx in {id(c): c for c in (context(h.trace.device.index) for h in handles)}.values():
        ctx.cut("SyncMulti")
    if wait:
        for h in handles:
            context(h.trace.device.index).value_data(base_of(h), "SyncMulti")


def _listed(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Treat one tensor as a list of one: iterating it would record its rows."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def unlazy(tensors: Iterable[torch.Tensor]) -> None:
    """Block until the tensors' values are on the device."""
    sync_multi(tensors)


# -- data ----------------------------------------------------------------------------------------


def to_cpu(tree: Any, devices: Iterable[DeviceLike] = ()) -> Any:
    """Copy every lazy tensor of a structure to the CPU; one sync for all. Structure and other leaves stay.

    Source: `torch._lazy.to_cpu`.
    """
    return pytree.tree_map(lambda t: fetch(t._h, "ToCpu") if type(t) is LazyTensor else t, tree)


def send_cpu_data_to_device(datas: Any, device: DeviceLike, input_sharding: Any = None) -> Any:
    """Upload every CPU tensor of a structure; a single tensor gives a list of one, as peers do.

    Tuples stay tuples. `input_sharding` is accepted for old scripts.
    """
    index = _index(device)

    def move(t: Any) -> Any:
        return upload(t, index) if isinstance(t, torch.Tensor) and type(t) is not LazyTensor else t

    moved = pytree.tree_map(move, datas)
    return [moved] if isinstance(datas, torch.Tensor) else moved


def check_view_sharing(obj: Any) -> None:
    """Refuse a structure in which a lazy tensor and a view of it would be saved apart.

    Raises:
        CheckpointError: "Tensor ID 2 is sharing a view with tensor ID 1".
    """
    pickling.check_handles(t._h for t in pytree.tree_leaves(obj) if type(t) is LazyTensor)


# -- random state --------------------------------------------------------------------------------


def manual_seed(seed: int, device: DeviceLike = None) -> None:
    """Seed one device; `torch.manual_seed` seeds them all. The numbers are those of PyTorch's CPU generator."""
    _stream(device).manual_seed(int(seed))


def set_rng_state(seed: int | torch.Tensor, device: DeviceLike = None) -> None:
    """Set the random state of a device: a seed (as peers do) or a state from `get_rng_state`."""
    if isinstance(seed, torch.Tensor):
        _stream(device).set_state(seed)
    else:
        manual_seed(seed, device)


def get_rng_state(device: DeviceLike = None) -> LazyTensor:
    """Return the random state of a device. Cost: none; nothing is synced until it is read."""
    return _stream(device).get_state()


@contextlib.contextmanager
def fork_rng(device: DeviceLike = None, enabled: bool = True) -> Iterator[None]:
    """Restore the random state of a device at the end of the block."""
    if not enabled:
        yield
        return
    stream = _stream(device)
    state = stream.get_state()
    try:
        yield
    finally:
        stream.set_state(state)


def _stream(device: DeviceLike) -> random_state.Stream:
    assert random_state.streams is not None
    return random_state.streams.default(_index(device))


# -- looking -------------------------------------------------------------------------------------


def dump_ir(tensors: Sequence[torch.Tensor], fmt: str = "text", device: DeviceLike = None) -> str:
    """Write the pending graph that tensors come from, as 'text' or 'dot'; nothing is run.

    Under LTC_IR_DEBUG each node shows the user's line. Source: `torch._lazy.debug.dump_ir`.
    """
    return graph_text(pending_graph(tensors, device), fmt, lines=settings.ir_debug)


def pending_graph(tensors: Sequence[torch.Tensor], device: DeviceLike = None) -> Graph:
    """The graph that tensors come from; those with a value are no outputs of it. Nothing is run."""
    return pending(tensors, device)[0]


def pending(
    tensors: Sequence[torch.Tensor] | None, device: DeviceLike = None
) -> tuple[Graph, list[Any]]:
    """The graph that tensors come from, and the numbers that its ops were given. Nothing is run.

    Args:
        tensors: those with a value are no outputs of the graph. None: all that are alive on the device.
    """
    lazy = [t for t in _listed(() if tensors is None else tensors) if type(t) is LazyTensor]
    trace = lazy[0]._h.trace if lazy else context(_index(device)).trace
    with trace.lock:
        make_operands(lazy, None)
        outputs = [t._h.value.index for t in lazy if t._h.value.epoch == trace.epoch]
        if tensors is None:
            outputs = trace.alive
        path = trace.path(trace.cursor)
        metas = {index: meta for s in path for index, meta in s.inputs}
        nodes = prune([s.node for s in path if s.node is not None], outputs)
        scalars, sized = list(trace.scalars), trace.sizes()
    return Graph(nodes, metas, tuple(outputs)).sized(sized), scalars
