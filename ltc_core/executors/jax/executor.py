"""The JAX executor: graphs on XLA, on a CPU, a GPU or a TPU, with today's PyTorch.

`executors.device_program` divides a graph; a subgraph becomes a program before its first run (`launch`). Made by
`executors.make`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ltc_core.executors.device_program import DeviceExecutor
from ltc_core.executors.jax.device import JaxDevice
from ltc_core.executors.jax.unsent import Unsent
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.sharding import Part, Sharding

__all__ = ["JaxExecutor"]


class JaxExecutor(DeviceExecutor):
    """Runs graphs on one device of JAX.

    Args:
        index: index of the device in this process.

    Raises:
        DeviceError: JAX cannot be loaded, or has no such device.
    """

    name = "jax"

    def __init__(self, index: int) -> None:
        runtime = JaxDevice(index)
        super().__init__(runtime)
        self._jax = runtime
        # The programs of all processes run in the same order in each of them.
        runtime.mesh.before_programs_of_job = lambda: self.wait_for_programs()

    def synchronize(self) -> None:
        jax.effects_barrier()

    @property
    def has_loops(self) -> bool:
        return True

    @property
    def num_mesh_devices(self) -> int:
        return len(self._jax.mesh.devices)

    def expect_mesh(self) -> None:
        self._jax.mesh.is_expected = True

    def defer(self, tensor: torch.Tensor, meta: TensorMeta) -> Any:
        return self._jax.defer(tensor, meta)

    def is_deferred(self, data: Any) -> bool:
        return type(data) is Unsent and self._jax.is_on_host(data.held)

    def send(self, data: Any) -> None:
        self._jax.sent([data])

    def shard(self, data: Any, sharding: Sharding) -> Any:
        return self._jax.shard(data, sharding)

    def divide_uploads(self, mesh_shape: Callable[[], Sequence[int]]) -> None:
        self._jax.mesh.divide_uploads(mesh_shape)

    def use_mesh(self) -> None:
        self._jax.mesh.is_used = True

    def is_manual(self, data: Any, meta: TensorMeta) -> bool:
        return self._jax.is_manual(data, meta)

    def join(self, part: torch.Tensor, sharding: Sharding) -> tuple[Any, torch.Size]:
        data = self._jax.join(part, sharding)
        return data, torch.Size(data.shape)

    def parts(self, data: Any, dtype: torch.dtype) -> list[Part]:
        return self._jax.parts(data, dtype)

    def send_part(self, values: torch.Tensor, device: int) -> Any:
        return self._jax.send_part(values, device)

    def assemble(self, parts: list[Any], like: Any) -> Any:
        return self._jax.assemble(parts, like)

    def memory_info(self) -> tuple[int, int]:
        found = self._jax.device.memory_stats()
        if not found or "bytes_limit" not in found:  # a CPU does not report it
            return super().memory_info()
        return found["bytes_limit"] - found["bytes_in_use"], found["bytes_limit"]

    @property
    def kind(self) -> str:
        return str(self._jax.device.device_kind)
