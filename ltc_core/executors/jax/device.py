"""A device of JAX: transfers, and programs.

Data on the device are `jax.Array`s; data that stay on the host are CPU tensors. On a CPU both can be the same memory,
which nobody writes. Used by `executor`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax import numpy as jnp

from ltc_core import metrics, source
from ltc_core.errors import DeviceError, listed
from ltc_core.executors.compiled_again import Change
from ltc_core.executors.device_program import DeviceRuntime, Launch
from ltc_core.executors.jax.arrays import as_array, as_tensor
from ltc_core.executors.jax.cache import ProgramsOnDisk
from ltc_core.executors.jax.collectives import Collectives, has_collectives
from ltc_core.executors.jax.launch import JaxLaunch
from ltc_core.executors.jax.library import devices, wide_types
from ltc_core.executors.jax.lowering import LOWERING
from ltc_core.executors.jax.manual import is_manual
from ltc_core.executors.jax.mesh import DeviceMesh, chosen_devices, is_divided, named, offsets_of
from ltc_core.executors.jax.precision import precision
from ltc_core.executors.jax.table import dtype_of
from ltc_core.executors.jax.unsent import Unsent, held
from ltc_core.graph import manual_sharding
from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.graph.sharding import Part, Sharding
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.program.subgraph import Subgraph
from ltc_core.settings import settings
from ltc_core.timeline import slices

__all__ = ["JaxDevice"]

Tensor = torch.Tensor


class JaxDevice(DeviceRuntime):
    """One device of this process.

    Args:
        index: index of the device in this process.

    Raises:
        DeviceError: JAX cannot be loaded, or has no such device.
    """

    shows_hlo = True

    def __init__(self, index: int) -> None:
        found = devices()
        if index >= len(found):
            raise DeviceError(
                f"{settings.device_name}:{index} has no device of JAX",
                got=f"{len(found)} in this process: {listed(list(map(str, found)))}",
                next="lower LTC_NUM_DEVICES, or set it before anything uses JAX",
            )
        self.device = found[index]
        self.name = f"jax:{index}"
        self.index = index
        self._is_cpu = self.device.platform == "cpu"
        self.types = _types(self.device.platform)
        self._on_disk = ProgramsOnDisk(self.device)
        self.mesh = DeviceMesh()
        self._collectives = Collectives()

    @property
    def has_mesh(self) -> bool:
        return self.mesh.is_used

    @property
    def refused_ops(self) -> frozenset[str]:
        return LOWERING.refused_ops

    def refuses(self, node: Node, metas: Mapping[int, TensorMeta]) -> bool:
        return LOWERING.refuses(node, metas)

    def reduces_in_graph(self, node: Node) -> bool:
        return self._collectives.reduces_in_graph(node)

    def stored(self, dtype: torch.dtype, where: str = "") -> torch.dtype:
        found = self.types.of(dtype)
        try:
            dtype_of(found)
        except NotImplementedError as error:
            raise DeviceError(
                f"a tensor of {dtype} cannot be on {settings.device_name}:{self.index}: JAX has no such type",
                got=str(dtype),
                where=where,
                next="convert it on the CPU, or keep it there",
            ) from error
        return found

    def is_on_host(self, data: Any) -> bool:
        return isinstance(data, Tensor)

    def send(self, tensors: Sequence[Tensor]) -> list[Any]:
        with wide_types():
            arrays = [as_array(t) for t in tensors]
            # On a CPU this is the tensor's own memory. JAX copies it if a program would write there.
            return jax.device_put(arrays, self.device, may_alias=True)  # type: ignore[no-any-return]

    def upload(self, tensors: Sequence[Tensor]) -> list[Any]:
        divisions = [self.mesh.division_of_upload(t.shape) for t in tensors]
        whole = iter(self.send([t for t, at in zip(tensors, divisions, strict=True) if at is None]))
        with wide_types():
            return [
                next(whole) if at is None else self.mesh.lay(t, at)
                for t, at in zip(tensors, divisions, strict=True)
            ]

    def defer(self, tensor: Tensor, meta: TensorMeta) -> Unsent | None:
        """The values of a tensor, which are sent to where they are used first; None if they are to be sent at once."""
        if not self.mesh.is_expected or self.mesh.division_of_upload(tensor.shape) is not None:
            return None
        laid_out = meta.laid_out(tensor).detach()
        return Unsent(laid_out.to(self.stored(tensor.dtype), copy=True))

    def sent(self, data: Sequence[Any]) -> Sequence[Any]:
        if not self.mesh.is_expected:
            return data
        late = [(d, t) for d in data if type(d) is Unsent and isinstance(t := d.held, Tensor)]
        if late:
            arrays = self._sent_late([tensor for _, tensor in late])
            for (d, _), array in zip(late, arrays, strict=True):
                d.held = array
        return list(map(held, data))

    def _sent_late(self, tensors: Sequence[Tensor], sharding: Any = None) -> list[Any]:
        """Send tensors that waited; how they are divided, if they are."""
        with slices.watched("upload", "transfers") as seen, metrics.timer("TransferToDeviceTime"):
            num_bytes = sum(t.nbytes for t in tensors)
            if seen is not None:
                seen.note(bytes=num_bytes, tensors=len(tensors))
            metrics.observe("OutboundData", num_bytes)
            if sharding is None:
                return self.send(tensors)
            with wide_types():
                return [self.mesh.lay(t, sharding) for t in tensors]

    def _divided(self, data: Any, sharding: Any) -> Any:
        """Data divided; what is on the host is sent so."""
        if self.is_on_host(data):
            return self._sent_late([data], sharding)[0]
        with wide_types():
            return self.mesh.lay(data, sharding)

    def fetch(self, data: Sequence[Any]) -> list[Tensor]:
        data = list(map(held, data))
        there = [d for d in data if not self.is_on_host(d)]
        if self.mesh.is_of_job:
            divided = [d for d in there if is_divided(d)]
            self.mesh.wait_for(divided)
        jax.block_until_ready(there)
        return [d if self.is_on_host(d) else self._fetched(d) for d in data]

    def _fetched(self, data: Any) -> Tensor:
        if is_divided(data):
            with wide_types():
                return as_tensor(self.mesh.here(data))
        return self.shown(data).clone() if self._is_cpu else as_tensor(data)

    def shown(self, data: Any) -> Tensor:
        """Data of a CPU device as a tensor in the same memory. Drop it soon: memory that is seen is not donated."""
        if self.is_on_host(data):
            return data  # type: ignore[no-any-return]
        if is_divided(data):
            return self._fetched(data)
        return torch.utils.dlpack.from_dlpack(data)

    def _checked(self, data: Any) -> Tensor:
        """Data of a CPU device whose elements are to be checked: of divided data the own parts, one after the other."""
        if self.is_on_host(data) or not is_divided(data) or data.is_fully_addressable:
            return self.shown(data)
        parts = [torch.utils.dlpack.from_dlpack(shard.data) for shard in data.addressable_shards]
        return torch.cat([part.flatten() for part in parts])

    def copy(self, data: Any) -> Any:
        data = held(data)
        if self.is_on_host(data):
            return data.clone()
        with wide_types():
            return jnp.copy(data)

    def compile(self, subgraph: Subgraph, inputs: Sequence[Any]) -> Launch:
        shown = self._checked if self._is_cpu else None
        divided = [x.sharding if is_divided(x) else None for x in inputs]
        joint = self._collectives if has_collectives(subgraph) else None
        manual = frozenset(
            number
            for (number, meta), data in zip(subgraph.graph.inputs.items(), inputs, strict=False)
            if is_manual(data, meta)
        )
        return JaxLaunch(
            subgraph, self.device, self._on_disk, shown, self.mesh, divided, manual, joint
        )

    # -- dividing ------------------------------------------------------------------------------

    def placement(self, inputs: Sequence[Any]) -> Hashable:
        return precision(), self.mesh.placement(inputs)

    def change(self, before: Any, after: Any) -> Change:
        (old_precision, old), (new_precision, new) = before, after
        if old_precision != new_precision:
            return Change("precision of products")
        nowhere = [""] * len(old or new)
        whole = "whole on one device"
        pairs = enumerate(zip(old or nowhere, new or nowhere, strict=True))
        return Change("shardings", {k: (a or whole, b or whole) for k, (a, b) in pairs if a != b})

    def is_manual(self, data: Any, meta: TensorMeta) -> bool:
        return is_manual(held(data), meta)

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Data divided over devices.

        Raises:
            ShardingError: they are those of a manual tensor.
        """
        data = held(data)
        if data.ndim > len(sharding.spec):
            raise manual_sharding.value_error(
                "a manual tensor cannot be divided over a mesh", source.user_line()
            )
        self.mesh.is_used = True
        return self._divided(data, named(sharding))

    def join(self, part: Tensor, sharding: Sharding) -> Any:
        """Data whose parts on this process's devices are those of a tensor."""
        self.mesh.is_used = True
        with wide_types():
            return self.mesh.joined(part, named(sharding))

    def place_like(self, data: Any, other: Any) -> Any:
        """Data divided as other data are."""
        given, data, other = data, held(data), held(other)
        if (
            other is None
            or self.is_on_host(other)
            or not is_divided(other)
            or data.ndim != other.ndim  # a manual tensor, or its memory
            or self._lie_alike(data, other)
        ):
            return given
        return self._divided(data, other.sharding)

    def _lie_alike(self, data: Any, other: Any) -> bool:
        return not self.is_on_host(data) and data.sharding == other.sharding

    def parts(self, data: Any, dtype: torch.dtype) -> list[Part]:
        """The parts on this process's devices, in the order of the mesh."""
        data = held(data)
        numbers = {device: k for k, device in enumerate(self.mesh.devices)}
        if self.is_on_host(data):
            own, size = numbers[self.device], tuple(data.shape)
            return [Part(own, (0,) * len(size), size, True, lambda: data.to(dtype, copy=True))]
        chosen = chosen_devices(data.sharding, data.shape)
        found = [
            Part(
                numbers[shard.device],
                offsets_of(shard.index),
                shard.data.shape,
                shard.device in chosen,
                functools.partial(_read, shard.data, dtype),
            )
            for shard in data.addressable_shards
        ]
        return sorted(found, key=lambda part: part.device)

    def send_part(self, values: Tensor, device: int) -> Any:
        """A CPU tensor on one device of the mesh."""
        with wide_types():
            array = as_array(values.to(self.stored(values.dtype)))
            return jax.device_put(array, self.mesh.devices[device])

    def assemble(self, parts: Sequence[Any], like: Any) -> Any:
        """Data whose parts on this process's devices are these, divided as other data are."""
        like = held(like)
        if self.is_on_host(like) or not is_divided(like):
            (whole,) = parts
            return whole
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


def _read(data: Any, dtype: torch.dtype) -> Tensor:
    with wide_types():
        return as_tensor(data).to(dtype)


def _types(platform: str) -> StorageTypes:
    """Stored types: PyTorch's on a CPU and a GPU; a TPU has no float64."""
    if platform == "tpu":
        return StorageTypes.for_xla()
    asked = StorageTypes.from_settings()
    halves = {torch.complex32: torch.complex64}
    return StorageTypes({**halves, **(asked.stored if asked is not None else {})})
