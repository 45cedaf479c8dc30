"""The module `torch.<name>`: what PyTorch and scripts call on a device by convention.

In: a `DeviceHooks` object (`runtime.device_hooks`) and a `DeviceIndices` object (the C++ side), both passed to
`make_module`. Out: a module object with its `amp`, `random` and `_utils` submodules, which `register` passes to
PyTorch. It has the functions of this file that `_EXPORTED` lists.
"""

import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from ltc_core.errors import DeviceError
from ltc_core.settings import settings

DeviceLike = torch.device | str | int | None


class DeviceHooks(Protocol):
    """What the runtime does for the device; every method may be called from any thread.

    A generator has an integer id. The id of a device's default generator is the device index; it is made together
    with the device. Other ids belong to a `torch.Generator` of the user. A generator's state is a ByteTensor on the
    CPU. Sizes are in bytes.
    """

    def synchronize(self, device: int) -> None: ...
    def memory_stats(self, device: int) -> tuple[int, int, int, int]: ...
    def reset_peak_memory_stats(self, device: int) -> None: ...
    def memory_info(self, device: int) -> tuple[int, int]: ...
    def empty_cache(self) -> None: ...
    def generator_new(self, gen_id: int, device: int) -> None: ...
    def generator_free(self, gen_id: int) -> None: ...
    def generator_manual_seed(self, gen_id: int, seed: int) -> None: ...
    def generator_initial_seed(self, gen_id: int) -> int: ...
    def generator_seed(self, gen_id: int) -> int: ...
    def generator_get_state(self, gen_id: int) -> torch.Tensor: ...
    def generator_set_state(self, gen_id: int, state: torch.Tensor) -> None: ...
    def generator_clone(self, src_id: int, dst_id: int) -> None: ...
    def rng_manual_seed(self, device: int, seed: int) -> None: ...
    def rng_initial_seed(self, device: int) -> int: ...
    def rng_get_state(self, device: int) -> torch.Tensor: ...
    def rng_set_state(self, state: torch.Tensor, device: int) -> None: ...


class DeviceIndices(Protocol):
    """The number of devices, and the calling thread's current device."""

    def device_count(self) -> int: ...
    def current_device(self) -> int: ...
    def exchange_device(self, index: int) -> int: ...


_before_count: Callable[[], None] | None = None
_count_lock = threading.RLock()


def renew_lock() -> None:
    """Replace the lock in a forked child: another thread may have held it at the fork."""
    global _count_lock
    _count_lock = threading.RLock()


_hooks: DeviceHooks
_indices: DeviceIndices
_is_set = False  # whether `set_device` was called


# ---- devices -------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether the device can be used: always."""
    return True


def is_initialized() -> bool:
    """Whether it is settled which device this process uses: it has one only, or one was set.

    Where it is not, a DeviceMesh of PyTorch sets the one of LOCAL_RANK, as for a GPU.
    """
    return _is_set or current_device() != 0 or device_count() == 1


def init() -> None:
    """Do nothing: the device is ready from the import on."""


def _lazy_init() -> None:
    """Do nothing: PyTorch calls this before it uses the device for the first time."""


def _is_in_bad_fork() -> bool:
    """Whether the device cannot be used after a fork: never, a forked child starts its own threads."""
    return False


def device_count() -> int:
    """Return the number of devices of this process."""
    if _before_count is not None:
        _settle_count()
    return _indices.device_count()


def _settle_count() -> None:
    global _before_count
    with _count_lock:  # reentrant: `settle` takes it again
        settle, _before_count = _before_count, None
        if settle is not None:
            try:
                settle()
            except BaseException:
                _before_count = settle
                raise


def before_first_count(call: Callable[[], None]) -> None:
    """Register a function that `device_count` calls once, before it first returns a count."""
    global _before_count
    _before_count = call


def current_device() -> int:
    """Return the calling thread's device index."""
    return _indices.current_device()


def set_device(device: DeviceLike) -> None:
    """Make `device` the calling thread's device; a negative index changes nothing."""
    global _is_set
    if not isinstance(device, int) or device >= 0:
        _indices.exchange_device(_get_device_index(device))
        _is_set = True


def _get_device_index(device: DeviceLike, optional: bool = True, allow_cpu: bool = False) -> int:
    """Return the index of `device`: an index, a `torch.device`, its text, or None for the current device.

    Raises:
        ValueError: a device of another type, or None where `optional` is false.
        DeviceError: there is no device of that index.
    """
    index: int | None
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type == "cpu" and allow_cpu:
            return -1
        if device.type != settings.device_name:
            raise ValueError(f"Expected a {settings.device_name} device, but got: {device}")
        index = device.index
    else:
        index = device
    if index is None:
        if not optional and device is None:
            raise ValueError(f"Expected a {settings.device_name} device or an index, but got None")
        return current_device()
    count = device_count()
    if not 0 <= index < count:
        legal = "0" if count == 1 else f"0 to {count - 1}"
        raise DeviceError(
            f"there is no device {settings.device_name}:{index}",
            got=f"index {index}, legal is {legal}",
            next="LTC_NUM_DEVICES sets how many devices a process has.",
        )
    return index


