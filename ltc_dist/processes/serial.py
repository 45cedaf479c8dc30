"""What one process of a host does at a time: `MpSerialExecutor`, `MpModelWrapper`. Scripts import both from `xmp`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ltc_core.private_directory import private_directory
from ltc_core.runtime.collective_tokens import hand_over
from ltc_core.settings import settings

__all__ = ["MpModelWrapper", "MpSerialExecutor"]


def _one_at_a_time() -> FileLock:
    """Lock for one process of this user on this host at a time; its holder may wait for collectives."""
    hand_over()
    directory = Path(settings.cache_dir).expanduser()
    private_directory(directory)
    return FileLock(directory / "serial.lock")


class MpModelWrapper:
    """Holds a model made in the parent, so that forked processes share its memory until they move it.

    Source: `torch_xla.distributed.xla_multiprocessing.MpModelWrapper`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """Move the model, in one process at a time, so that the host makes one copy at a time."""
        with _one_at_a_time():
            return self._model.to(device)


class MpSerialExecutor:
    """Runs a function in one process at a time, such as a download that only the first one has to make.

    Source: `torch_xla.distributed.xla_multiprocessing.MpSerialExecutor`.
    """

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call `fn()` and return what it returns. Cost: waits for the processes of this host that run it before."""
        with _one_at_a_time():
            return fn()
