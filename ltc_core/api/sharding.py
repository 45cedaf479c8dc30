"""Divide tensors over the devices of a mesh. Called by `ltc_dist.spmd`.

A tensor that is computed is divided at once. A tensor that is only recorded, or a view, is written over with itself in
the graph, by an op that carries the sharding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.manual_sharding import ALL, FIRST, JOIN, SPLIT, value_error
from ltc_core.graph.sharding import SHARD, Part, Sharding
from ltc_core.runtime.device_context import DeviceContext
from ltc_core.runtime.devices import context, context_of
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell, Value, base_of
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap

__all__ = [
    "NewParts",
    "Part",
    "Sharding",
    "check_on_device",
    "divide_uploads",
    "expect_mesh",
    "is_deferred",
    "join",
    "join_manual",
    "num_mesh_devices",
    "parts_of",
    "shard",
    "split",
]


def num_mesh_devices(device: torch.device) -> int:
    """Devices that a mesh can have: one, unless the executor can divide tensors."""
    return context(device.index or 0).executor.num_mesh_devices


def expect_mesh(device: torch.device) -> None:
    """Send what is uploaded from now on to where it is first used: tensors are going to be sharded.

    No device holds the whole of a tensor that is uploaded and then sharded.
    """
    context(device.index or 0).executor.expect_mesh()


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values wait on the host, because no op uses them yet; those of a pending op are sent."""
    handle = _on_device(tensor, "looked for")._h
    ctx, value = context_of(handle), base_of(handle).value
    if value.buffer is None or not ctx.executor.is_deferred(value.buffer.data):
        return False
    if value.epoch != ctx.trace.epoch:
        return True
    ctx.executor.send(value.buffer.data)
    return False


def divide_uploads(device: torch.device, mesh_shape: Callable[[], Sequence[int]]) -> None:
    """Divide large tensors that come to a device from now on over all devices; one device has them whole.

    Args:
        mesh_shape: called at each upload; the devices along each axis of the mesh.
    """
    if num_mesh_devices(device) > 1:
        context(device.index or 0).executor.divide_uploads(mesh_shape)


def shard(tensor: torch.Tensor, sharding: Sharding) -> None:
    """Divide a tensor, in place; its values, gradients and saved versions stay what they are.

    A dimension whose size cannot be divided evenly is not divided.

    Raises:
        DeviceError: it is no tensor of the device, or its executor has not that many devices.
    """
    tensor = _on_device(tensor, "sharded")
    ctx = context_of(tensor._h)
    _check_mesh(sharding, ctx)
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


def _check_mesh(sharding: Sharding, ctx: DeviceContext) -> None:
    count = ctx.executor.num_mesh_devices
    if len(sharding.devices) > count:
        raise errors.DeviceError(
            f"a mesh of {len(sharding.devices)} devices cannot be on {ctx.device}",
            got=f"executor {ctx.executor.name}, which has {count}",
            where=source.user_line(),
            next="LTC_EXECUTOR=jax divides tensors over all devices of the process; on a CPU LTC_NUM_DEVICES=8 makes 8",
        )


