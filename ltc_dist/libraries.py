"""Libraries that choose a device by themselves take this one: accelerate, and the Trainer of transformers with it.

They know CUDA and others by name, and would train on the CPU without a word, in a job each process by itself. Called by
the launcher for the script that it runs, and where LTC_AUTOLOAD asks for it; a script calls `use_device()` itself.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ltc_core.settings import settings

__all__ = ["use_device"]


def use_device() -> None:
    """Let accelerate choose the device of this process, and join the processes of a job by gloo.

    What the script says itself comes first: `Accelerator(cpu=True)`, `TrainingArguments(use_cpu=True)`, another device
    in ACCELERATE_TORCH_DEVICE, or torch_xla, installed or served by `ltc_dist.compat`. Call it before `Accelerator` or
    `TrainingArguments` is made. Processes that the script starts choose for themselves. Cost: none until one of the
    libraries is imported.
    """
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Has the modules of `_CHANGES` changed when they have been imported."""

    def __init__(self) -> None:
        self._awaited = set(_CHANGES)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._awaited:
            return None
        self._awaited.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _CHANGES[name](module)

            loader.exec_module = exec_module
        return spec


def _change_accelerate(state: Any) -> None:
    """Replace the method in which accelerate looks for the hardware, and decides how processes are joined."""
    kinds, choose = state.DistributedType, state.PartialState._prepare_backend
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def prepare(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        is_ours = self.device is None or self.device.type == settings.device_name
        found = choose(self, cpu, *args, **kwargs)
        if not is_ours:
            return found
        if cpu or found[1] is kinds.XLA:
            self.device = None  # what the script says comes before the variable
            return found
        _tell()
        self.device = torch.device(settings.device_name)
        is_job = int(os.environ.get("WORLD_SIZE", 1)) > 1
        return ("gloo", kinds.MULTI_CPU) if is_job else (None, kinds.NO)

    state.PartialState._prepare_backend = prepare


def _change_transformers(module: Any) -> None:
    """Let the Trainer take the device of accelerate, as it does with torch_xla."""
    cls = module.TrainingArguments
    found = cls.__dict__["_setup_devices"]
    set_up = found.func if hasattr(found, "func") else found.fget
    if hasattr(set_up, "__wrapped__"):
        return

    @functools.wraps(set_up)
    def call(self: Any) -> Any:
        device, state = set_up(self), self.distributed_state
        if state is None or state.device.type != settings.device_name:
            return device
        self._n_gpu = 0
        return state.device

    changed = type(found)(call)
    if hasattr(changed, "__set_name__"):
        changed.__set_name__(cls, "_setup_devices")
    cls._setup_devices = changed


_CHANGES = {
    "accelerate.state": _change_accelerate,
    "transformers.training_args": _change_transformers,
}


@functools.cache  # once
def _tell() -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"ltc: accelerate trains on {settings.device_name}; Accelerator(cpu=True) or "
            "ACCELERATE_TORCH_DEVICE=cpu choose the CPU",
            file=sys.stderr,
        )
