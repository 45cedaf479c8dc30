"""Libraries that choose a device by themselves take this one: accelerate, the Trainer of transformers, Lightning.

They know CUDA and others by name, and would train on the CPU without a word, in a job each process by itself. Called by
the launcher for the script that it runs, and where LTC_AUTOLOAD asks for it; a script calls `use_device()` itself. Each
library has a module here, which changes one of its modules when that has been imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ltc_dist.libraries import accelerate, lightning

__all__ = ["use_device"]


def use_device() -> None:
    """Let accelerate and Lightning choose the device of this process, and join the processes of a job by gloo.

    What the script says itself comes first: `Accelerator(cpu=True)`, `TrainingArguments(use_cpu=True)`, another device
    in ACCELERATE_TORCH_DEVICE, `Trainer(accelerator="cpu")` of Lightning, or torch_xla, installed or served by
    `ltc_dist.compat`. Call it before such an object is made. Processes that the script starts choose for themselves.
    Cost: none until one of the libraries is imported.
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


_CHANGES = {
    "accelerate.state": accelerate.change_state,
    "transformers.training_args": accelerate.change_training_arguments,
    "lightning.pytorch.trainer.connectors.accelerator_connector": lightning.change_connector,
    "pytorch_lightning.trainer.connectors.accelerator_connector": lightning.change_connector,
}
