"""The functions of `torch_xla._XLAC` that scripts call."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
from collections.abc import Sequence

import torch

import ltc_core as ltc
from ltc_core import export, metrics, source
from ltc_core.api.eager import eager_mode, is_eager_mode
from ltc_core.api.manual_collectives import all_reduce, reduce_scatter
from ltc_core.api.sharding import is_deferred
from ltc_core.api.verbs import pending_graph
from ltc_core.errors import DeviceMismatchError, UnsupportedOpError, with_notes
from ltc_core.graph.ir import references
from ltc_core.runtime import execution_gate
from ltc_core.runtime.devices import context_of, contexts
from ltc_core.tensor.handles import Cell, Handle, base_of
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.checkpoint.stopping import Stopping
from ltc_dist.compat import auto_sharding, buffer_donors, dynamic_sizes, lowering
from ltc_dist.compat.op_shardings import (
    OpSharding,
    global_tensor_from_cpu_shards,
    to_full_shape,
    to_shard_shape,
)
from ltc_dist.compat.torch_lazy.computation import get_graph_hash
from ltc_dist.compat.torch_xla import runtime
from ltc_dist.compat.torch_xla.core import xla_builder, xla_model
from ltc_dist.compat.torch_xla.distributed.spmd.xla_sharding import sharding_type_of
from ltc_dist.compat.torch_xla.version import __xla_gitrev__
from ltc_dist.compat.xla_ops import Computation, dot_general
from ltc_dist.compat.xla_text import KINDS, graph_text, shape_text, sharding_text, values_text
from ltc_dist.spmd import num_devices

__all__ = [
    "OpSharding",
    "_activate_preemption_sync_manager",
    "_clear_xla_counters",
    "_clear_xla_metrics",
    "_deactivate_preemption_sync_manager",
    "_ensure_xla_coordinator_initialized",
    "_get_allow_execution",
    "_get_buffer_donation",
    "_get_executed_fallback_ops",
    "_get_git_revs",
    "_get_graph_hash",
    "_get_ir_debug",
    "_get_tensors_handle",
    "_get_tensors_xla_device_data_node",
    "_get_use_eager_mode",
    "_get_xla_sharding_spec",
    "_get_xla_sharding_type",
    "_get_xla_tensor_debug_info",
    "_get_xla_tensor_dimension_size",
    "_get_xla_tensor_shape_type",
    "_get_xla_tensors_dot",
    "_get_xla_tensors_hlo",
    "_get_xla_tensors_text",
    "_global_tensor_from_cpu_shards",
    "_init_computation_client",
    "_init_xla_lazy_backend",
    "_is_placecholder",
    "_set_allow_execution",
    "_set_buffer_donation",
    "_set_ir_debug",
    "_set_use_eager_mode",
    "_short_xla_metrics_report",
    "_spmd_full_to_shard_shape",
    "_spmd_shard_to_full_shape",
    "_sync_point_reached",
    "_unsafe_buffer_pointer",
    "_xla_counter_names",
    "_xla_counter_value",
    "_xla_device_kind",
    "_xla_dot_general",
    "_xla_get_all_devices",
    "_xla_get_auto_sharding",
    "_xla_get_cpu_tensors",
    "_xla_get_default_device",
    "_xla_get_default_device_ordinal",
    "_xla_get_devices",
    "_xla_get_enable_alias_with_buffer_donor_config",
    "_xla_get_num_cached_compilation_graph",
    "_xla_get_num_processes",
    "_xla_get_process_index",
    "_xla_get_replication_devices_count",
    "_xla_get_rng_seed",
    "_xla_get_tensor_dimension_size",
    "_xla_get_tensor_id",
    "_xla_increment_counter",
    "_xla_mark_dynamic",
    "_xla_memory_info",
    "_xla_metric_data",
    "_xla_metric_names",
    "_xla_metrics_report",
    "_xla_num_devices",
    "_xla_real_devices",
    "_xla_runtime_is_initialized",
    "_xla_set_default_device",
    "_xla_set_enable_alias_with_buffer_donor_config",
    "_xla_set_mat_mul_precision",
    "_xla_set_rng_seed",
    "_xla_set_use_full_mat_mul_precision",
    "_xla_spmd_all_reduce",
    "_xla_spmd_reduce_scatter",
    "_xla_step_marker",
    "_xla_sync_multi",
    "_xla_tensors_from_aten",
    "_xla_tensors_report",
    "_xla_user_computation",
    "_xla_wait_device_ops",
    "lowering",
]

_clear_xla_counters = metrics.clear_counters
_clear_xla_metrics = metrics.clear_metrics
_get_executed_fallback_ops = metrics.executed_fallback_ops
_short_xla_metrics_report = metrics.short_metrics_report
_xla_increment_counter = metrics.count
_xla_counter_names = metrics.counter_names
_xla_counter_value = metrics.counter_value
_xla_metric_data = metrics.metric_data
_xla_metric_names = metrics.metric_names
_xla_memory_info = ltc.get_memory_info
_xla_wait_device_ops = ltc.wait_device_ops
_xla_mark_dynamic = dynamic_sizes.mark
_get_xla_sharding_spec = sharding_text
_global_tensor_from_cpu_shards = global_tensor_from_cpu_shards
_spmd_full_to_shard_shape = to_shard_shape
_spmd_shard_to_full_shape = to_full_shape
_set_use_eager_mode = eager_mode
_get_use_eager_mode = is_eager_mode
_xla_device_kind = xla_model.xla_device_kind
_xla_get_num_cached_compilation_graph = runtime.get_num_cached_compilation_graph
_xla_get_num_processes = runtime.process_count
_xla_get_process_index = runtime.process_index
_xla_get_rng_seed = xla_model.get_rng_state
_xla_set_rng_seed = xla_model.set_rng_state
_set_buffer_donation = buffer_donors.set_donor
_get_buffer_donation = buffer_donors.is_donor
_is_placecholder = buffer_donors.is_placeholder
_xla_get_auto_sharding = auto_sharding.is_on
_get_tensors_handle = buffer_donors.handles_of
_sync_multi_donates = False


def _xla_metrics_report() -> str:
    return ltc.metrics.metrics_report()


def _set_allow_execution(allow_execution: bool) -> None:
    """Say whether ops may run. While they may not, a line that would run them is an error; for all threads."""
    if allow_execution:
        execution_gate.open()
    else:
        execution_gate.close()


def _get_allow_execution() -> bool:
    return not execution_gate.is_closed


def _set_ir_debug(ir_debug: bool) -> None:
    """Say whether texts of graphs show the user's line of each node, as LTC_IR_DEBUG does."""
    ltc.settings.ir_debug = ir_debug


