"""`xm`: `torch_xla.core.xla_model` of every version, over `ltc_core` and `ltc_dist`.

Both generations of names with both signatures.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import torch

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core import (
    add_step_closure,
    export,
    fork_rng,
    get_memory_info,
    unlazy,
    wait_device_ops,
)
from ltc_core.api.closures import run_step_closures
from ltc_core.api.verbs import DeviceLike
from ltc_core.record import random_state
from ltc_core.runtime.devices import context
from ltc_dist import (
    MpDeviceLoader,
    RateTracker,
    all_gather_bucketized,
    all_reduce_bucketized_gradients,
    broadcast_master_param,
    collective_broadcast,
    collective_permute,
    do_on_ordinals,
    get_local_ordinal,
    is_master_ordinal,
    mesh_reduce,
    optimizer_step,
    reduce_gradients,
    reduce_scatter_bucketized,
    save,
)
from ltc_dist.collectives.ops import (
    REDUCE_AND,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_MUL,
    REDUCE_OR,
    REDUCE_SUM,
)
from ltc_dist.collectives.process_group import Groups
from ltc_dist.compat import buffer_donors, dynamic_sizes, scopes
from ltc_dist.compat.absent import Absent
from ltc_dist.compat.torch_xla.runtime import is_spmd, xla_device
from ltc_dist.compat.torch_xla.utils.utils import for_each_instance, for_each_instance_rewrite
from ltc_dist.data.batch import map_movable
from ltc_dist.fully_sharded.shards import is_shard
from ltc_dist.spmd.sharding import divide

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "MpDeviceLoader",
    "RateTracker",
    "ToXlaTensorArena",
    "_fetch_gradients",
    "_maybe_convert_to_cpu",
    "_run_step_closures",
    "add_step_closure",
    "all_gather",
    "all_gather_bucketized",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "check_view_sharing",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "fork_rng",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_stablehlo",
    "get_stablehlo_bytecode",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimization_barrier_",
    "optimizer_step",
    "parse_xla_device",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_bucketized",
    "rendezvous",
    "save",
    "send",
    "send_cpu_data_to_device",
    "set_replication",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xla_device_kind",
    "xla_real_devices",
    "xla_rendezvous",
    "xla_replication_devices",
    "xrt_world_size",
]

_run_step_closures = run_step_closures

_CHANNELS = "there are no channels between devices; use xm.collective_permute, or torch.distributed's send and recv"

recv, send = Absent("xm.recv", _CHANNELS), Absent("xm.send", _CHANNELS)


def mark_step(wait: bool = False, reset_scope: bool = True, *, device: DeviceLike = None) -> None:
    """End the step; see `ltc_core.mark_step`.

    Args:
        reset_scope: refuse to end it inside of an open `xp.Trace`.

    Raises:
        ProfilerError: such a scope is open. The step has ended.
    """
    buffer_donors.donate(device)
    ltc.mark_step(wait, device=device)
    if reset_scope:
        scopes.check_none_is_open()


def get_stablehlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """StableHLO of the pending tensors, of all of the device if none are given; see `ltc_core.export.pending`.

    Sizes that `torch_xla._XLAC._xla_mark_dynamic` has marked are free.
    """
    return export.pending(tensors, free_sizes=dynamic_sizes.marked()).text()


def get_stablehlo_bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """StableHLO of the pending tensors as portable bytecode; see `get_stablehlo`."""
    return export.pending(tensors, free_sizes=dynamic_sizes.marked()).bytecode()


# -- devices -------------------------------------------------------------------------------------


def get_xla_supported_devices(*args: Any, **kwargs: Any) -> list[str]:
    """List this process's devices: `(devkind=None, max_devices=None)` up to 2.7, `(max_devices=None)` since.

    With `use_spmd` only the first, which stands for all.
    """
    found = ltc.get_lazy_supported_devices(_max_devices(*args, **kwargs))
    return found[:1] if is_spmd() else found


def _max_devices(
    first: str | int | None = None,
    second: int | None = None,
    *,
    devkind: str | None = None,
    max_devices: int | None = None,
) -> int | None:
    given = second if isinstance(first, str) or first is None else first
    return given if max_devices is None else max_devices


def xla_device_hw(device: DeviceLike = None) -> str:
    """Return what a device computes on: 'CPU' or 'CUDA'."""
    return ltc.lazy_device_hw(device)


def xla_device_kind(device: DeviceLike = None) -> str:
    """Return the model of what a device computes on, such as 'TPU v4'."""
    return context(_number(device)).executor.kind


def xla_real_devices(devices: Sequence[DeviceLike] | None = None) -> list[str]:
    """Return what the devices compute on: ['CPU:0', 'CPU:1']."""
    chosen = ltc.get_lazy_supported_devices() if devices is None else devices
    return [f"{ltc.lazy_device_hw(d)}:{_number(d)}" for d in chosen]


def _number(device: DeviceLike) -> int:
    return xla_device().index if device is None else torch.device(device).index or 0


def parse_xla_device(device: torch.device | str) -> tuple[str, int] | None:
    """Return a device's kind and number; None for one that is not lazy."""
    found = torch.device(device)
    if found.type != ltc.settings.device_name:
        return None
    return ltc.lazy_device_hw(found), found.index or 0


