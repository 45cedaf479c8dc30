"""`torch.export` of what is on the device: it is traced on the CPU, with stand-ins for tensors of the device.

PyTorch's tracer cannot look into a lazy tensor. The program that is returned has the tensors of the device as its
weights, and takes such tensors. PyTorch has no hook for that, so `register_torch_export` replaces the function.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["cpu_module", "register_torch_export"]

Tensor = torch.Tensor
_export: Callable[..., Any] = torch.export.export


def register_torch_export() -> None:
    """Replace `torch.export.export`."""
    torch.export.export = export


@functools.wraps(_export)
def export(
    mod: torch.nn.Module, args: Any, kwargs: Any = None, *others: Any, **options: Any
) -> Any:
    """`torch.export.export`, also of modules and arguments that are on the device. Nothing recorded runs."""
    if not isinstance(mod, torch.nn.Module):
        return _export(mod, args, kwargs, *others, **options)  # which says what is wrong with it
    stand_ins: dict[int, Tensor] = {}
    given = pytree.tree_map_only(LazyTensor, lambda t: _stand_in(t, stand_ins), (args, kwargs))
    devices = [t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, LazyTensor)]
    with _replaced(mod, stand_ins) as held:
        devices += [t.device for t in held.values() if isinstance(t, LazyTensor)]
        found = _export(mod, *given, *others, **options)
    if devices:
        _put_on(found, held, devices[0])
        found.example_inputs = (tuple(args), dict(kwargs or {}))
    return found


def cpu_module(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """The module of a program as it was traced: constants and what it makes are on the CPU, weights where they are."""
    found = torch.export.ExportedProgram.module(program, check_guards=False)  # guards fix sizes
    for part in found.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, LazyTensor):
                setattr(part, name, value.cpu())
    return found


def _stand_in(t: Tensor, stand_ins: dict[int, Tensor]) -> Tensor:
    """A tensor on the CPU like `t`, without its values; one for all that are the same tensor."""
    if id(t) not in stand_ins:
        made = torch.zeros(t.shape, dtype=t.dtype)
        stand_ins[id(t)] = (
            torch.nn.Parameter(made, t.requires_grad)
            if isinstance(t, torch.nn.Parameter)
            else made.requires_grad_(t.requires_grad)
        )
    return stand_ins[id(t)]


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, stand_ins: dict[int, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Replace lazy parameters and buffers of a module by stand-ins. Yields name -> original parameter or buffer."""
    held: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    tables: list[dict[str, Any]] = [
        t for m in module.modules() for t in (m._parameters, m._buffers)
    ]
    before = [
        (table, name, t)
        for table in tables
        for name, t in table.items()
        if isinstance(t, LazyTensor)
    ]
    try:
        for table, name, t in before:
            table[name] = _stand_in(t, stand_ins)
        yield held
    finally:
        for table, name, t in before:
            table[name] = t


def _put_on(program: Any, held: Mapping[str, Tensor], device: torch.device) -> None:
    """Move the weights and constants of a program to the device; those named in `held` become its tensors."""
    for table in (program.state_dict, program.constants):
        for name, value in list(table.items()):
            if name in held:
                table[name] = held[name]
            elif isinstance(value, Tensor) and not isinstance(value, LazyTensor):
                table[name] = value.to(device)
    program.__class__ = _class()
    program.device = device


@functools.cache
def _class() -> Any:
    """Subclass of PyTorch's `ExportedProgram`, whose graph is on the CPU, and whose tensors are on the device."""
    base: Any = torch.export.ExportedProgram

    class Program(base):  # type: ignore[misc]
        device: torch.device

        def module(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
            made = super().module(*args, **kwargs)
            for part in made.modules():
                if isinstance(part, torch.fx.GraphModule):
                    _make_on(part, self.device)
            return made  # type: ignore[no-any-return]

        def run_decompositions(self, *args: Any, **kwargs: Any) -> Any:
            held = {**self.state_dict, **self.constants}
            cpu = {name: _stand_in(t, {}) for name, t in held.items() if isinstance(t, LazyTensor)}
            tables = (self.state_dict, self.constants)
            self.__class__ = base
            try:
                for table in tables:
                    table.update({name: cpu[name] for name in table if name in cpu})
                made = self.run_decompositions(*args, **kwargs)
            finally:
                for table in tables:
                    table.update({name: held[name] for name in table})
                self.__class__ = Program
            _put_on(made, held, self.device)
            return made

    Program.__name__ = Program.__qualname__ = base.__name__
    return Program


def _make_on(module: torch.fx.GraphModule, device: torch.device) -> None:
    """Make what a graph makes on a device."""
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            wanted = None if "_assert" in str(node.target) else device
            node.kwargs = {**node.kwargs, "device": wanted}
    module.recompile()
