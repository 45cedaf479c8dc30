"""One node as the reference executor runs it in Python: a call of ATen with arguments that are prepared once.

An instruction is data: the op, where its arguments come from, and what is to be done about dtypes. What is known only
at a run is asked there: the default dtype at that time, and whether an op has a kernel for a narrow dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ltc_core.graph.arguments import leaves, map_leaves, place_results
from ltc_core.graph.ir import Node, Ref, Scalar, Write
from ltc_core.graph.lens import Lens, ViewStep, close_lens, open_lens, real_view
from ltc_core.graph.op_schema import runs_with_grad
from ltc_core.program.lowering.default_dtype import in_recorded_dtype
from ltc_core.program.passes.narrow_dtypes import StorageTypes

__all__ = ["Instruction"]


class Instruction:
    """One node with prepared arguments: constants are in place, values and scalars are filled in at each run.

    Attributes:
        node: what it computes.
        args, kwargs: with constants in place.
        refs, numbers, nested: positions of the arguments that are values, scalars, and made of both.
        named: named arguments that have values or scalars.
        draws: number of the position that the op draws from, if it does.
        writes: for each of its writes, the old value, the new one, and whether it is in place.
        frees: values that are freed after it.
        with_grad: whether the kernel is to make what its backward reads.
        types: the dtypes that values are stored in; None: those that they report.
    """

    __slots__ = (
        "args", "draws", "first", "frees", "kwargs", "named", "nested", "node", "numbers", "refs",
        "result", "types", "with_grad", "writes",
    )  # fmt: skip

    def __init__(
        self,
        node: Node,
        in_place: Sequence[bool],
        frees: tuple[int, ...],
        types: StorageTypes | None,
        hardware: torch.device,
    ) -> None:
        self.node, self.types = node, types
        self.with_grad = runs_with_grad(node.op, node.args)
        self.first = node.first
        self.frees = frees
        self.result = node.result
        self.writes = tuple(
            (old, node.first_write + k, reuse)
            for k, (old, reuse) in enumerate(zip(node.writes, in_place, strict=True))
        )
        self.draws: int | None = None
        self.args: list[Any] = list(node.args)
        found: tuple[list[Any], ...] = ([], [], [])
        for position, item in enumerate(node.args):
            self._prepare(position, item, *found)
        self.refs, self.numbers, self.nested = map(tuple, found)
        self.kwargs = node.kwargs
        if hardware.type != "cpu" and _takes_device(node):
            self.kwargs = {**node.kwargs, "device": hardware}
        self.named = {k: v for k, v in node.kwargs.items() if _is_filled(v)}
        if self.named:
            self.kwargs = {k: v for k, v in self.kwargs.items() if k not in self.named}
        generator = self.named.pop("generator", None)
        if isinstance(generator, Write):
            self.draws = node.first_write + generator.base

    def _prepare(self, position: int, item: Any, refs: Any, numbers: Any, nested: Any) -> None:
        if type(item) is Ref:
            refs.append((position, int(item)))
        elif type(item) is Write and not item.lens:
            refs.append((position, self.node.first_write + item.base))
        elif type(item) is Scalar:
            numbers.append((position, int(item)))
        elif _is_filled(item):
            nested.append((position, item))

    def run(self, values: Any, scalars: Sequence[Any], generator: torch.Generator) -> None:
        for old, new, reuse in self.writes:
            values[new] = values[old] if reuse else values[old].clone()
        args = self.args.copy()
        for position, i in self.refs:
            args[position] = values[i]
        for position, i in self.numbers:
            args[position] = scalars[i]
        pending: list[Any] = []
        for position, item in self.nested:
            args[position] = self._fill(item, values, scalars, pending)
        kwargs = self.kwargs
        if self.named:
            kwargs = {
                **kwargs,
                **{k: self._fill(v, values, scalars, pending) for k, v in self.named.items()},
            }
        if self.draws is None:
            result = self._compute(args, kwargs)
        else:
            state = values[self.draws]
            generator.set_state(state)
            result = self._compute(args, {**kwargs, "generator": generator})
            state.copy_(generator.get_state())
        if pending:
            close_lens(pending)
        if self.result is not None:
            place_results(self.result, result, values, self.first)
        for i in self.frees:
            values[i] = None

    def _compute(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = self._call_in_recorded_dtype if self.node.uses_default_dtype else self._call
        if self.types is None:
            return call(*args, **kwargs)
        return self.types.call(self.node.op, call, args, kwargs)

    def _call_in_recorded_dtype(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op in the dtype that it was recorded with: the default dtype may have changed since."""
        given, named = in_recorded_dtype(self.node, args, kwargs, torch.get_default_dtype())
        result = self._call(*given, **named)
        if isinstance(result, torch.Tensor):
            assert self.node.outs[0] is not None
            return result.to(self.node.outs[0].dtype)
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call = real_view(self.node.op)
        if not self.with_grad:
            return call(*args, **kwargs)
        with torch.enable_grad():
            return call(*args, **kwargs)

    def _fill(self, item: Any, values: Any, scalars: Sequence[Any], pending: list[Any]) -> Any:
        kind = type(item)
        if kind is Ref:
            return values[item]
        if kind is Scalar:
            return scalars[item]
        if kind is Write:
            whole = values[self.node.first_write + item.base]
            if not item.lens:
                return whole
            part, copies = open_lens(whole, _sized(item.lens, scalars))
            pending += copies
            return part
        if kind in (list, tuple):
            return [self._fill(i, values, scalars, pending) for i in item]
        return item


def _sized(lens: Lens, scalars: Sequence[Any]) -> Lens:
    """A lens with the sizes of this run (`Graph.dynamic`)."""
    if not any(type(i) is Scalar for step in lens for i in leaves(step.args)):
        return lens
    of_run = partial(map_leaves, lambda i: scalars[i] if type(i) is Scalar else i)
    return tuple(ViewStep(step.op, of_run(step.args), step.which) for step in lens)


def _takes_device(node: Node) -> bool:
    return any(a.name == "device" for a in node.op._schema.arguments)


def _is_filled(item: Any) -> bool:
    """Whether an argument has values or scalars to fill in at run time."""
    return any(type(i) in (Ref, Scalar, Write) for i in leaves(item))
