"""The functions of `lazy_tensor_core._LAZYC` that scripts call; most begin with `_ltc_init_ts_backend()`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import ltc_core as ltc
from ltc_dist.compat.torch_lazy import get_tensor_id
from ltc_dist.compat.torch_lazy.computation import (
    get_graph_hash,
    get_tensors_ts_device_data_node,
    run_cached_graph,
)
from ltc_dist.compat.torch_lazy.ts_backend import init
from ltc_dist.compat.torch_xla._XLAC import (
    _get_xla_tensors_dot,
    _xla_counter_names,
    _xla_counter_value,
    _xla_get_cpu_tensors,
    _xla_get_default_device,
    _xla_get_devices,
    _xla_get_replication_devices_count,
    _xla_memory_info,
    _xla_metric_data,
    _xla_metric_names,
    _xla_metrics_report,
    _xla_real_devices,
    _xla_set_default_device,
    _xla_wait_device_ops,
)

__all__ = [
    "_get_graph_hash",
    "_get_ltc_tensors_backend",
    "_get_ltc_tensors_dot",
    "_get_ltc_tensors_text",
    "_get_ltc_tensors_ts_device_data_node",
    "_ltc_counter_names",
    "_ltc_counter_value",
    "_ltc_enable_reuse_ir",
    "_ltc_get_cpu_tensors",
    "_ltc_get_default_device",
    "_ltc_get_devices",
    "_ltc_get_replication_devices_count",
    "_ltc_get_tensor_id",
    "_ltc_init_ts_backend",
    "_ltc_memory_info",
    "_ltc_metric_data",
    "_ltc_metric_names",
    "_ltc_metrics_report",
    "_ltc_real_devices",
    "_ltc_set_default_device",
    "_ltc_step_marker",
    "_ltc_sync_multi",
    "_ltc_wait_device_ops",
    "_run_cached_graph",
]

_ltc_init_ts_backend = init
_ltc_get_tensor_id = get_tensor_id
_ltc_counter_names, _ltc_counter_value = _xla_counter_names, _xla_counter_value
_ltc_metric_names, _ltc_metric_data = _xla_metric_names, _xla_metric_data
_ltc_metrics_report, _ltc_memory_info = _xla_metrics_report, _xla_memory_info
_ltc_wait_device_ops, _ltc_get_cpu_tensors = _xla_wait_device_ops, _xla_get_cpu_tensors
_ltc_get_devices, _ltc_real_devices = _xla_get_devices, _xla_real_devices
_ltc_get_default_device, _ltc_set_default_device = _xla_get_default_device, _xla_set_default_device
_ltc_get_replication_devices_count = _xla_get_replication_devices_count
_get_ltc_tensors_text, _get_ltc_tensors_dot = ltc.dump_ir, _get_xla_tensors_dot
_get_ltc_tensors_backend = ltc.dump_ir
_get_ltc_tensors_ts_device_data_node = get_tensors_ts_device_data_node
_run_cached_graph = run_cached_graph


def _ltc_enable_reuse_ir(enabled: bool = True) -> None:
    """Does nothing: what was recorded before is always found again."""


def _get_graph_hash(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    return get_graph_hash([tensors] if isinstance(tensors, torch.Tensor) else tensors)


def _ltc_sync_multi(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str],
    wait: bool = True,
    sync_ltc_data: bool = True,
) -> None:
    ltc.sync_multi(tensors, devices, wait)


def _ltc_step_marker(device: str = "", devices: Sequence[str] = (), wait: bool = True) -> None:
    ltc.mark_step(wait, device=device)