def xla_replication_devices(local_devices: Sequence[DeviceLike] | None = None) -> list[str]:
    """Return the devices that threads of this process train on together."""
    return xla_real_devices(local_devices)


def set_replication(device: DeviceLike, devices: Sequence[DeviceLike] | None) -> None:
    """Does nothing: `DataParallel` gives each of its threads a rank."""


def is_xla_tensor(tensor: object) -> bool:
    """Whether a tensor lives on the device."""
    return ltc.is_lazy_tensor(tensor)


def get_ordinal(defval: int = 0) -> int:
    """Return this process's rank in the job; `defval` if it is alone, or with `use_spmd`."""
    return defval if ltc.settings.spmd else ltd.get_ordinal(defval)


def xrt_world_size(defval: int = 1) -> int:
    """Return the number of processes of the job; `defval` if this one is alone."""
    return defval if ltc.settings.spmd else ltd.world_size(defval)


def master_print(
    *args: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False
) -> None:
    """Print on rank 0 of the job, or with `local=True` on rank 0 of each host."""
    ltd.master_print(*args, fd=sys.stdout if fd is None else fd, local=local, flush=flush)


# The newest states, by their numbers.
_states: OrderedDict[int, torch.Tensor] = OrderedDict()
_MOST_STATES = 1000
_numbers = itertools.count(1 << 62)


def get_rng_state(device: DeviceLike = None) -> int:
    """Number that restores the random state of a device: the seed, if nothing was drawn yet.

    After draws the number is valid in this process only; `ltc_core.get_rng_state` returns the state itself.
    """
    assert random_state.streams is not None
    stream = random_state.streams.default(_number(device))
    seed = stream.seed_of_state()
    if seed is not None:
        return seed
    number = next(_numbers)
    _states[number] = stream.get_state()
    if len(_states) > _MOST_STATES:
        _states.popitem(last=False)
    return number


def set_rng_state(seed: int | torch.Tensor, device: DeviceLike = None) -> None:
    """Seed a device's random numbers, or restore the state of a number from `get_rng_state`."""
    ltc.set_rng_state(seed if isinstance(seed, torch.Tensor) else _states.get(seed, seed), device)


# -- data ----------------------------------------------------------------------------------------


