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

from ltc_core.settings import settings

__all__ = ["use_device"]

_CHOICE = "ACCELERATE_TORCH_DEVICE"  # accelerate and transformers read it


def use_device() -> None:
    """Let accelerate choose the device of this process, and join the processes of a job by gloo.

    What the script says itself comes first: `Accelerator(cpu=True)`, `TrainingArguments(use_cpu=True)`, another device
    in ACCELERATE_TORCH_DEVICE, or torch_xla, installed or served by `ltc_dist.compat`. Call it before `Accelerator` or
    `TrainingArguments` is made. Cost: none until accelerate is imported.
    """
    os.environ.setdefault(_CHOICE, settings.device_name)
    state = sys.modules.get("accelerate.state")
    if state is not None:
        _change(state)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Has `accelerate.state` changed when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "accelerate.state":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _change(module)

            loader.exec_module = exec_module
        return spec


def _change(state: Any) -> None:
    """Replace the method in which accelerate looks for the hardware, and decides how processes are joined."""
    kinds, choose = state.DistributedType, state.PartialState._prepare_backend
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def prepare(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        is_ours = self.device is not None and self.device.type == settings.device_name
        found = choose(self, cpu, *args, **kwargs)
        if not is_ours:
            return found
        if cpu or found[1] is kinds.XLA:
            self.device = None  # what the script says comes before the variable
            return found
        _tell()
        is_job = int(os.environ.get("WORLD_SIZE", 1)) > 1
        return ("gloo", kinds.MULTI_CPU) if is_job else (None, kinds.NO)

    state.PartialState._prepare_backend = prepare


@functools.cache  # once
def _tell() -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"ltc: accelerate trains on {settings.device_name}; Accelerator(cpu=True) or {_CHOICE}=cpu choose the CPU",
            file=sys.stderr,
        )
