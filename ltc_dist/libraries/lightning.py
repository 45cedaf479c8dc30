"""Lightning: an accelerator by the name of the device, and a strategy for several processes.

    Trainer(accelerator="ltc", devices=2)

`devices` counts processes, each with a device of its own. Gradients are averaged in the graph of the step, after the
last backward pass before it, not by DistributedDataParallel.

Lightning has no entry point for accelerators, and is two packages, lightning and pytorch_lightning, with classes of
their own: the classes here are made from those of the package that is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import ltc_core as ltc
from ltc_core.errors import DeviceError
from ltc_core.settings import settings
from ltc_dist.collectives.ops import broadcast_master_param
from ltc_dist.libraries.telling import tell
from ltc_dist.train.step import reduce_gradients

__all__ = ["change_connector"]


def change_connector(connector: ModuleType) -> None:
    """Let Lightning know the device by its name, and take it where neither a TPU nor a GPU is there.

    Args:
        connector: the module of Lightning that chooses accelerator, strategy and precision.
    """
    lib: Any = connector
    name = settings.device_name
    accelerator, strategy = _accelerator_class(lib), _strategy_class(lib)
    lib.AcceleratorRegistry.register(name, accelerator, description=accelerator.__doc__)
    lib.StrategyRegistry.register(name, strategy, description=strategy.__doc__)
    lib._AcceleratorConnector = _connector_class(lib, accelerator, strategy)


def _accelerator_class(lib: Any) -> Any:
    class LTCAccelerator(lib.Accelerator):  # type: ignore[misc]
        """Lazy devices of ltc, one for each process."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != settings.device_name:
                raise DeviceError(
                    "this accelerator trains on another device",
                    got=f"{device}, expected {settings.device_name}",
                    next=f'Trainer(accelerator="{settings.device_name}") without a strategy that names devices',
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
    """How many processes `Trainer(devices=...)` asks for."""
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


def _strategy_class(lib: Any) -> Any:
    class LTCStrategy(lib.DDPStrategy):  # type: ignore[misc]
        """Processes whose gradients are averaged in the graph of the step."""

        _ranks: dict[str, str] = {}

        def setup_environment(self) -> None:
            super().setup_environment()
            self._ranks = {
                "RANK": str(self.global_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(self.local_rank),
                "LOCAL_WORLD_SIZE": str(self.num_processes),
            }
            os.environ.update(self._ranks)  # Lightning sets a part of them

        def teardown(self) -> None:
            super().teardown()  # it removes WORLD_SIZE
            os.environ.update(self._ranks)

        def configure_ddp(self) -> None:
            """Begin with the parameters of rank 0; the model is not wrapped."""
            broadcast_master_param(self.model)

        def determine_ddp_device_ids(self) -> None:
            return None

        def optimizer_step(
            self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
        ) -> Any:
            def call() -> Any:
                result = closure()
                reduce_gradients(optimizer)
                return result

            return super().optimizer_step(optimizer, call, model, **kwargs)

    return LTCStrategy


def _connector_class(lib: Any, accelerator: Any, strategy: Any) -> Any:
    name, mixed = settings.device_name, ("16-mixed", "bf16-mixed")

    class Connector(lib._AcceleratorConnector):  # type: ignore[misc]
        """Lightning's choices, which know its own hardware by name."""

        _strategy_flag: Any

        @staticmethod
        def _choose_auto_accelerator() -> str:
            found: str = lib._select_auto_accelerator()
            if found != "cpu":
                return found
            tell("Lightning", 'Trainer(accelerator="cpu") chooses')
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
            if self._is_ours and self._strategy_flag == "ddp":
                self._strategy_flag = self._choose_strategy()
            super()._check_strategy_and_fallback()

        def _check_and_init_precision(self) -> Any:
            flag = self._precision_flag
            if not self._is_ours or self._precision_plugin_flag or flag not in mixed:
                return super()._check_and_init_precision()
            scaler = ltc.GradScaler() if flag == mixed[0] else None
            return lib.MixedPrecision(flag, name, scaler)

    return Connector
