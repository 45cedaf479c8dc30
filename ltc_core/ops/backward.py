"""Backward passes over lazy tensors run in the thread that calls them.

Autograd has a thread for each device. That thread may still hold values when backward has returned, so that a cut finds
other values alive than in the step before; waking it is also slower. So a pass that reaches a lazy tensor runs with
multithreading off; the user's `torch.autograd.set_multithreading_enabled` is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import Variable

from ltc_core.errors import DeviceError
from ltc_core.runtime.found_steps import note_backward
from ltc_core.settings import settings

__all__ = ["note_crossing", "use_calling_thread"]

_is_multithreaded = torch._C._is_multithreading_enabled
_set_multithreaded = torch._C._set_multithreading_enabled


_crosses = False


def note_crossing() -> None:
    """Note that an autograd graph leaves the device, so that a backward pass may begin elsewhere. Cost: 30 ns."""
    global _crosses
    _crosses = True


class _Engine(torch._C._ImperativeEngine):
    """PyTorch's engine, in place of the one that `torch.autograd` calls."""

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_on_cuda(outputs):
            raise DeviceError(
                "backward() on a tensor of the device 'cuda' is not possible in a program that has imported ltc",
                got="PyTorch's autograd serves one kind of accelerator in a process: pytorch/pytorch#161129",
                next=f"train on the device {settings.device_name!r} with LTC_DEVICE=cuda, which computes on the "
                "GPU, or in a program without ltc",
            )
        note_backward()
        if not _is_multithreaded() or not _comes_to_lazy(outputs):
            return super().run_backward(outputs, *args, **kwargs)
        _set_multithreaded(False)
        try:
            return super().run_backward(outputs, *args, **kwargs)
        finally:
            _set_multithreaded(True)


def _is_on_cuda(outputs: Iterable[Any]) -> bool:
    """Whether a pass begins at PyTorch's own tensors on a GPU. Cost: 50 ns."""
    return any(isinstance(output, torch.Tensor) and output.is_cuda for output in outputs)


def _comes_to_lazy(outputs: Iterable[Any]) -> bool:
    """Whether a pass that begins at these tensors, or edges, reaches a tensor of the device."""
    name = settings.device_name
    nodes = []
    for output in outputs:
        if not isinstance(output, torch.Tensor):  # an edge: (node, number of its output)
            nodes.append(output[0])
            if _is_lazy(output[0], name):
                return True
        elif output.device.type == name:
            return True
        else:
            nodes.append(output.grad_fn)
    return _crosses and _any_lazy(nodes, name)


def _is_lazy(node: Any, name: str) -> bool:
    return any(meta.device.type == name for meta in node._input_metadata)


def _any_lazy(nodes: list[Any], name: str) -> bool:
    """Search an autograd graph that begins on another device. Cost: about 1 us a node."""
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _is_lazy(node, name):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def use_calling_thread() -> None:
    """Install the engine; called once, when the device is registered."""
    if type(Variable._execution_engine) is not _Engine:
        Variable._execution_engine = _Engine()