def _get_ir_debug() -> bool:
    return ltc.settings.ir_debug


def _xla_dot_general(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    dimension_numbers: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    precision_config: str | None = None,
    preferred_element_type: torch.dtype | None = None,
) -> torch.Tensor:
    """XLA's DotGeneral.

    Args:
        dimension_numbers: ((contracting dims of lhs, of rhs), (batch dims of lhs, of rhs)); () for none.
        preferred_element_type: in which the products are summed; that of the operands by default.

    Raises:
        DeviceMismatchError: an operand is not on the device.
    """
    assert precision_config is None, "_xla_dot_general: precision_config is not supported"
    for position, t in (("first", lhs), ("second", rhs)):
        if not xla_model.is_xla_tensor(t):
            kind = t.type().replace("torch.", "CPU").replace("Tensor", "Type")
            where = f"({position} argument)"
            error = DeviceMismatchError(
                f"Expected input tensor {where} to be an actual XLA tensor. Got: {kind}. Consider moving it {where} "
                "to XLA.",
                got=f"{list(t.shape)} on {t.device}",
                where=source.user_line(),
                next="t.to('xla')",
            )
            raise with_notes(error)
    if preferred_element_type is not None:
        lhs, rhs = lhs.to(preferred_element_type), rhs.to(preferred_element_type)
    return dot_general(lhs, rhs, *dimension_numbers)


def _get_git_revs() -> dict[str, str]:
    return {"xla": __xla_gitrev__, "torch": torch.version.git_version or torch.__version__}


@functools.cache
def _init_xla_lazy_backend() -> None:
    """Does nothing but count its first call, as there: the device is registered at the import."""
    metrics.count("RegisterXLAFunctions")


