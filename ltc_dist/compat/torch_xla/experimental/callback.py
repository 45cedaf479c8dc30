"""`torch_xla.experimental.callback`: be told when a tensor is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

import ltc_core as ltc
from ltc_core.tensor.handles import base_of
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["on_ready_callback", "on_ready_event"]


def on_ready_callback(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
    """Call `callback(tensor)` in a thread of its own, once the tensor is computed or has failed.

    Cost: cuts the graph if the tensor is only recorded.
    """
    assert isinstance(tensor, LazyTensor), "a tensor of the device"
    ltc.sync_multi([tensor], wait=False)
    buffer = base_of(tensor._h).value.buffer

    def wait() -> None:
        if buffer is not None:
            buffer.wait_done()
        callback(tensor)

    threading.Thread(target=wait, name="ltc-callback", daemon=True).start()


def on_ready_event(tensor: torch.Tensor) -> threading.Event:
    """Return an event that is set once the tensor is computed or has failed."""
    event = threading.Event()
    on_ready_callback(tensor, lambda _: event.set())
    return event
