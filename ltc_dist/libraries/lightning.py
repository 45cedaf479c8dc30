"""Lightning: an accelerator by the name of the device, and a strategy for several processes.

    Trainer(accelerator="ltc", devices=2)
    Fabric(accelerator="ltc", devices=2)

`devices` counts processes, each with a device of its own. Gradients are averaged in the graph of the step, after the
last backward pass before it, not by DistributedDataParallel.

Lightning has no entry point for accelerators, and is two packages, lightning and pytorch_lightning (with
lightning_fabric), with classes of their own. Its Trainer and its Fabric have classes of their own too. The classes here
are made from those that are used.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

import ltc_core as ltc
from ltc_core.errors import DeviceError
from ltc_core.serialization.cpu_copy import CpuCopies
from ltc_core.serialization.tree import map_tensors
from ltc_core.settings import settings
from ltc_dist.collectives.ops import broadcast_master_param, collective_broadcast
from ltc_dist.libraries.telling import tell
from ltc_dist.train.step import reduce_gradients

__all__ = ["change_connector", "change_fabric"]


def change_connector(connector: ModuleType) -> None:
    """Let the Trainer know the device by its name, and take it where neither a TPU nor a GPU is there.

    Args:
        connector: the module of Lightning that chooses accelerator, strategy and precision.
    """
    lib: Any = connector
    accelerator = _accelerator_class(lib.Accelerator)
    strategy = _trainer_strategy_class(lib.DDPStrategy)
    _register(lib.AcceleratorRegistry, lib.StrategyRegistry, accelerator, strategy)
    flags = ("_precision_flag", "_precision_plugin_flag")
    changed = _connector_class(lib, lib._AcceleratorConnector, accelerator, strategy, flags)
    _replace(lib, changed, "_AcceleratorConnector", f"{_package(lib.__name__, 2)}.trainer")


def change_fabric(connector: ModuleType) -> None:
    """Let Fabric know the device as the Trainer does.

    Args:
        connector: the module of Fabric that chooses accelerator, strategy and precision.
    """
    lib: Any = connector
    strategies: Any = importlib.import_module(f"{_package(lib.__name__)}.strategies")
    accelerator = _accelerator_class(lib.Accelerator)
    strategy = _fabric_strategy_class(strategies.DDPStrategy)
    _register(lib.ACCELERATOR_REGISTRY, lib.STRATEGY_REGISTRY, accelerator, strategy)
    flags = ("_precision_input", "_precision_instance")
    changed = _connector_class(lib, lib._Connector, accelerator, strategy, flags)
    _replace(lib, changed, "_Connector", f"{_package(lib.__name__)}.fabric")


def _package(name: str, levels: int = 1) -> str:
    """Name of the package that has the module, so many levels up."""
    return name.rsplit(".", levels)[0]


def _register(accelerators: Any, strategies: Any, accelerator: Any, strategy: Any) -> None:
    accelerators.register(settings.device_name, accelerator, description=accelerator.__doc__)
    strategies.register(settings.device_name, strategy, description=strategy.__doc__)


def _replace(lib: Any, changed: Any, name: str, user: str) -> None:
    """Put the class into its module, and into the one that imports it by name, if that has run."""
    for module in (lib, sys.modules.get(user)):
        if module is not None:
            setattr(module, name, changed)


def _accelerator_class(base: Any) -> Any:
    class LTCAccelerator(base):  # type: ignore[misc]
        """Lazy devices of ltc, one for each process."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != settings.device_name:
                raise DeviceError(
                    "this accelerator trains on another device",
                    got=f"{device}, expected {settings.device_name}",
                    next=f'accelerator="{settings.device_name}" without a strategy that names devices',
                )

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return ltc.get_memory_info(device)

        def teardown(self) -> None:
            """Leave the device as it is: its values are freed with their tensors."""

        @staticmethod
        def parse_devices(devices: Any) -> int:
            return _number_of(devices)

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            first_of_each_process = torch.device(settings.device_name, 0)
            return [first_of_each_process] * devices

        @staticmethod
        def auto_device_count() -> int:
            return _local_world_size()

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return settings.device_name

    return LTCAccelerator


