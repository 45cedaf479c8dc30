"""`torch._lazy.extract_compiled_graph`: a module of the CPU, run on the device as one graph a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import ltc_core as ltc

__all__ = ["extract_compiled_graph"]


def extract_compiled_graph(
    model: torch.nn.Module, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Give a function that runs a copy of the module on the device: tensors of the CPU go in, and come out.

    What the module writes into its arguments is written there.

    Args:
        model: such as what `torch.fx.symbolic_trace` gives.
        example_inputs: for a first call, which builds the graph.

    Cost: a call copies its arguments and results, and waits. Without gradients.

    Source: `torch._lazy.extract_compiled_graph`.
    """
    there = copy.deepcopy(model).to(ltc.lazy_device())

    @torch.no_grad()
    def call(*args: Any) -> Any:
        sent = pytree.tree_map(_sent, args)
        result, written = ltc.to_cpu((there(*sent), sent))
        for arg, now in zip(pytree.tree_leaves(args), pytree.tree_leaves(written), strict=True):
            if isinstance(arg, torch.Tensor) and not torch.equal(arg, now):
                arg.copy_(now)
        return result

    call(*copy.deepcopy(tuple(example_inputs)))
    return call


def _sent(item: Any) -> Any:
    return item.detach().to(ltc.lazy_device()) if isinstance(item, torch.Tensor) else item
