"""A function of tensors as an FX graph without writes. Used by `functional_nodes` and `inductor.lowering.lower`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ltc_core.program.lowering.retrace import Refused

__all__ = ["Decompositions", "trace"]

Tensor = torch.Tensor
Decompositions = Mapping[torch._ops.OpOverload, Callable[..., Any]]


def trace(
    run: Callable[..., Any],
    fakes: Sequence[Tensor],
    mode: FakeTensorMode,
    decompositions: Decompositions,
) -> GraphModule:
    """FX graph of a function of tensors, without ops that write.

    Raises:
        Refused: an op could not be traced, or its writes could not be made functional.
    """
    module = _traced(run, fakes, mode, decompositions)
    if _writing(module):  # decompositions run after functionalization, so their writes are left
        module = _traced(module, fakes, mode, decompositions)
        left = _writing(module)
        if left:
            raise Refused(str(left[0]), "it writes in a way that cannot be made functional")
    return module


def _traced(
    run: Callable[..., Any],
    fakes: Sequence[Tensor],
    mode: FakeTensorMode,
    decompositions: Decompositions,
) -> GraphModule:
    free = _FreeLinear() if mode.shape_env is not None else nullcontext()
    with torch.no_grad(), mode, free:
        return make_fx(
            torch.func.functionalize(run, remove="mutations"),
            decomposition_table=dict(decompositions),
            tracing_mode="real",
        )(*fakes)


_LINEAR = (torch.nn.functional.linear, torch.ops.aten.linear.default)


class _FreeLinear(TorchFunctionMode):
    """A linear layer as its product and sum: the kernel of `linear` turns free sizes into numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func not in _LINEAR:
            return func(*args, **(kwargs or {}))

        def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            product = input.matmul(weight.t())
            return product if bias is None else product + bias

        return call(*args, **(kwargs or {}))


def _writing(module: GraphModule) -> list[torch._ops.OpOverload]:
    """Ops of a traced graph that write. The compiler removes clones, so such a write would overwrite inputs."""
    ops = [n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [op for op in ops if op._schema.is_mutable]
