"""The compiler's lowering of `own_memory`'s ops, and the check of what the compiler made of them.

Used by `build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from ltc_core.executors.inductor.lowering.own_memory import BEFORE_WRITES, OWN
from ltc_core.graph.ir import TensorMeta

__all__ = ["AliasingError", "Lowerings", "check_outputs", "origin"]

aten = torch.ops.aten


class AliasingError(Exception):
    """A compiled subgraph would return other memory, or another dtype or shape, than the plan counts on."""


class Lowerings:
    """Registers the lowerings, and keeps what was lowered with them.

    Attributes:
        graph: the compiler's graph that was lowered last; None before the first.
    """

    def __init__(self) -> None:
        self.graph: GraphLowering | None = None
        self._owned: set[str] = set()
        register_lowering(OWN, type_promotion_kind=None)(self._own)
        register_lowering(BEFORE_WRITES, type_promotion_kind=None)(self._before_writes)

    def check(self, metas: Sequence[TensorMeta]) -> None:
        """Check that the outputs of the last graph are what the plan counts on (`check_outputs`)."""
        if not metas:
            return
        if self.graph is None:
            raise AliasingError("the compiler did not lower the outputs")
        check_outputs(self.graph.graph_outputs, self.graph.graph_inputs, metas)

    def _own(self, x: Any, output: int) -> Any:
        if self.graph is not V.graph:
            self.graph = V.graph
            self._owned = set()
        name = _memory_of_its_own(x)
        if name is None or name in self._owned:
            x = ir.ExternKernel.copy_input(x)
            name = x.get_name()
        self._owned.add(name)
        return x

    def _before_writes(self, x: Any, output: int) -> Any:
        viewed = origin(x)
        if isinstance(viewed, ir.InputBuffer) and viewed.get_name() in _written():
            return ir.ExternKernel.copy_input(x)
        if not isinstance(x.data, ir.StorageBox):
            _realize(x)
        return x


def check_outputs(
    outputs: Sequence[Any], inputs: Collection[str], metas: Sequence[TensorMeta]
) -> None:
    """Check the outputs of the compiler's graph.

    Args:
        inputs: names of its inputs.
        metas: what the plan counts on.

    Raises:
        AliasingError: two outputs share memory, one is memory of an input, or one has another dtype or size.
    """
    names = [output.get_name() for output in outputs]
    for k, (output, name, meta) in enumerate(zip(outputs, names, metas, strict=True)):
        if name in inputs:
            raise AliasingError(f"output {k} is the memory of input {name}")
        if name in names[:k]:
            raise AliasingError(f"output {k} is the memory of output {names.index(name)}")
        size = [int(n) for n in output.get_size()]
        if output.get_dtype() is not meta.dtype or size != list(meta.size):
            raise AliasingError(f"output {k} is {output.get_dtype()}{size}, not {meta}")


def _memory_of_its_own(x: Any) -> str | None:
    """Name of the buffer that is all of this value and that this graph has allocated for it; None if there is none."""
    box = x.data
    if not isinstance(box, ir.StorageBox):  # a view
        return None
    box.realize()
    buffer = box.data
    if not isinstance(buffer, ir.Buffer) or isinstance(buffer, ir.InputBuffer):
        return None
    if isinstance(buffer, ir.OperationBuffer) and buffer.get_inputs_that_alias_output():
        return None
    layout = buffer.get_layout()
    if isinstance(layout, ir.NonOwningLayout | ir.MutationLayoutSHOULDREMOVE) or layout.offset != 0:
        return None
    return buffer.get_name()


def origin(x: Any) -> Any:
    """What this value is, or is a view of: a buffer, or a computation that has none yet."""
    while isinstance(x, ir.MutableBox | ir.BaseView):
        x = x.data
    return x


def _realize(view: Any) -> None:
    """Compute what `view` views into a buffer.

    Else the compiler writes a view element by element, as it computes what is viewed: `x.view(-1).flip(0)` written into
    `x` would read elements that it has overwritten.
    """
    while not isinstance(view, ir.StorageBox):
        view = view.data
    view.realize()


def _written() -> set[str]:
    """Names of the inputs that this graph overwrites."""
    nodes = V.graph.current_node.graph.nodes
    return {str(node.args[0].target) for node in nodes if node.target is aten.copy_.default}