def split(tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """A manual tensor: of the size of one part, with the part of each device on it. Sizes divide evenly.

    Its gradient is whole: of devices with one part the sum.

    Raises:
        DeviceError: as for `shard`.
    """
    return _converted(tensor, sharding, "split", SPLIT, ALL)


def join_manual(tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """The whole tensor that has each device's value of a manual tensor as its part there.

    Of devices with one part, it has the value of the first one, which gets its gradient.

    Raises:
        DeviceError: as for `shard`.
    """
    return _converted(tensor, sharding, "joined", JOIN, FIRST)


def _converted(
    tensor: torch.Tensor, sharding: Sharding, verb: str, op: torch._ops.OpOverload, which: str
) -> torch.Tensor:
    tensor = _on_device(tensor, verb)
    ctx = context_of(tensor._h)
    _check_mesh(sharding, ctx)
    if len(sharding.devices) == 1:
        return tensor.clone()
    ctx.executor.use_mesh()
    return _Converted.apply(tensor, op, sharding.text, which)  # type: ignore[no-any-return, no-untyped-call]


class _Converted(torch.autograd.Function):
    """SPLIT or JOIN; its gradient is the other one, of the same parts."""

    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, op: torch._ops.OpOverload, text: str, which: str
    ) -> torch.Tensor:
        ctx.back = JOIN if op is SPLIT else SPLIT, text, which
        return op(t, text, which)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Converted.apply(gradients[0], *ctx.back), None, None, None  # type: ignore[no-untyped-call]


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


def parts_of(tensor: torch.Tensor, takes_manual: bool = False) -> list[Part]:
    """The parts of a tensor on the devices of this process.

    Args:
        takes_manual: whether it may be a manual tensor. Then each part is all of a device's value.

    Raises:
        DeviceError: it is no tensor of the device.
        ShardingError: it is a manual tensor.

    Cost: cuts, and waits for the tensor; the parts are not read yet.
    """
    tensor = _on_device(tensor, "read by parts")
    ctx = context_of(tensor._h)
    if ctx.executor.num_mesh_devices == 1:
        size = tuple(tensor.shape)
        return [Part(0, (0,) * len(size), size, True, lambda: tensor.detach().cpu())]
    whole = tensor if type(tensor._h) is Cell else tensor.clone()
    assert isinstance(whole, LazyTensor)
    base = base_of(whole._h)
    data = ctx.value_data(base, "Shards")
    parts = ctx.executor.parts(data, tensor.dtype)
    if not ctx.executor.is_manual(data, base.meta):
        return parts
    if not takes_manual:
        raise value_error("a manual tensor has no parts", source.user_line())
    return [_of_one_device(part) for part in parts]


def _of_one_device(part: Part) -> Part:
    """A part of manual data without the dimension of the devices."""
    return dataclasses.replace(
        part, offsets=part.offsets[1:], sizes=part.sizes[1:], read=lambda: part.read()[0]
    )


class NewParts:
    """New values of a tensor, which come to its devices part by part. The tensor stays divided as it is.

    Args:
        tensor: one for which `takes_parts` is true.

    Cost: cuts, and waits for the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = _on_device(tensor, "written by parts")
        parts = parts_of(tensor)
        self.sizes = {part.offsets: part.sizes for part in parts}
        self._devices = [(part.device, part.offsets) for part in parts]
        self._sent: dict[int, Any] = {}

    @staticmethod
    def takes_parts(tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device that has a mesh, and is no view of another tensor."""
        if not isinstance(tensor, LazyTensor) or type(tensor._h) is not Cell:
            return False
        return context_of(tensor._h).executor.num_mesh_devices > 1

    def put(self, offsets: tuple[int, ...], values: torch.Tensor) -> None:
        """Send the part that begins there to each device that has it. The last part replaces the tensor's values.

        Args:
            values: a CPU tensor of the tensor's type, which nobody changes afterwards.
        """
        handle = self._tensor._h
        assert type(handle) is Cell
        ctx = context_of(handle)
        for device, own in self._devices:
            if own == offsets:
                self._sent[device] = ctx.executor.send_part(values, device)
        if len(self._sent) < len(self._devices):
            return
        old = ctx.value_data(handle, "Shards")
        data = ctx.executor.assemble([self._sent[device] for device, _ in self._devices], old)
        nbytes = ctx.executor.nbytes(handle.meta)
        handle.rebind(Value.of(Buffer.ready(ctx.memory, data, nbytes)))
        torch.autograd.graph.increment_version(self._tensor)
        self._sent.clear()


def check_on_device(tensor: torch.Tensor, verb: str) -> None:
    """Check that a tensor is on the device.

    Raises:
        DeviceError: it is not; `verb` says what it was to be.
    """
    _on_device(tensor, verb)


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
