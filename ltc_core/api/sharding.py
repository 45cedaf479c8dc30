"""Divide tensors over the devices of a mesh. Called by `ltc_dist.spmd`.

A tensor that is computed is divided at once. A tensor that is only recorded, or a view, is written over with itself in
the graph, by an op that carries the sharding.
"""

from __future__ import annotations

import torch

from ltc_core import errors, source
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.sharding import SHARD, Sharding
from ltc_core.runtime.devices import context, context_of
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell, Value, base_of
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap

__all__ = ["Sharding", "join", "num_mesh_devices", "parts_of", "shard"]


def num_mesh_devices(device: torch.device) -> int:
    """Devices that a mesh can have: one, unless the executor can divide tensors."""
    return context(device.index or 0).executor.num_mesh_devices


def shard(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Divide a tensor, in place; its values, gradients and saved versions stay what they are.

    A dimension whose size cannot be divided evenly is not divided.

    Raises:
        DeviceError: it is no tensor of the device, or its executor has not that many devices.
    """
    tensor = _on_device(tensor, "sharded")
    ctx = context_of(tensor._h)
    count = ctx.executor.num_mesh_devices
    if len(sharding.devices) > count:
        raise errors.DeviceError(
            f"a mesh of {len(sharding.devices)} devices cannot be on {ctx.device}",
            got=f"executor {ctx.executor.name}, which has {count}",
            where=source.user_line(),
            next="LTC_EXECUTOR=jax divides tensors over all devices of the process; on a CPU LTC_NUM_DEVICES=8 makes 8",
        )
    if len(sharding.devices) == 1:
        return
    spec = tuple(
        axes if size % sharding.parts(dim) == 0 else ()
        for dim, (axes, size) in enumerate(zip(sharding.spec, tensor.shape, strict=True))
    )
    sharding = Sharding(sharding.devices, sharding.mesh, spec)
    handle = tensor._h
    if type(handle) is Cell:
        buffer = handle.value.buffer
        if buffer is not None and not buffer.is_pending and buffer.error is None:
            data = ctx.executor.shard(buffer.take(), sharding)
            handle.rebind(Value.of(Buffer.ready(ctx.memory, data, buffer.nbytes)))
            return
    with torch.no_grad():
        whole = tensor.data  # no write that autograd counts: the values stay the same
        whole.copy_(SHARD(whole, sharding.text))


def join(part: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """A tensor of which each process of the job has a part: its size is that of all parts together.

    Args:
        part: this process's, whose values are computed.
    """
    part = _on_device(part, "joined")
    ctx = context_of(part._h)
    data, size = ctx.executor.join(part.detach().cpu(), sharding)
    meta = TensorMeta.packed(size, part.dtype)
    buffer = Buffer.ready(ctx.memory, data, ctx.executor.nbytes(meta))
    return wrap(Cell(ctx.trace, Value.of(buffer), meta))


def parts_of(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Number of each device of this process that has a part of a tensor, and a copy of the part on the CPU.

    Raises:
        DeviceError: it is no tensor of the device.

    Cost: cuts, and waits for the tensor.
    """
    tensor = _on_device(tensor, "read by parts")
    ctx = context_of(tensor._h)
    if ctx.executor.num_mesh_devices == 1:
        return [(0, tensor.detach().cpu())]
    whole = tensor if type(tensor._h) is Cell else tensor.clone()
    assert isinstance(whole, LazyTensor)
    data = ctx.value_data(base_of(whole._h), "Shards")
    return ctx.executor.parts(data)


def _on_device(tensor: torch.Tensor, verb: str) -> LazyTensor:
    """The tensor, if it is on the device."""
    if isinstance(tensor, LazyTensor):
        return tensor
    raise errors.DeviceError(
        f"only tensors on the device can be {verb}",
        got=f"a tensor on {tensor.device}"
        if isinstance(tensor, torch.Tensor)
        else type(tensor).__name__,
        where=source.user_line(),
        next=f"move it there first: tensor.to({settings.device_name!r})",
    )
