"""A function of tensors as an FX graph without writes. Used by `functional_nodes` and `inductor.lowering.lower`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

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
    with torch.no_grad(), mode:
        return make_fx(
            torch.func.functionalize(run, remove="mutations"),
            decomposition_table=dict(decompositions),
            tracing_mode="real",
        )(*fakes)


def _writing(module: GraphModule) -> list[torch._ops.OpOverload]:
    """Ops of a traced graph that write. The compiler removes clones, so such a write would overwrite inputs."""
    ops = [n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [op for op in ops if op._schema.is_mutable]
