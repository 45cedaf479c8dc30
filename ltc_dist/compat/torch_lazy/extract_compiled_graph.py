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
    """Return a function that runs a copy of the module on the device: tensors of the CPU go in, and come out.

    What the module writes into its arguments is written there.

    Args:
        model: such as what `torch.fx.symbolic_trace` gives.
        example_inputs: for a first call, which builds the graph.

    Cost: a call copies its arguments to the device, copies them and its results back, and waits. Without gradients.

    Source: `torch._lazy.extract_compiled_graph`.
    """
    device = ltc.lazy_device()
    there = copy.deepcopy(model).to(device)

    @torch.no_grad()
    def call(*args: Any) -> Any:
        sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def send(item: Any) -> Any:
            """An argument at two places is sent once: the module may write it."""
            if not isinstance(item, torch.Tensor) or item.device.type == device.type:
                return item
            return sent.setdefault(id(item), (item, item.detach().to(device)))[1]

        result = there(*pytree.tree_map(send, args))
        result, values = ltc.to_cpu((result, [copied for _, copied in sent.values()]))
        for (given, _), value in zip(sent.values(), values, strict=True):
            if not torch.equal(given, value):
                given.copy_(value)
        return result

    call(*copy.deepcopy(tuple(example_inputs)))
    return call
