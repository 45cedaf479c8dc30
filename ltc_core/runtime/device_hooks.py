"""The runtime's part of PyTorch's device interface: synchronize, memory figures, generators.

One object, given to `device.register`; its methods are called from C++ and from `torch.<name>`.
"""

from __future__ import annotations

import secrets

import torch

from ltc_core.device import register
from ltc_core.record import random_state
from ltc_core.record.random_state import Stream, Streams
from ltc_core.runtime.devices import context, contexts
from ltc_core.settings import settings

__all__ = ["RuntimeHooks"]


class RuntimeHooks:
    """See `device.module.DeviceHooks` for what each method promises."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def synchronize(self, device: int) -> None:
        context(device).wait()

    def memory_stats(self, device: int) -> tuple[int, int, int, int]:
        memory = context(device).memory
        return memory.used_bytes, memory.peak_bytes, memory.used_bytes, memory.peak_bytes

    def reset_peak_memory_stats(self, device: int) -> None:
        context(device).memory.reset_peak()

    def memory_info(self, device: int) -> tuple[int, int]:
        return context(device).executor.memory_info()

    def empty_cache(self) -> None:
        for ctx in contexts():
            ctx.executor.empty_cache()

    def generator_new(self, gen_id: int, device: int) -> None:
        self._streams.add(gen_id, device, default=gen_id < settings.peek("num_devices"))

    def generator_free(self, gen_id: int) -> None:
        self._streams.remove(gen_id)

    def generator_manual_seed(self, gen_id: int, seed: int) -> None:
        self._streams.of(gen_id).manual_seed(seed)

    def generator_initial_seed(self, gen_id: int) -> int:
        return self._streams.of(gen_id).initial_seed()

    def generator_seed(self, gen_id: int) -> int:
        return _reseed(self._streams.of(gen_id))

    def generator_get_state(self, gen_id: int) -> torch.Tensor:
        return self._streams.of(gen_id).get_state().cpu()

    def generator_set_state(self, gen_id: int, state: torch.Tensor) -> None:
        self._streams.of(gen_id).set_state(state)

    def generator_clone(self, src_id: int, dst_id: int) -> None:
        self._streams.of(dst_id).copy_from(self._streams.of(src_id))

    def rng_manual_seed(self, device: int, seed: int) -> None:
        self._streams.default(device).manual_seed(seed)

    def rng_initial_seed(self, device: int) -> int:
        return self._streams.default(device).initial_seed()

    def rng_get_state(self, device: int) -> torch.Tensor:
        return self._streams.default(device).get_state()

    def rng_set_state(self, state: torch.Tensor, device: int) -> None:
        self._streams.default(device).set_state(state)


def _reseed(stream: Stream) -> int:
    seed = secrets.randbits(63)
    stream.manual_seed(seed)
    return seed


def install() -> RuntimeHooks:
    """Create the random streams and the hooks of this process."""
    return RuntimeHooks(
        random_state.install(lambda index: context(index).trace, register.generator_id)
    )