def send_cpu_data_to_device(datas: Any, device: DeviceLike, input_sharding: Any = None) -> Any:
    """Upload the CPU tensors of a structure; a single tensor gives a list of one.

    `input_sharding`, a `ShardingSpec`, divides the tensors of its number of dimensions.

    Tensors are found where a loader finds them. One that requires a gradient becomes a leaf of its own.
    """

    def moved(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item.to(device)
        (there,) = ltc.send_cpu_data_to_device(item, device)
        return there if there is item else there.requires_grad_(item.requires_grad)

    result = map_movable(moved, datas)
    if input_sharding is not None:
        result = divide(result, input_sharding)
    return [result] if isinstance(datas, torch.Tensor) else result


def check_view_sharing(obj: Any) -> None:
    """Raise if a structure or an object has a tensor and a view of it, which would be saved separately.

    Raises:
        CheckpointError: "Tensor ID 2 is sharing a view with tensor ID 1".
    """
    found: list[torch.Tensor] = []
    for_each_instance(obj, is_xla_tensor, found.append)
    ltc.check_view_sharing(found)


# -- collectives ---------------------------------------------------------------------------------


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    *more: Any,
    **kwargs: Any,
) -> Any:
    """Reduce over the processes: a tensor returns a new tensor, a list is reduced in place.

    `cctx` (up to 2.0) and `pin_layout` are accepted and have no effect.
    """
    return ltd.all_reduce(reduce_type, inputs, scale, groups)


def all_gather(
    value: Any,
    dim: int = 0,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Any:
    """Concatenate the values of all processes along `dim`; for each tensor of a list."""
    if isinstance(value, list | tuple):
        outputs = [None] * len(value) if output is None else output
        return [ltd.all_gather(v, dim, groups, o) for v, o in zip(value, outputs, strict=True)]
    return ltd.all_gather(value, dim, groups, output)


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Any:
    """Reduce, and give each process its part along `scatter_dim`; for each tensor of a list."""
    rest = (scale, scatter_dim, shard_count, groups)
    if isinstance(input, list | tuple):
        outputs = [None] * len(input) if output is None else output
        return [
            ltd.reduce_scatter(reduce_type, v, *rest, o)
            for v, o in zip(input, outputs, strict=True)
        ]
    return ltd.reduce_scatter(reduce_type, input, *rest, output)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    *more: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Send part i along `split_dimension` to process i; returns the received parts. `cctx`, `pin_layout`: no effect."""
    return ltd.all_to_all(value, split_dimension, concat_dimension, split_count, groups)


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that accelerate averages. Those of divided parameters are averaged already."""
    params = [p for row in optimizer.param_groups for p in row["params"]]
    return [p.grad for p in params if p.grad is not None and not is_shard(p)]


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    return ltc.to_cpu(data) if convert else data


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Does nothing: the compiler moves no computation over a step's boundary, and frees what it can within."""


# -- between processes ---------------------------------------------------------------------------


def rendezvous(tag: str, payload: bytes = b"", replicas: Iterable[int] = ()) -> list[bytes]:
    """Wait until every process has called this with `tag`, and exchange payloads."""
    return ltd.rendezvous(tag, payload, replicas or ())


def xla_rendezvous(
    payload: bytes = b"", ordinals: Iterable[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """Wait until every process has called this, and exchange payloads."""
    return ltd.rendezvous(tag or "", payload, ordinals or ())


class ToXlaTensorArena:
    """Finds values in a structure like `xu.for_each_instance`, converts them in one call, and replaces them.

    Args:
        convert_fn: called with the list of found values; returns as many.
        select_fn: whether a value is converted.
    """

    def __init__(
        self, convert_fn: Callable[[list[Any]], Sequence[Any]], select_fn: Callable[[Any], bool]
    ) -> None:
        self._convert_fn, self._select_fn = convert_fn, select_fn

    def transform(self, inputs: Any) -> Any:
        chosen: list[Any] = []
        for_each_instance(inputs, self._select_fn, chosen.append)
        if not chosen:
            return inputs
        pairs = zip(chosen, self._convert_fn(chosen), strict=True)
        made = {id(old): new for old, new in pairs}
        return for_each_instance_rewrite(inputs, self._select_fn, lambda old: made[id(old)])