def _unsafe_buffer_pointer(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor has or is a view of; valid until the tensor changes or is gone.

    Cost: waits for the tensor's value.
    """
    handle = _handle(tensor)
    data = context_of(handle).value_data(base_of(handle), "_unsafe_buffer_pointer")
    if isinstance(data, torch.Tensor):
        return data.untyped_storage().data_ptr()
    return int(data.unsafe_buffer_pointer())  # an array of JAX


def _handle(tensor: torch.Tensor) -> Handle:
    if not isinstance(tensor, LazyTensor):
        raise DeviceMismatchError(
            "the tensor is not on the device",
            got=f"{list(tensor.shape)} on {tensor.device}",
            where=source.user_line(),
            next="t.to('xla')",
        )
    return tensor._h


def _xla_get_default_device() -> str:
    return str(ltc.lazy_device())


def _xla_get_default_device_ordinal() -> int:
    return ltc.lazy_device().index


def _get_xla_sharding_type(tensor: torch.Tensor) -> int | None:
    """Number of torch_xla's `ShardingType` of a marked tensor; None for another one."""
    return int(sharding_type_of(tensor)) if _get_xla_sharding_spec(tensor) else None


def _ensure_xla_coordinator_initialized(
    global_rank: int, world_size: int, master_addr: str, master_port: str = ""
) -> None:
    """Does nothing: no process has to be started for the others to meet at."""


_stopping: Stopping | None = None


def _activate_preemption_sync_manager() -> None:
    """Note SIGTERM from now on, as `CheckpointManager` does; it does not end the process."""
    global _stopping
    _stopping = _stopping or Stopping()


def _deactivate_preemption_sync_manager() -> None:
    global _stopping
    if _stopping is not None:
        _stopping.close()
    _stopping = None


def _sync_point_reached(step: int) -> bool:
    """Whether the processes have agreed that SIGTERM has come to one of them; call it once a step.

    Raises:
        RuntimeError: SIGTERM is not noted.
    """
    if _stopping is None:
        raise RuntimeError(
            "_sync_point_reached: SIGTERM is not noted\n"
            "  Next: call _activate_preemption_sync_manager() first, or use CheckpointManager"
        )
    return _stopping.is_agreed()


def _init_computation_client() -> None:
    """Does nothing: a device is made at its first use."""


def _xla_get_devices() -> list[str]:
    return ltc.get_lazy_supported_devices()


def _xla_get_all_devices() -> list[str]:
    """Name the devices of the job, those of the first process first."""
    count = runtime.global_device_count()
    return [f"{ltc.lazy_device_hw()}:{k}" for k in range(count)]


def _xla_real_devices(devices: Sequence[str] | None = None) -> list[str]:
    return xla_model.xla_real_devices(devices)


def _xla_sync_multi(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str] = (),
    wait: bool = True,
    sync_xla_data: bool = True,
) -> None:
    """Run what the tensors need; marked buffers are donated if the whole step is meant, or a setting says so."""
    if sync_xla_data or _sync_multi_donates:
        buffer_donors.donate()
    ltc.sync_multi([t for t in tensors if not _is_placecholder(t)], devices, wait)


def _get_graph_hash(tensors: Sequence[torch.Tensor]) -> str:
    """Hash of the pending graph; nothing is run.

    Where syncs donate marked buffers, which ones they are counts; with `use_spmd(auto=True)` the mesh does.
    """
    found = get_graph_hash(tensors)
    donated = buffer_donors.positions(tensors) if _sync_multi_donates else []
    also = [*donated, *((auto_sharding.mesh_shape(),) if auto_sharding.is_on() else ())]
    return hashlib.sha256(f"{found}{also}".encode()).hexdigest() if also else found


def _xla_set_enable_alias_with_buffer_donor_config(should_alias: bool) -> None:
    """Say whether `_xla_sync_multi(..., sync_xla_data=False)` donates marked buffers, and hashes of graphs know it."""
    global _sync_multi_donates
    _sync_multi_donates = should_alias


def _xla_get_enable_alias_with_buffer_donor_config() -> bool:
    return _sync_multi_donates


def _xla_step_marker(
    device: str = "", devices: Sequence[str] = (), wait: bool = False, reset_scope: bool = True
) -> None:
    xla_model.mark_step(wait, reset_scope, device=device)


def _xla_set_default_device(device: str) -> str:
    """Make a device the current one; returns the previous one."""
    before = _xla_get_default_device()
    getattr(torch, ltc.settings.device_name).set_device(device)
    return before


def _xla_runtime_is_initialized() -> bool:
    """Whether a device was used."""
    return bool(contexts())


def _xla_num_devices() -> int:
    return len(ltc.get_lazy_supported_devices())