class device:
    """Context manager: make a device the calling thread's current one; None changes nothing."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = -1 if device is None else _get_device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self.prev_idx = _indices.exchange_device(self.idx)

    def __exit__(self, *exc_info: object) -> None:
        if self.prev_idx >= 0:
            _indices.exchange_device(self.prev_idx)


class device_of(device):
    """Context manager: make a tensor's device the current one; other tensors change nothing."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device if obj.device.type == settings.device_name else None)


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name shown for a device."""
    return f"{settings.device_name}:{_get_device_index(device)}"


@dataclass(frozen=True)
class DeviceProperties:
    """What is known about a device; `total_memory` in bytes."""

    name: str
    total_memory: int


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return the properties of a device."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1])


def get_device_capability(device: DeviceLike = None) -> dict[str, Any]:
    """Return what a device can do, in the form of `torch.accelerator.get_device_capability`."""
    _get_device_index(device)
    return {"supported_dtypes": {d for d in vars(torch).values() if isinstance(d, torch.dtype)}}


# ---- streams and events --------------------------------------------------------------------------


def synchronize(device: DeviceLike = None) -> None:
    """Cut the graph and wait until all work of a device is done."""
    _hooks.synchronize(_get_device_index(device))


class Stream(torch.Stream):
    """The one stream of a device; `priority` is ignored."""

    _left: list[int]  # the devices that were current when the stream was entered

    def __new__(cls, device: DeviceLike = None, priority: int = 0) -> "Stream":
        target = torch.device(settings.device_name, _get_device_index(device))
        made = super().__new__(cls, device=target, priority=priority)
        made._left = []
        return made

    def __enter__(self) -> "Stream":
        """Make the stream's device the current one."""
        self._left.append(_indices.exchange_device(self.device_index))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _indices.exchange_device(self._left.pop())

    def synchronize(self) -> None:
        """Cut the graph and wait until all work of the device is done."""
        _hooks.synchronize(self.device_index)

    def wait_stream(self, other: torch.Stream) -> None:
        """Cut the graph of another device and wait for it; nothing for this one, whose work runs in recorded order."""
        if other.device_index != self.device_index:
            _hooks.synchronize(other.device_index)

    def wait_event(self, event: torch.Event) -> None:
        """Do nothing: what was recorded before the event runs before what follows."""

    def query(self) -> bool:
        """Return True, even if graphs are pending: work never waits for a stream."""
        return True

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event, a new one by default."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """A point in the recorded work. Its time is the host's, when the event was recorded."""

    _recorded_at_ns: int | None

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> "Event":
        target = torch.device(settings.device_name, current_device())
        made = super().__new__(
            cls,
            device=target,
            enable_timing=enable_timing,
            blocking=blocking,
            interprocess=interprocess,
        )
        made._recorded_at_ns = None
        return made

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark this point of the recorded work."""
        super().record(current_stream() if stream is None else stream)
        self._recorded_at_ns = time.perf_counter_ns()

    # `torch.Event.elapsed_time` accepts no subclass, and does not exist without the C++ side.
    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return the milliseconds between two recorded events."""
        start_ns, end_ns = self._recorded_at_ns, getattr(end_event, "_recorded_at_ns", None)
        if start_ns is None or end_ns is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return float(end_ns - start_ns) / 1e6

    def synchronize(self) -> None:
        """Cut the graph and wait until all work of the device is done."""
        _hooks.synchronize(self.device.index or 0)


def current_stream(device: DeviceLike = None) -> Stream:
    """Return the current stream of a device: its only one."""
    return Stream(device)


def default_stream(device: DeviceLike = None) -> Stream:
    """Return the default stream of a device: its only one."""
    return Stream(device)


def set_stream(stream: torch.Stream | None) -> None:
    """Make the stream's device the current one."""
    if stream is not None:
        set_device(stream.device_index)


class StreamContext(device):
    """Context manager: make a stream's device the current one; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        super().__init__(None if stream is None else stream.device_index)
        self.stream = stream


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return a context manager that selects a stream."""
    return StreamContext(stream)


# ---- memory --------------------------------------------------------------------------------------