def _local_world_size() -> int:
    """Processes of this host that a launcher has started; Lightning's own sets a part of PyTorch's contract only."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _number_of(devices: Any) -> int:
    """How many processes `devices=...` asks for."""
    text = str(devices).strip()
    if text == "-1":
        return _local_world_size()
    if isinstance(devices, list | tuple) or not text.isdecimal() or int(text) == 0:
        raise DeviceError(
            "devices counts processes, each with a device of its own",
            got=repr(devices),
            next="devices=2; LTC_DEVICES names the GPUs or chips that they take",
        )
    return int(text)


def _job_class(base: Any) -> Any:
    class Job(base):  # type: ignore[misc]
        """A strategy that sets all variables of PyTorch's contract; Lightning sets a part of them."""

        _ranks: dict[str, str] = {}

        def setup_environment(self) -> None:
            super().setup_environment()
            self._ranks = {
                "RANK": str(self.global_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(self.local_rank),
                "LOCAL_WORLD_SIZE": str(self.num_processes),
            }
            os.environ.update(self._ranks)

        def teardown(self) -> None:
            super().teardown()  # it removes WORLD_SIZE
            os.environ.update(self._ranks)

    return Job


def _trainer_strategy_class(base: Any) -> Any:
    class LTCStrategy(_job_class(base)):  # type: ignore[misc]
        """Processes whose gradients are averaged in the graph of the step."""

        def configure_ddp(self) -> None:
            """Begin with the parameters of rank 0; the model is not wrapped."""
            broadcast_master_param(self.model)

        def determine_ddp_device_ids(self) -> None:
            return None

        def optimizer_step(
            self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
        ) -> Any:
            def finish() -> None:
                reduce_gradients(optimizer)
                _send_buffers([self.model], optimizer)

            return super().optimizer_step(optimizer, _then(closure, finish), model, **kwargs)

    return LTCStrategy


def _fabric_strategy_class(base: Any) -> Any:
    class LTCStrategy(_job_class(base)):  # type: ignore[misc]
        """Processes whose gradients are averaged in the graph of the step."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._backward_sync_control = _NoBackwardSync()
            self._averaged = _Averaged()
            self._modules: list[weakref.ref[torch.nn.Module]] = []

        def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
            """Begin with the parameters of rank 0; the module is not wrapped."""
            broadcast_master_param(module)
            self._modules.append(weakref.ref(module))
            return module

        def clip_gradients_norm(
            self, module: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._averaged.make(optimizer)
            norm = super().clip_gradients_norm(module, optimizer, *args, **kwargs)
            self._averaged.keep(optimizer)
            return norm

        def clip_gradients_value(
            self, module: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._averaged.make(optimizer)
            super().clip_gradients_value(module, optimizer, *args, **kwargs)
            self._averaged.keep(optimizer)

        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
            def finish() -> None:
                self._averaged.make(optimizer)
                modules = [module for ref in self._modules if (module := ref()) is not None]
                _send_buffers(modules, optimizer)

            if kwargs.get("closure") is None:
                finish()
            else:
                kwargs["closure"] = _then(kwargs["closure"], finish)
            return super().optimizer_step(optimizer, **kwargs)

    return LTCStrategy


def _then(closure: Callable[[], Any], finish: Callable[[], None]) -> Callable[[], Any]:
    """The closure of an optimizer, with what follows its backward pass."""

    def call() -> Any:
        result = closure()
        finish()
        return result

    return call


def _send_buffers(modules: list[torch.nn.Module], optimizer: Any) -> None:
    """Broadcast the buffers of rank 0, such as BatchNorm's means, as DistributedDataParallel does.

    Only modules that the optimizer trains get them: the backward pass of another one may still read its own.
    """
    trained = {id(p) for row in optimizer.param_groups for p in row["params"]}
    for module in modules:
        if any(id(p) in trained for p in module.parameters()):
            collective_broadcast([*module.buffers()])


class _NoBackwardSync:
    """What `fabric.no_backward_sync` asks: no backward pass communicates, so there is nothing to switch off."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


class _Averaged:
    """Averages the gradients of an optimizer, unless nobody has changed them since the last time.

    Gradients are averaged before they are clipped, and not again before the step.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, list[tuple[torch.Tensor, int]]]
        self._kept = weakref.WeakKeyDictionary()

    def make(self, optimizer: Any) -> None:
        kept, found = self._kept.pop(optimizer, None), _gradients(optimizer)
        if kept is None or not _are_same(kept, found):
            reduce_gradients(optimizer)

    def keep(self, optimizer: Any) -> None:
        """Remember the gradients as averaged."""
        self._kept[optimizer] = _gradients(optimizer)


def _gradients(optimizer: Any) -> list[tuple[torch.Tensor, int]]:
    """Each gradient, and how often it was changed in place."""
    params = (p for row in optimizer.param_groups for p in row["params"])
    return [(p.grad, p.grad._version) for p in params if p.grad is not None]


def _are_same(a: list[tuple[torch.Tensor, int]], b: list[tuple[torch.Tensor, int]]) -> bool:
    return len(a) == len(b) and all(
        x is y and version == now for (x, version), (y, now) in zip(a, b, strict=True)
    )


def _checkpoint_class(lib: Any) -> Any:
    io: Any = importlib.import_module(f"{_package(lib.CheckpointIO.__module__)}.torch_io")

    class LTCCheckpointIO(io.TorchCheckpointIO):  # type: ignore[misc]
        """Files of CPU tensors: Lightning loads with a function as map_location, which takes storages only."""

        def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
            super().save_checkpoint(map_tensors(CpuCopies(), checkpoint), *args, **kwargs)

    return LTCCheckpointIO


def _connector_class(
    lib: Any, base: Any, accelerator: Any, strategy: Any, flags: tuple[str, str]
) -> Any:
    """Args: `flags` are the attributes that have the precision: by name, and as an object."""
    name, mixed = settings.device_name, ("16-mixed", "bf16-mixed")
    checkpoint_io = _checkpoint_class(lib)
    caller = "Fabric" if base.__name__ == "_Connector" else "Trainer"

    class Connector(base):  # type: ignore[misc]
        """Lightning's choices, which know its own hardware by name."""

        _strategy_flag: Any
        checkpoint_io: Any

        @staticmethod
        def _choose_auto_accelerator() -> str:
            found: str = base._choose_auto_accelerator()
            if found != "cpu":
                return found
            tell("Lightning", f'{caller}(accelerator="cpu") chooses')
            return name

        @property
        def _is_ours(self) -> bool:
            return isinstance(self.accelerator, accelerator)

        def _choose_strategy(self) -> Any:
            if not self._is_ours:
                return super()._choose_strategy()
            if self._num_nodes_flag > 1 or len(self._parallel_devices) > 1:
                return strategy()
            return lib.SingleDeviceStrategy(self._parallel_devices[0])

        def _check_strategy_and_fallback(self) -> None:
            flag = self._strategy_flag
            if self._is_ours and flag == "ddp":
                self._strategy_flag = self._choose_strategy()
            elif self._is_ours and isinstance(flag, str) and flag.startswith("ddp"):
                raise DeviceError(
                    f"this strategy of Lightning does not train on {name}",
                    got=f"strategy={flag!r}, expected 'auto' or 'ddp'",
                    next=f'{caller}(accelerator="{name}", strategy="ddp")',
                )
            super()._check_strategy_and_fallback()

        def _check_and_init_precision(self) -> Any:
            flag, given = (getattr(self, flag) for flag in flags)
            if not self._is_ours or given or flag not in mixed:
                return super()._check_and_init_precision()
            scaler = ltc.GradScaler() if flag == mixed[0] else None
            return lib.MixedPrecision(flag, name, scaler)

        def _lazy_init_strategy(self) -> None:
            if self._is_ours and self.checkpoint_io is None:
                self.checkpoint_io = checkpoint_io()
            super()._lazy_init_strategy()

    return Connector