def _xla_get_cpu_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return ltc.to_cpu(list(tensors))  # type: ignore[no-any-return]


def _xla_tensors_from_aten(
    tensors: Sequence[torch.Tensor], devices: Sequence[str], shardings: object = None
) -> list[torch.Tensor]:
    """Upload tensors, each to a device; shardings have no effect."""
    pairs = zip(tensors, devices, strict=True)
    return [xla_model.send_cpu_data_to_device(t, device)[0] for t, device in pairs]


def _xla_user_computation(
    name: str, inputs: Sequence[torch.Tensor], computation: Computation
) -> list[torch.Tensor]:
    """Call a computation of `torch_xla.core.xla_builder`; see `xla_computation_as_func`."""
    if not inputs:
        raise RuntimeError(f"user_computation({name}): expected at least 1 input tensor.")
    return xla_builder.xla_computation_as_func(computation, name)(inputs)


def _get_xla_tensors_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """HLO of the pending tensors where JAX is installed; else what `_get_xla_tensors_text` returns.

    Tensors that all have their values are parameters, with how they are divided. XLA_DUMP_POST_OPTIMIZATIONS=1 shows
    what XLA makes of it: with the collectives between devices.
    """
    if not tensors or not export.is_possible():
        return _get_xla_tensors_text(tensors)
    pending = export.pending(tensors)
    if os.environ.get("XLA_DUMP_POST_OPTIMIZATIONS", "").lower() in ("1", "true"):
        found = pending.optimized_hlo(_data_of_inputs(tensors))
    else:
        found = pending.hlo()
    if not found and not pending_graph(tensors).nodes:
        return values_text(tensors)
    return found or _get_xla_tensors_text(tensors)


def _data_of_inputs(tensors: Sequence[torch.Tensor]) -> dict[int, object]:
    """Value of the pending graph -> the data that it has. Cost: waits for them."""
    lazy = [t for t in tensors if isinstance(t, LazyTensor)]
    found = {}
    for index, value, _, _ in context_of(lazy[0]._h).trace.inputs if lazy else ():
        assert value.buffer is not None
        value.buffer.wait_done()
        found[index] = value.buffer.take()
    return found


def _xla_get_replication_devices_count() -> int:
    return xla_model.xrt_world_size()


def _xla_get_tensor_dimension_size(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The size of a dim as an int32 tensor of no dims, on the device of `tensor`. Shapes are known here: no sync."""
    return torch.tensor(tensor.shape[dim], dtype=torch.int32, device=tensor.device)


_get_xla_tensor_dimension_size = _xla_get_tensor_dimension_size


def _get_xla_tensor_shape_type(tensor: torch.Tensor) -> str:
    """XLA's name of the dtype: 'f16'."""
    return KINDS[tensor.dtype]


def _xla_get_tensor_id(tensor: torch.Tensor) -> int:
    """A number for the tensor's memory: tensors that share memory have one, as tied weights have there."""
    return tensor.untyped_storage().data_ptr()


def _xla_spmd_all_reduce(
    reduce_type: str, input: torch.Tensor, scale: float, groups: Sequence[Sequence[int]]
) -> torch.Tensor:
    """A manual tensor reduced over groups of devices, times `scale`; without groups over all devices."""
    return _scaled(all_reduce(input, reduce_type, _of_devices(groups)), scale)


def _xla_spmd_reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Sequence[Sequence[int]],
) -> torch.Tensor:
    """The sum of a manual tensor over groups of devices, times `scale`; each device gets a part of it.

    Raises:
        UnsupportedOpError: `reduce_type` is not a sum.
    """
    if reduce_type != xla_model.REDUCE_SUM:
        raise UnsupportedOpError(
            f"_xla_spmd_reduce_scatter has no reduction {reduce_type!r}",
            where=source.user_line(),
            next="use 'sum', or _xla_spmd_all_reduce",
        )
    return _scaled(reduce_scatter(input, scatter_dim, _of_devices(groups)), scale)


