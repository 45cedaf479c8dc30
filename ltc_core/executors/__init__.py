"""Executors by name: a new one is one folder and one row of `EXECUTORS`. `make` chooses the executor of a device."""

from __future__ import annotations

from collections.abc import Callable

from ltc_core.device.hardware import hardware
from ltc_core.errors import DeviceError
from ltc_core.executors.base import Executor
from ltc_core.executors.inductor.executor import InductorExecutor
from ltc_core.executors.jax import library as jax_library
from ltc_core.executors.null import NullExecutor
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.executors.torch_xla.executor import XlaExecutor
from ltc_core.settings import settings

__all__ = ["EXECUTORS", "Executor", "make"]

EXECUTORS: dict[str, Callable[[int], Executor]] = {
    "inductor": lambda index: InductorExecutor(hardware(index)),
    "reference": lambda index: ReferenceExecutor(hardware(index)),
    "null": lambda index: NullExecutor(hardware(index)),
    "torch_xla": XlaExecutor,
    "jax": lambda index: _jax(index),
}


def make(index: int) -> Executor:
    """Executor of device `index`, chosen by LTC_EXECUTOR and LTC_DEVICE.

    Raises:
        DeviceError: this machine does not have the hardware.
    """
    return EXECUTORS[_chosen()](index)


def _chosen() -> str:
    name = settings.executor
    if settings.device not in ("tpu", "xla") or name in ("null", "jax"):
        return name
    if name == "reference":
        raise DeviceError(
            "LTC_EXECUTOR=reference computes with PyTorch's own kernels, which a TPU does not have",
            got=f"LTC_DEVICE={settings.device}",
            next="unset LTC_EXECUTOR, or LTC_DEVICE",
        )
    return "torch_xla"


def _jax(index: int) -> Executor:
    jax_library.devices()  # says what is missing before the rest is imported
    from ltc_core.executors.jax.executor import JaxExecutor

    return JaxExecutor(index)
