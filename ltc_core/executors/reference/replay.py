"""Native replay: the instructions of a reference program run in C++, without Python and without the GIL.

`build` hands the nodes of a graph to `csrc/ltc_replay.cpp`. Where a node is no call of a PyTorch kernel (a
collective, an op of the script), or its arguments do not fit at a run (a lens that copies, a number of another type),
that node alone runs in Python. Values and errors are those of the reference executor; a failed op leaves the values for
the same salvage. Called by `reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ltc_core.executors import core_sharing
from ltc_core.executors.reference import element_groups
from ltc_core.graph.ir import Node, Ref, Scalar, Write, references
from ltc_core.graph.lens import real_view
from ltc_core.graph.op_schema import runs_with_grad
from ltc_core.native_extension import Extension
from ltc_core.program.plan import MemoryPlan

__all__ = ["Failed", "Replay", "build", "extension", "outcome"]

extension = Extension("_ltc_replay", Path(__file__).parent / "csrc" / "ltc_replay.cpp", "-O1")

aten = torch.ops.aten
InPython = Callable[[int, dict[int, Any], Sequence[Any]], None]

# The order of `How` in C++. Ops that are not listed are called as they are.
_HOW: dict[torch._ops.OpOverload, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten._reshape_alias.default: 1,
    aten.as_strided.default: 2,
    aten._conj.default: 3,
    aten._neg_view.default: 4,
    aten.view.dtype: 5,
    aten.view_as_complex.default: 6,
}


@dataclass(frozen=True)
class Failed:
    """An op failed.

    Attributes:
        position: of its node in the graph.
        error: its exception, as the op raises it in eager.
        values: number -> data, of the values that are alive.
    """

    position: int
    error: BaseException
    values: dict[int, torch.Tensor]


class Replay:
    """A program in C++.

    Attributes:
        program: of the C++ part.
        num_native: number of its nodes that are calls of PyTorch's kernels.
        is_native: whether all of them are.
    """

    def __init__(self, program: Any, num_native: int, is_native: bool) -> None:
        self.program = program
        self.num_native = num_native
        self.is_native = is_native

    def run(
        self, inputs: list[Any], scalars: Sequence[Any], watched: tuple[Any, ...] | None = None
    ) -> list[torch.Tensor] | Failed | None:
        """Outputs of the graph; None if a scalar is no number of Python's, and nothing has run.

        It runs in the state of a new thread, with grad mode off.

        Args:
            inputs: in the graph's order. Those that are donated are taken out: they die at their last use.
            watched: numbers of outputs, how many nodes must have run for them, and what to call with them then.
        """
        return outcome(self.program.run(inputs, list(scalars), *(watched or ())))


def outcome(returned: Any) -> list[torch.Tensor] | Failed | None:
    """What a program of the C++ part has returned, with a type for a failure."""
    return Failed(*returned) if type(returned) is tuple else returned


@functools.cache
def _set_up(native: Any) -> None:
    native.setup(Ref, Scalar, Write, _facts)
    core_sharing.bind(native)


def _loaded() -> Any:
    native = extension.load()
    if native is not None:
        _set_up(native)
    return native


def build(
    nodes: Sequence[Node],
    memory: MemoryPlan,
    is_for_once: bool,
    inputs: Sequence[int],
    donated: frozenset[int],
    outputs: Sequence[tuple[int, bool, torch.dtype]],
    size: int,
    in_python: InPython,
    generator: torch.Generator,
) -> Replay | None:
    """Program for a graph; None if the C++ part cannot be built here.

    Args:
        is_for_once: no groups of ops are looked for.
        outputs: number, whether it is copied, dtype.
        size: one more than the largest number of a value.
        in_python: runs the node at a position on the values of a dict.
        generator: draws, on the hardware, from the states that are values.

    Cost: 3 us a node.
    """
    native = _loaded()
    if native is None:
        return None
    flat = [part for i, copied, _ in outputs for part in (i, int(copied))]
    program = native.program(
        size,
        list(inputs),
        [int(i in donated) for i in inputs],
        flat,
        [dtype for _, _, dtype in outputs],
        in_python,
        generator,
    )
    hardware = generator.device
    device = None if hardware.type == "cpu" else hardware
    given = frozenset(inputs)
    roots = memory.roots
    is_native = [
        program.add(
            node,
            in_place,
            frees,
            references(node),
            roots,
            given,
            runs_with_grad(node.op, node.args),
            device,
        )
        for node, in_place, frees in zip(nodes, memory.in_place, memory.frees, strict=True)
    ]
    if hardware.type == "cpu" and not is_for_once:  # on a GPU one kernel goes through all tensors
        for group in element_groups.find(nodes, memory, is_native):
            dying = [[part for pair in each for part in pair] for each in group.frees]
            program.group(group.first, group.last, group.ends, dying)
    return Replay(program, sum(is_native), all(is_native))


def _facts(op: Any) -> tuple[str, str, int] | None:
    """Name, overload and `How` of an op; None if it stays in Python: it is no kernel, or replaced on real tensors."""
    is_kernel = isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
    if not is_kernel or (real_view(op) is not op and op not in _HOW):
        return None
    return op._schema.name, op._schema.overload_name, _HOW.get(op, 0)
