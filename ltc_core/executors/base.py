"""What an executor is: four verbs, one file for each executor.

`upload` puts a CPU tensor on the device, `fetch` brings one back, `compile` makes a program of a graph, and the
program runs. Programs run in the device's worker, one after the other.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import psutil
import torch

from ltc_core.graph.ir import Graph, Node, TensorMeta

__all__ = ["CPU", "Cause", "Executor", "NodeFailure", "Program", "Remains", "Stopped", "run_to_end"]


CPU = torch.device("cpu")
# A failed node, and what it raised.
Cause = tuple[Node, BaseException]


class NodeFailure(Exception):
    """A node failed while a program ran.

    Attributes:
        node: the node; None if the program cannot tell.
        salvaged: output -> data, for outputs that do not depend on the node or keep an earlier version.
        older: those of them that keep an earlier version (see `passes.MemoryPlan.origins`).
        causes: output -> the failure that it is lost to, where that is not this one.
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
class Remains:
    """What is left of a graph when an op of it fails, or an input of it is lost.

    Attributes:
        data: output -> its data, for the outputs that have some.
        older: those of them that have an earlier version than the graph was to make.
        causes: output -> the failure that it is lost to, where that is not the first one.
    """

    data: dict[int, Any]
    older: frozenset[int]
    causes: dict[int, Cause]


class Stopped(Exception):
    """A node of a subgraph failed.

    Attributes:
        node: the node; None if it may be any of the subgraph's.
        values: number -> data, for all values that there were then. What the node was to make is not among them.
    """

    def __init__(self, node: Node | None, values: dict[int, Any]) -> None:
        super().__init__(str(node))
        self.node = node
        self.values = values


def run_to_end(steps: Generator[None, None, list[Any]]) -> list[Any]:
    """Go through the steps of a run without a pause, and give its results."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Program(abc.ABC):
    """A compiled graph.

    Attributes:
        peak_bytes: what its intermediate values hold at most.
        reuses: output -> donated input whose memory it takes.
        holds_lock: whether a run holds Python's lock most of the time, so that nothing is recorded beside it.
    """

    peak_bytes: int = 0
    reuses: dict[int, int]
    holds_lock: bool = True

    @abc.abstractmethod
    def run(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
        """Run on the data of the graph's inputs, in order; give the data of its outputs, in order.

        Donated inputs may be overwritten.

        Raises:
            NodeFailure: chained to what the op raised.
        """

    def run_in_steps(
        self, inputs: Sequence[Any], scalars: Sequence[Any]
    ) -> Generator[None, None, list[Any]]:
        """Run as `run` does, but yield where the program waits for other processes: the rest may run elsewhere."""
        return self.run(inputs, scalars)
        yield

    def salvage(self, inputs: Sequence[Any], scalars: Sequence[Any]) -> Remains:
        """Outputs that do not depend on the inputs that are lost (None), or exist in some version without a run."""
        return Remains({}, frozenset(), {})


class Executor(abc.ABC):
    """Where graphs run.

    Args:
        hardware: PyTorch's device that computes.
    """

    name: str

    def __init__(self, hardware: torch.device = CPU) -> None:
        self.hardware = hardware

    @abc.abstractmethod
    def upload(self, tensor: torch.Tensor) -> Any:
        """Copy a CPU tensor to the device."""

    def upload_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Copy CPU tensors to the device, in one transfer where it has such."""
        return [self.upload(tensor) for tensor in tensors]

    @abc.abstractmethod
    def copy(self, data: Any) -> Any:
        """Copy data within the device."""

    def nbytes(self, meta: TensorMeta) -> int:
        """Return the bytes the device holds for a tensor of this meta."""
        return meta.nbytes

    @abc.abstractmethod
    def view(self, data: Any, meta: TensorMeta) -> torch.Tensor:
        """Return data of the device as a CPU tensor of this meta, without a copy where that is possible."""

    @abc.abstractmethod
    def compile(self, graph: Graph) -> Program:
        """Make a program of a graph."""

    @property
    def kind(self) -> str:
        """Name the model of the hardware, such as 'NVIDIA H100' or 'TPU v4'."""
        return self.hardware.type.upper()

    def synchronize(self) -> None:
        """Wait until everything that programs have started is done."""
        return

    def empty_cache(self) -> None:
        """Return memory that is kept for the next step to the system."""
        return

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the memory that values live in."""
        host = psutil.virtual_memory()
        return host.available, host.total
