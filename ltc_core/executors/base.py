"""Abstract `Executor` and `Program`: one file or folder implements each executor.

An executor uploads CPU tensors (`upload`), copies data on the device (`copy`), returns data as CPU tensors (`view`) and
makes a `Program` of a graph (`compile`). The programs of a device run one after the other, in its worker thread or in
the thread that cuts. Called by `runtime.device_context` and `runtime.launch`.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import psutil
import torch

from ltc_core.graph.ir import Graph, Node, TensorMeta

__all__ = [
    "CPU",
    "Cause",
    "Executor",
    "NodeFailure",
    "Program",
    "Salvaged",
    "SubgraphFailure",
    "run_to_end",
]


CPU = torch.device("cpu")
# A failed node, and the exception it raised.
Cause = tuple[Node, BaseException]


class NodeFailure(Exception):
    """A node failed while a program ran.

    Attributes:
        node: the node; None if the program does not know which one.
        salvaged: output -> data, for outputs that do not depend on the node or keep an earlier version.
        older: the salvaged outputs that keep an earlier version (`graph.passes.MemoryPlan.origins`).
        causes: lost output -> the failure that it is lost to, if that is not this one.
    """

    def __init__(
        self,
        node: Node | None,
        salvaged: dict[int, Any],
        older: frozenset[int] = frozenset(),
        causes: Mapping[int, Cause] | None = None,
    ) -> None:
        super().__init__(str(node))
        self.node = node
        self.salvaged = salvaged
        self.older = older
        self.causes = causes or {}


@dataclasses.dataclass(slots=True)
class Salvaged:
    """What is left of a graph's outputs after an op failed, or after an input was lost.

    Attributes:
        data: output -> its data, for the outputs that are not lost.
        older: the outputs in `data` that have an earlier version than the graph was to make.
        causes: lost output -> the failure that it is lost to, if that is not the first one.
    """

    data: dict[int, Any]
    older: frozenset[int]
    causes: dict[int, Cause]


class SubgraphFailure(Exception):
    """A node of a subgraph failed.

    Attributes:
        node: the node; None if it may be any node of the subgraph.
        values: number -> data, for all values alive at the failure; the results of the failed node are not among them.
    """

    def __init__(self, node: Node | None, values: dict[int, Any]) -> None:
        super().__init__(str(node))
        self.node = node
        self.values = values


def run_to_end(steps: Generator[None, None, list[Any]]) -> list[Any]:
    """Results of `run_in_steps`, run to its end without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Tier(enum.Enum):
    """How a program runs.

    Attributes:
        OP_BY_OP: Python calls each op, or launches it; it holds the GIL, so that recording cannot run beside it.
        REPLAY: C++ calls each op; values are eager's.
        COMPILED: code of its own runs; with another number of threads it may round otherwise.
    """

    OP_BY_OP = enum.auto()
    REPLAY = enum.auto()
    COMPILED = enum.auto()


class Program(abc.ABC):
    """A compiled graph.

    Attributes:
        peak_bytes: peak memory of its intermediate values.
        reuses: output -> donated input whose memory it overwrites.
        tier: how the next run will be made.
    """

    peak_bytes: int = 0
    reuses: dict[int, int]
    tier: Tier = Tier.OP_BY_OP

    @abc.abstractmethod
    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """Data of the graph's outputs, from the data of its inputs, both in the graph's order.

        Donated inputs may be overwritten.

        Raises:
            NodeFailure: an op failed; chained to the op's exception.
        """

    def run_in_steps(
        self, inputs: Sequence[Any], scalars: Sequence[Any]
    ) -> Generator[None, None, list[Any]]:
        """As `run`, but yield before the program blocks on a collective: the rest may run in another thread."""
        return self.run(inputs, scalars)
        yield

    def prefer(self, tier: Tier) -> None:
        """Run in this tier from now on, if there is a choice: steps of the script have shown it to be quicker."""
        return

    def salvage(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> Salvaged:
        """What is left of the outputs if the graph cannot run because inputs are lost (None).

        An output is left if it does not depend on a lost input, or has an earlier version among the inputs.
        """
        return Salvaged({}, frozenset(), {})


class Executor(abc.ABC):
    """Compiles and runs the graphs of one device.

    Args:
        hardware: the PyTorch device that computes.
    """

    name: str

    def __init__(self, hardware: torch.device = CPU) -> None:
        self.hardware = hardware

    @abc.abstractmethod
    def upload(self, tensor: torch.Tensor) -> Any:
        """Copy a CPU tensor to the device."""

    def upload_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Copy CPU tensors to the device; in one transfer, if the device can."""
        return [self.upload(tensor) for tensor in tensors]

    @abc.abstractmethod
    def copy(self, data: Any) -> Any:
        """Copy data within the device."""

    def nbytes(self, meta: TensorMeta) -> int:
        """Bytes that a tensor of this meta takes on the device."""
        return meta.nbytes

    @abc.abstractmethod
    def view(self, data: Any, meta: TensorMeta) -> torch.Tensor:
        """Data of the device as a CPU tensor of this meta; not copied if that is possible."""

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
