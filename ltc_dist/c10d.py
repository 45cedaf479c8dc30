"""torch.distributed on tensors of the device: `init_process_group()`, `dist.all_reduce(t)`, DistributedDataParallel.

For scripts that speak torch.distributed. Each call waits for its tensors, lets gloo work on copies of them on the CPU,
and brings back what it wrote: a cut of the graph a call. `optimizer_step` records the same in the graph instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

import ltc_core as ltc
from ltc_core.rules import RULES
from ltc_core.settings import settings

__all__ = ["register"]

dist: Any = torch.distributed  # its stubs lack what is used here

# Ops of c10d, and whether they write their first argument: their schemas do not say.
_WRITES: dict[str, bool] = {
    "_allgather_base_": True,
    "_reduce_scatter_base_": True,
    "allgather_": True,
    "allgather_coalesced_": True,
    "allgather_into_tensor_coalesced_": True,
    "allreduce_": True,
    "allreduce_coalesced_": True,
    "alltoall_": True,
    "alltoall_base_": True,
    "barrier": False,
    "broadcast_": True,
    "gather_": True,
    "recv_": True,
    "recv_any_source_": True,
    "reduce_": True,
    "reduce_scatter_": True,
    "reduce_scatter_tensor_coalesced_": True,
    "scatter_": True,
    "send": False,
}

# Waiting again for what gloo has received would wait for the next message.
_WAITED_FOR_ONCE = ("recv_", "recv_any_source_")


def register() -> None:
    """Let groups made from now on take tensors of the device, and their ops run."""
    name = settings.device_name
    dist.Backend.default_device_backend_map.setdefault(name, "gloo")
    devices = dist.Backend.backend_capability["gloo"]
    if name not in devices:
        devices.append(name)
    for op_name, writes in _WRITES.items():
        packet = getattr(torch.ops.c10d, op_name, None)
        if packet is not None:  # not all are in every torch
            RULES[packet.default] = _on_cpu(packet.default, writes)


def _on_cpu(op: Any, writes: bool) -> Callable[..., Any]:
    name = op._opname
    names = [a.name for a in op._schema.arguments]
    group = names.index("process_group")

    def call(*args: Any, **kwargs: Any) -> Any:
        _serve_cpu(dist.ProcessGroup.unbox(args[group]))
        here = [ltc.to_cpu(a) for a in args]
        result = op(*here, **kwargs)
        work = result[-1] if isinstance(result, tuple) else result
        if name == "send":
            return work
        dist.Work.unbox(work).wait()
        if name in _WAITED_FOR_ONCE:
            work = _done.boxed()
        if writes:
            _bring_back(args[0], here[0])
        return (args[0], work) if isinstance(result, tuple) else work

    return call


class _Done(dist.Work):  # type: ignore[misc]
    """Work that was waited for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_done = _Done()  # kept: c10d looks for the methods of an object that must still be there


def _serve_cpu(group: Any) -> None:
    """Let a group that was made for the device alone take tensors of the CPU too."""
    cpu, device = torch.device("cpu"), torch.device(settings.device_name)
    if cpu not in group._device_types:
        group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, group._get_backend(device))


def _bring_back(there: Any, here: Any) -> None:
    if isinstance(there, torch.Tensor):
        if ltc.is_lazy_tensor(there):
            there.detach().copy_(here)
        return
    for one, other in zip(there, here, strict=True):
        _bring_back(one, other)
