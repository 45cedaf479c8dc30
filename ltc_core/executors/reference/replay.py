"""Native replay: the instructions of a reference program run in C++, without Python and without the GIL.

`build` hands the prepared nodes of a graph to `csrc/ltc_replay.cpp`. Where a node is no call of a PyTorch kernel (a
collective, an op of the script), or its arguments do not fit at a run (a lens that copies, a number of another type),
that node alone runs in Python. Values and errors are those of the reference executor; a failed op leaves the values for
the same salvage. Called by `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ltc_core.executors.reference import element_groups
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Node, Ref, Scalar, Write, references
from ltc_core.graph.lens import ViewStep, real_view
from ltc_core.graph.op_schema import runs_with_grad
from ltc_core.native_extension import Extension
from ltc_core.program.plan import MemoryPlan

__all__ = ["Failed", "Replay", "build", "extension", "outcome"]

extension = Extension("_ltc_replay", Path(__file__).parent / "csrc" / "ltc_replay.cpp", "-O1")

aten = torch.ops.aten
Row = tuple[Any, ...]
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


def build(
    nodes: Sequence[Node],
    memory: MemoryPlan,
    inputs: Sequence[int],
    donated: frozenset[int],
    outputs: Sequence[tuple[int, bool, torch.dtype]],
    size: int,
    in_python: InPython,
    generator: torch.Generator,
) -> Replay | None:
    """Program for a graph; None if the C++ part cannot be built here.

    Args:
        outputs: number, whether it is copied, dtype.
        size: one more than the largest number of a value.
        in_python: runs the node at a position on the values of a dict.
        generator: draws, on the hardware, from the states that are values.
    Cost:
        10 us a node.
    """
    native = extension.load()
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
    given = frozenset(inputs)
    is_native = []
    for node, in_place, frees in zip(nodes, memory.in_place, memory.frees, strict=True):
        call = _call(program, node, hardware)
        is_native.append(call >= 0)
        writes = [
            part
            for k, (old, reuse) in enumerate(zip(node.writes, in_place, strict=True))
            for part in (old, node.first_write + k, _place(reuse, memory.roots[old] in given))
        ]
        makes = [node.first + k for k, meta in enumerate(node.outs) if meta is not None]
        program.add(
            call,
            writes,
            _results(node) if call >= 0 else (),
            frees,
            list(dict.fromkeys(references(node))),
            makes,
            _state(node),
            *_dtypes(node),
        )
    if hardware.type == "cpu":  # on a GPU one kernel goes through all tensors
        for group in element_groups.find(nodes, memory, is_native):
            dying = [[part for pair in each for part in pair] for each in group.frees]
            program.group(group.first, group.last, group.ends, dying)
    return Replay(program, sum(is_native), all(is_native))


def _call(program: Any, node: Node, hardware: torch.device) -> int:
    """Number of the call of a node; -1 if it is none."""
    if not isinstance(node.op, torch._ops.OpOverload) or node.op.namespace != "aten":
        return -1
    arguments = node.op._schema.arguments
    rows = [_row(program, node, item) for item in node.args]
    for argument in arguments[len(rows) :]:
        if argument.name == "device" and hardware.type != "cpu":
            rows.append(("constant", hardware))
        elif argument.name in node.kwargs:
            rows.append(_row(program, node, node.kwargs[argument.name], argument.name))
        else:
            rows.append(("default",))
    return _made(program, node.op, rows, -1, runs_with_grad(node.op, node.args))


def _made(
    program: Any, op: torch._ops.OpOverload, rows: list[Row], which: int, with_grad: bool
) -> int:
    is_replaced = real_view(op) is not op  # on real tensors another call takes the place of the op
    if ("python",) in rows or (is_replaced and op not in _HOW):
        return -1
    schema = op._schema
    try:
        number: int = program.call(
            schema.name,
            schema.overload_name,
            _HOW.get(op, 0),
            rows,
            which,
            with_grad,
        )
    except TypeError:  # a row does not fit the parameter: Python converts more than C++
        return -1
    return number


def _row(program: Any, node: Node, item: Any, name: str = "") -> Row:
    """An argument as C++ takes it; ("python",) where Python has to make it."""
    kind = type(item)
    if name == "generator" and kind is Write:
        return ("generator",)
    if kind is Ref:
        return ("value", int(item))
    if kind is Scalar:
        return ("scalar", int(item))
    if kind is Write:
        slot = node.first_write + item.base
        if not item.lens:
            return ("value", slot)
        steps = [_step(program, step) for step in item.lens]
        return ("python",) if -1 in steps else ("lens", slot, steps)
    if kind in (list, tuple) and any(type(i) in (Ref, Scalar, Write) for i in leaves(item)):
        rows = [_row(program, node, i) for i in item]
        return ("python",) if ("python",) in rows else ("list", rows)
    return ("constant", item)


def _step(program: Any, step: ViewStep) -> int:
    arguments = step.op._schema.arguments
    rows: list[Row] = [("value", 0), *map(_step_row, step.args)]
    rows += [("default",)] * (len(arguments) - len(rows))
    return _made(program, step.op, rows, -1 if step.which is None else step.which, False)


def _step_row(item: Any) -> Row:
    """An argument of a step of a lens; a size may be a scalar."""
    if type(item) is Scalar:
        return ("scalar", int(item))
    if type(item) is tuple and any(type(i) is Scalar for i in item):
        return ("list", [_step_row(i) for i in item])
    return ("constant", item)


def _place(is_in_place: bool, is_input: bool) -> int:
    """Where a write writes: the order of `Place` in C++."""
    return (2 if is_input else 1) if is_in_place else 0


def _results(node: Node) -> list[int]:
    """(position on the stack, item of the list there or -1, number of the value), one after the other."""
    spec = node.result
    if spec is None or type(spec) is str:
        return []
    if type(spec) is int:
        return [0, -1, node.first + spec]
    if len(node.op._schema.returns) == 1:  # a list of tensors
        return [p for k, s in enumerate(spec) if type(s) is int for p in (0, k, node.first + s)]
    found: list[int] = []
    for position, s in enumerate(spec):
        if type(s) is int and node.outs[s] is not None:
            found += (position, -1, node.first + s)
        elif type(s) in (list, tuple):
            found += [
                p for k, t in enumerate(s) if type(t) is int for p in (position, k, node.first + t)
            ]
    return found


def _state(node: Node) -> int:
    """Number of the value that is the state of the random generator; -1 if the node draws nothing."""
    generator = node.kwargs.get("generator")
    return node.first_write + generator.base if type(generator) is Write else -1


def _dtypes(node: Node) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The default dtype that a node was recorded with, and that of its result; None where it uses none."""
    if not node.uses_default_dtype:
        return None, None
    assert node.outs[0] is not None
    dtype = node.outs[0].dtype
    return (dtype.to_real() if dtype.is_complex else dtype), dtype
