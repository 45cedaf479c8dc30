"""Libraries that choose a device by themselves take this one: accelerate, transformers' Trainer, Lightning, ignite.

They know CUDA and others by name, and would train on the CPU without a word, in a job each process by itself. Called by
the launcher for the script that it runs, and where LTC_AUTOLOAD asks for it; a script calls `use_device()` itself. Each
library has a module here, which changes one of its modules when that has been imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ltc_dist.libraries import accelerate, dtensor, ignite, lightning

__all__ = ["serve_compat", "serve_torch", "use_device"]

Changes = dict[str, Callable[[Any], None]]  # module of a library -> what changes it


def use_device() -> None:
    """Let accelerate, Lightning and ignite choose the device of this process, and join the processes of a job by gloo.

    What the script says itself comes first: `Accelerator(cpu=True)`, `TrainingArguments(use_cpu=True)`, another device
    in ACCELERATE_TORCH_DEVICE, `accelerator="cpu"` of Lightning, or torch_xla, installed or served by
    `ltc_dist.compat`. Call it before such an object is made. Processes that the script starts choose for themselves.
    Cost: none until one of the libraries is imported.
    """
    _install(_CHANGES)


def serve_torch() -> None:
    """Correct what PyTorch's own packages take for granted of a device. Cost: none until one of them is imported."""
    _install(_CHANGES_OF_TORCH)


def serve_compat() -> None:
    """Correct what libraries do that have found torch_xla, served by `ltc_dist.compat`, and users do not expect."""
    _install(_CHANGES_FOR_COMPAT)


def _install(changes: Changes) -> None:
    """Make the changes, once: now in modules that are imported, else when they are."""
    finders = (finder for finder in sys.meta_path if isinstance(finder, _Finder))
    if any(finder.changes is changes for finder in finders):
        return
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder(changes))


class _Finder(MetaPathFinder):
    """Has modules changed when they have been imported."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self._awaited = set(changes)

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
                self.changes[name](module)

            loader.exec_module = exec_module
        return spec


_CHANGES: Changes = {
    "accelerate.state": accelerate.change_state,
    "accelerate.commands.launch": accelerate.change_launcher,
    "transformers.training_args": accelerate.change_training_arguments,
    "lightning.pytorch.trainer.connectors.accelerator_connector": lightning.change_connector,
    "pytorch_lightning.trainer.connectors.accelerator_connector": lightning.change_connector,
    "lightning.fabric.connector": lightning.change_fabric,
    "lightning_fabric.connector": lightning.change_fabric,
    "ignite.distributed.comp_models.base": ignite.change_single,
    "ignite.distributed.comp_models.native": ignite.change_job,
}
_CHANGES_OF_TORCH: Changes = {
    "torch.distributed.tensor": dtensor.change_package,
    "torch.distributed.tensor._random": dtensor.change_random,
}
_CHANGES_FOR_COMPAT: Changes = {"accelerate.state": accelerate.change_local_rank}
