"""Abstract `Executor`: one file or folder implements each.

An executor uploads CPU tensors (`upload`), copies data on the device (`copy`), returns data as CPU tensors (`view`) and
makes a `Program` of a graph (`compile`). The programs of a device run one after the other, in its worker thread or in
the thread that cuts. Called by `runtime.device_context` and `runtime.launch`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from ltc_core.graph.ir import Graph, TensorMeta
from ltc_core.graph.sharding import Part, Sharding
from ltc_core.program.program import Program

__all__ = ["CPU", "Executor"]

CPU = torch.device("cpu")


class Executor(abc.ABC):
    """Compiles and runs the graphs of one device.

    Args:
        hardware: the PyTorch device that computes.
    """

    name: str

    def __init__(self, hardware: torch.device = CPU) -> None:
        self.hardware = hardware
        # Waits for the programs that were handed over; the device sets it.
        self.wait_for_programs: Callable[[], object] = lambda: None

    def begin_thread(self) -> None:  # noqa: B027 - most need nothing
        """Prepare a thread that will run programs; called in it, once."""

    @abc.abstractmethod
    def upload(self, tensor: torch.Tensor) -> Any:
        """Copy a CPU tensor to the device."""

    def upload_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Copy CPU tensors to the device; in one transfer, if the device can."""
        return [self.upload(tensor) for tensor in tensors]

    def defer(self, tensor: torch.Tensor, meta: TensorMeta) -> Any:
        """Data of a CPU tensor that come to the device when they are first used; None if they are uploaded at once.

        Args:
            meta: the strides that the data are to have.
        """
        return None

    def is_deferred(self, data: Any) -> bool:
        """Whether data still wait on the host for their first use."""
        return False

    def send(self, data: Any) -> None:
        """Bring data that wait on the host to the device, as their first use does."""
        return

    @abc.abstractmethod
    def copy(self, data: Any) -> Any:
        """Copy data within the device."""

    def nbytes(self, meta: TensorMeta) -> int:
        """Bytes that a tensor of this meta takes on the device."""
        return meta.nbytes

    @abc.abstractmethod
    def view(self, data: Any, meta: TensorMeta) -> torch.Tensor:
        """Data of the device as a CPU tensor of this meta; not copied if that is possible."""

    @property
    def takes_dynamic_shapes(self) -> bool:
        """Whether one program may serve inputs of many sizes (`Graph.dynamic`)."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether a graph that comes back is compiled, for its sizes alone."""
        return False

    @property
    def is_compiling(self) -> bool:
        """Whether its compiler uses the cores for a while: steps take longer than they will."""
        return False

    @property
    def keeps_host_tensors(self) -> bool:
        """Whether the data of a value is a CPU tensor in the value's dtype, and ops may be called on it one by one."""
        return False

    @property
    def has_loops(self) -> bool:
        """Whether a loop (`graph.loop`) is one of its programs, and not calls of the body one after the other."""
        return False

    @property
    def num_mesh_devices(self) -> int:
        """Devices over which tensors of this device can be divided."""
        return 1

    @property
    def has_mesh(self) -> bool:
        """Whether data were divided: from then on values that replace them have to be divided alike."""
        return False

    def place_like(self, data: Any, other: Any) -> Any:
        """Data divided as other data of the same size are."""
        return data

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Data divided over the devices of a mesh; for executors with more than one."""
        raise NotImplementedError(f"the executor {self.name} has no mesh")

    def divide_uploads(self, mesh_shape: Callable[[], Sequence[int]]) -> None:
        """Divide large tensors that are uploaded from now on over a mesh; for those executors, too.

        Args:
            mesh_shape: called at each upload; the devices of the mesh along each of its axes.
        """
        raise NotImplementedError(f"the executor {self.name} has no mesh")

    def expect_mesh(self) -> None:
        """Expect that tensors are going to be divided over the devices of a mesh: see `defer`."""
        return

    def use_mesh(self) -> None:
        """Prepare for programs over all devices of the mesh; for those executors, too."""
        raise NotImplementedError(f"the executor {self.name} has no mesh")

    def is_manual(self, data: Any, meta: TensorMeta) -> bool:
        """Whether each device of the mesh has a value of its own of a tensor of this meta."""
        return False

    def join(self, part: torch.Tensor, sharding: Sharding) -> tuple[Any, torch.Size]:
        """Data whose part in this process is a CPU tensor, and their size; for those executors, too."""
        raise NotImplementedError(f"the executor {self.name} has no mesh")

    def parts(self, data: Any, dtype: torch.dtype) -> list[Part]:
        """The parts of data of this type on the devices of this process; for those executors, too."""
        raise NotImplementedError(f"the executor {self.name} has no mesh")

    def send_part(self, values: torch.Tensor, device: int) -> Any:
        """A CPU tensor as a part on a device of the mesh; for those executors, too."""
        raise NotImplementedError(f"the executor {self.name} has no mesh")

    def assemble(self, parts: list[Any], like: Any) -> Any:
        """Data of the parts on this process's devices, divided as other data are; for those executors, too."""
        raise NotImplementedError(f"the executor {self.name} has no mesh")

    @abc.abstractmethod
    def compile(self, graph: Graph) -> Program:
        """Program that runs a graph."""

    @property
    def kind(self) -> str:
        """Model of the hardware, such as 'NVIDIA H100' or 'TPU v4'."""
        return self.hardware.type.upper()

    def synchronize(self) -> None:
        """Wait until all work that programs have started is done."""
        return

    def empty_cache(self) -> None:
        """Return cached memory to the system."""
        return

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the memory that holds the values."""
        host = psutil.virtual_memory()
        return host.available, host.total
