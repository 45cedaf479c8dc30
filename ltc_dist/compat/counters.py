"""torch_xla's counters that ltc does not count: they are computed when a script asks for them.

In: the counters of `ltc_core.metrics`, and the ops that are pending. Out: `xla::<op>` with the pending ops, as
torch_xla counts an op when it is recorded, and the counters of `_NAMES`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping

from ltc_core import metrics
from ltc_core.runtime.devices import count_pending_ops
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.compat import auto_sharding

__all__ = ["register"]

# Uploads are not cached here, each is a miss. A tensor is created by an upload or by an op.
_NAMES = (
    "CompileWithAutoSharding",
    "CreateCompileHandles",
    "CreateXlaTensor",
    "DestroyXlaTensor",
    "DeviceDataCacheMiss",
    "ExecuteComputation",
    "ExecuteReplicated",
    "ReplicateShardedData",
    "VirtualDeviceUsage",
)


def register() -> None:
    """Add torch_xla's counters and metrics to those of `ltc_core.metrics`."""
    metrics.register_counters(_is_derived, _read)
    metrics.register_metric("TensorToData", of="TransferToDeviceTime")


def _is_derived(name: str) -> bool:
    return name in _NAMES or name.startswith(_prefix())


def _prefix() -> str:
    return f"{settings.device_name}::"


def _read(totals: Mapping[str, int]) -> dict[str, int]:
    pending: Counter[str] = Counter()
    for op, n in count_pending_ops().items():
        pending[metrics.op_counter(op)] += n
    uploads = totals.get("CreateDataHandles", 0)
    ops = sum(n for name, n in totals.items() if name.startswith(_prefix()))
    created = uploads + ops + sum(pending.values())
    alive = sum(type(item) is LazyTensor for item in gc.get_objects())
    spmd = settings.peek("spmd")
    runs = totals.get("ExecuteComputation", 0) if spmd else 0  # its programs run on all devices
    fetched = metrics.metric_data("InboundData") if spmd else None
    return {
        **pending,
        # With `use_spmd` a tensor is one of all devices, which is put together when the host reads it.
        "ReplicateShardedData": fetched[0] if fetched is not None else 0,
        "VirtualDeviceUsage": uploads if spmd else 0,
        "ExecuteComputation": -runs,
        "ExecuteReplicated": runs,
        "CompileWithAutoSharding": auto_sharding.count_compiles(totals),
        "CreateCompileHandles": totals.get("UncachedCompile", 0),
        "CreateXlaTensor": created,
        "DestroyXlaTensor": max(created + totals.get("CreateXlaTensor", 0) - alive, 0),
        "DeviceDataCacheMiss": uploads,
    }