def memory_stats(device: DeviceLike = None) -> "OrderedDict[str, int]":
    """Return the memory counters of a device under the names of `torch.cuda.memory_stats`."""
    index = _get_device_index(device)
    allocated, peak_allocated, reserved, peak_reserved = _hooks.memory_stats(index)
    return OrderedDict(
        (
            ("allocated_bytes.all.current", allocated),
            ("allocated_bytes.all.peak", peak_allocated),
            ("reserved_bytes.all.current", reserved),
            ("reserved_bytes.all.peak", peak_reserved),
        )
    )


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes of live buffers."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes of live buffers since the start or the last reset."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes held for buffers, live or kept for reuse."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the most bytes held since the start or the last reset."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Reset the peaks to the current figures."""
    _hooks.reset_peak_memory_stats(_get_device_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return the free and the total bytes of a device's memory."""
    free, total = _hooks.memory_info(_get_device_index(device))
    return free, total


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return the memory figures as text."""
    rows = [(name.replace(".all.", " "), size) for name, size in memory_stats(device).items()]
    if not abbreviated:
        rows += zip(("free_bytes", "total_bytes"), mem_get_info(device), strict=True)
    lines = [f"{name:<24}{size / 2**20:>14.1f} MiB" for name, size in rows]
    return "\n".join([f"Memory of {get_device_name(device)}", *lines])


def empty_cache() -> None:
    """Release memory that is kept for reuse to the system."""
    _hooks.empty_cache()


# ---- random numbers ------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _hooks.rng_manual_seed(current_device(), int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device; `torch.manual_seed` calls this."""
    for index in range(device_count()):
        _hooks.rng_manual_seed(index, int(seed))


def seed() -> int:
    """Seed the current device from the system's entropy and return the seed."""
    chosen = secrets.randbits(63)
    manual_seed(chosen)
    return chosen


def seed_all() -> int:
    """Seed every device alike from the system's entropy and return the seed."""
    chosen = secrets.randbits(63)
    manual_seed_all(chosen)
    return chosen


def initial_seed() -> int:
    """Return the seed of the current device."""
    return _hooks.rng_initial_seed(current_device())


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the random state of a device as a ByteTensor on the CPU."""
    return _hooks.rng_get_state(_get_device_index(device))


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the random state of a device."""
    _hooks.rng_set_state(new_state, _get_device_index(device))


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the random state of every device."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the random state of every device."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- mixed precision -----------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that `torch.autocast` may use on the device."""
    return [torch.bfloat16, torch.float16]


class autocast(torch.amp.autocast_mode.autocast):
    """`torch.autocast` for this device."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
    ) -> None:
        super().__init__(
            settings.device_name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled
        )


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for this device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(settings.device_name, *args, **kwargs)


# ---- the module ----------------------------------------------------------------------------------

_RANDOM = (
    manual_seed, manual_seed_all, seed, seed_all, initial_seed,
    get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all,
)  # fmt: skip
_AMP = (autocast, GradScaler, get_amp_supported_dtype)
_EXPORTED = (
    is_available, is_initialized, init, _lazy_init, _is_in_bad_fork,
    device_count, current_device, set_device, device, device_of,
    get_device_name, get_device_properties, get_device_capability,
    synchronize, Stream, Event, StreamContext, current_stream, default_stream, set_stream, stream,
    memory_stats, memory_allocated, max_memory_allocated, memory_reserved, max_memory_reserved,
    reset_peak_memory_stats, mem_get_info, memory_summary, empty_cache,
    get_amp_supported_dtype, *_RANDOM,
)  # fmt: skip


def make_module(
    hooks: DeviceHooks, indices: DeviceIndices, generators: tuple[torch.Generator, ...]
) -> ModuleType:
    """Return the module `torch.<name>`; the functions of this file work from here on.

    This puts the submodules into `sys.modules`; `torch._register_device_module` puts the module itself there.
    """
    global _hooks, _indices
    _hooks, _indices = hooks, indices
    name = f"torch.{settings.device_name}"
    made = _submodule(
        name, "The lazy device, with the functions every PyTorch device has.", _EXPORTED
    )
    made.__dict__.update(
        default_generators=generators,
        DeviceProperties=DeviceProperties,
        _initialized=True,  # else torch.utils.checkpoint does not save the random state
    )
    for part, doc, members in (
        ("amp", "Mixed precision on the device.", _AMP),
        ("random", "Random numbers on the device.", _RANDOM),
        ("_utils", "Reading a device argument.", (_get_device_index,)),
    ):
        module = _submodule(f"{name}.{part}", doc, members)
        sys.modules[module.__name__] = module
        setattr(made, part, module)
    return made


def _submodule(name: str, doc: str, members: Iterable[Any]) -> ModuleType:
    module = ModuleType(name, doc)
    for member in members:
        setattr(module, member.__name__, member)
    module.__dict__["__all__"] = [n for n in vars(module) if not n.startswith("_")]
    return module