def _of_devices(groups: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    return groups or [list(range(num_devices()))]


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1.0 else tensor * scale


def _xla_set_use_full_mat_mul_precision(use_full_mat_mul_precision: bool = True) -> None:
    """Does nothing: products are made in the precision of their operands."""


def _xla_set_mat_mul_precision(precision: str = "highest") -> None:
    """Does nothing: products are made in the precision of their operands."""


def _get_xla_tensors_dot(tensors: Sequence[torch.Tensor]) -> str:
    return ltc.dump_ir(tensors, "dot")


def _get_xla_tensor_debug_info(tensor: torch.Tensor) -> str:
    """Description of a tensor: its device, its value or the pending ops; nothing is run."""
    if not xla_model.is_xla_tensor(tensor):
        return "Not a XLATensor\n"
    shape, graph = shape_text(tensor), pending_graph([tensor])
    pending = graph_text(graph, {}, _hardware(tensor)) if graph.nodes else "None\n"
    marked = _get_xla_sharding_spec(tensor)
    device, hardware = str(tensor.device), _hardware(tensor)
    if runtime.is_spmd():
        device = hardware = "SPMD:0"
    handle = "Deleted" if buffer_donors.is_deleted(tensor) else "None"
    if handle == "None" and not graph.nodes and not _is_placecholder(tensor):
        (handle,) = map(str, _get_tensors_handle([tensor]))
    kind, of_data = "XLAData", f"\n  Data Device: {hardware}\n  Data Shape: {shape}\n"
    if marked and not graph.nodes:  # torch_xla keeps a node for such a value
        kind, pending = "XLAShardedData", graph_text(graph, {0: tensor}, hardware)
        of_data += f"  OpSharding: {marked}\n  NumShards: {num_devices()}\n"
    data = "None" if graph.nodes else f"{of_data}  Data Handle: {handle}"
    on_host = None
    if runtime.is_spmd() and not graph.nodes and not marked:
        if is_deferred(tensor):
            on_host, data = f"with size {list(tensor.shape)}", "None"
        else:
            pending = graph_text(graph, {0: tensor}, hardware)
    return (
        f"XLATensor {{\nTensorID: {_xla_get_tensor_id(tensor)}\nDevice: {device}\nXLA Shape: {shape}\n"
        f"ShardingSpec: {marked or None}\nIR: {pending}{kind}: {data}\n"
        f"Tensor on host: {on_host}\n}}\n"
    )


def _xla_tensors_report(nodes_threshold: int, device: str = "", max_frames: int = 0) -> str:
    """Describe the live tensors of a device that at least `nodes_threshold` pending ops lead to; nothing is run.

    Under LTC_IR_DEBUG each has its ops with the user's lines.

    Args:
        device: of all devices by default.
        max_frames: accepted; one frame of the user is known of each op.
    """
    rows = []
    for t in [item for item in gc.get_objects() if type(item) is LazyTensor]:
        if device and str(t.device) != device:
            continue
        num_ops = len(pending_graph([t]).nodes)
        if num_ops < nodes_threshold:
            continue
        rows.append(
            f"[Tensor: id={_xla_get_tensor_id(t)}, shape={shape_text(t)}, device={t.device}, ir_nodes={num_ops}]"
        )
        if num_ops and ltc.settings.ir_debug:
            rows.append(f"Frames:\n{ltc.dump_ir([t])}")
    return "".join(f"{row}\n" for row in rows)


def _get_tensors_xla_device_data_node(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[int], list[torch.Tensor]]:
    """The tensors that have values and that the pending ops of `tensors` read: their ids, and they themselves.

    A value whose tensors are gone is not among them. Nothing is run.
    """
    graph = pending_graph(tensors)
    used = {number for node in graph.nodes for number in references(node)} & graph.inputs.keys()
    if not used:
        return [], []
    trace = context_of(next(t._h for t in tensors if isinstance(t, LazyTensor))).trace
    there: dict[int, torch.Tensor] = {}
    for t in [item for item in gc.get_objects() if type(item) is LazyTensor]:
        value = base_of(t._h).value
        if type(t._h) is Cell and t._h.trace is trace and value.epoch == trace.epoch:
            there.setdefault(value.index, t)
    found = [there[number] for number in graph.inputs if number in used and number in there]
    return [_xla_get_tensor_id(t) for t in found], found


def _get_xla_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """The pending graph as torch_xla writes it, with a tensor that has its value as `xla::device_data`."""
    if not tensors:
        return "IR {\n}\n"
    ready = {k: t for k, t in enumerate(tensors) if not pending_graph([t]).outputs}
    return graph_text(pending_graph(tensors), ready, _hardware(tensors[0]))


def _hardware(tensor: torch.Tensor) -> str:
    return f"{ltc.lazy_device_hw()}:{tensor.device.index}"
