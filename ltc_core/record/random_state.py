"""Random streams: the state of a generator is a value of the graph.

Each device has a default stream, and each `torch.Generator` of the device has its own. A stream's state is a cell of
bytes, in the host's memory, in the format of PyTorch's generator for the hardware: of the CPU, or of a GPU. A random op
reads and writes it like any other operand. So a seed gives the numbers that eager PyTorch draws on that hardware, in
the order of recording; XLA's draws other numbers from the state of the CPU unless LTC_RANDOM=host. Saving a state, or
restoring a saved one, records nothing and does not sync. `recorder` asks `stream` for the cell; `runtime.device_hooks`
installs the streams.
"""

from __future__ import annotations

import functools
import struct
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ltc_core.device.hardware import check_gpu
from ltc_core.errors import DeviceError
from ltc_core.graph.ir import TensorMeta
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer
from ltc_core.tensor.handles import Cell, Value
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap
from ltc_core.thread_state import in_own_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from ltc_core.record.trace import Trace

__all__ = [
    "Stream",
    "Streams",
    "draw_on_cpu",
    "generator",
    "mixed",
    "state_meta",
    "state_value",
    "stream",
    "stream_of",
]

_PHILOX_STATE = struct.Struct(
    "<Qq"
)  # a GPU's: the seed, and how many numbers of its stream were drawn
_STEP = 4  # the offset of a GPU's stream counts in fours
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def generator() -> torch.Generator:
    """A new generator of the kind that draws for the device.

    Raises:
        DeviceError: there is no GPU.
    """
    if settings.device != "cuda":
        return torch.Generator("cpu")
    check_gpu()
    return torch.Generator("cuda")


@functools.cache
def state_meta() -> TensorMeta:
    """The meta of a stream's state."""
    return TensorMeta.packed(generator().get_state().shape, torch.uint8)


def draw_on_cpu(
    state: torch.Tensor, call: Callable[[torch.Generator], Any]
) -> tuple[Any, torch.Tensor]:
    """Call an op that only the CPU has with a generator of the CPU; return its result and the state after it."""
    made = torch.Generator()
    if settings.device != "cuda":
        made.set_state(state)
        return call(made), made.get_state()
    seed, offset = _PHILOX_STATE.unpack(bytes(state.tolist()))
    made.manual_seed(mixed(seed, offset))
    after = _PHILOX_STATE.pack(seed, offset + _STEP)
    return call(made), torch.tensor(list(after), dtype=torch.uint8)


def mixed(seed: int, number: int) -> int:
    """A seed of its own for each number; the low 32 bits, which a CPU's generator takes, differ too."""
    return (seed ^ (number + 1) * _GOLDEN) & _MASK


class Stream:
    """One random stream. Its first use seeds it with `torch.initial_seed()` if nobody has seeded it."""

    def __init__(self, device: int, trace_of: Callable[[int], Trace]) -> None:
        self._device = device
        self._trace_of = trace_of
        self._seed: int | None = None
        self._seeded: weakref.ref[Value] | None = None
        self._cell: Cell | None = None

    @property
    def trace(self) -> Trace:
        return self._trace_of(self._device)

    @property
    def cell(self) -> Cell:
        if self._cell is None:
            self.manual_seed(torch.initial_seed())
        assert self._cell is not None
        return self._cell

    @in_own_state
    def manual_seed(self, seed: int) -> None:
        self._set(generator().manual_seed(seed).get_state())
        self._seed = seed
        self._seeded = weakref.ref(
            self.cell.value
        )  # weak: a reference to the value would keep its memory from being donated

    def initial_seed(self) -> int:
        if self._seed is None:
            self.manual_seed(torch.initial_seed())
        assert self._seed is not None
        return self._seed

    def seed_of_state(self) -> int | None:
        """The seed that makes the present state; None once numbers were drawn or a state was set."""
        seed = self.initial_seed()
        is_fresh = self._seeded is not None and self._seeded() is self.cell.value
        return seed if is_fresh else None

    def get_state(self) -> LazyTensor:
        """The state as a uint8 tensor on the device. Cost: none; `.cpu()` of it syncs."""
        with self.trace.lock:
            return wrap(Cell(self.trace, self.cell.value, state_meta()))

    def set_state(self, state: torch.Tensor) -> None:
        """Set the state from a tensor on the CPU, or on this device: no sync there unless it is a view."""
        size = state_meta().size
        if state.dtype != torch.uint8 or state.shape != size:
            raise DeviceError(
                "this is not the state of a random stream",
                got=f"{state.dtype}{list(state.shape)}, expected uint8{list(size)}",
                next="pass what get_rng_state() gave",
            )
        if type(state) is LazyTensor and state._h.trace is self.trace and type(state._h) is Cell:
            with self.trace.lock:
                self.cell.rebind(state._h.value)
        else:
            self._set(state.detach().cpu())

    def copy_from(self, other: Stream) -> None:
        seed = other.initial_seed()
        self.set_state(other.get_state())
        self._seed = seed

    @in_own_state
    def _set(self, state: torch.Tensor) -> None:
        try:
            generator().set_state(state)
        except RuntimeError as error:
            raise _not_a_state(error) from None
        value = state_value(self.trace, state)
        with self.trace.lock:
            if self._cell is None:
                self._cell = Cell(self.trace, value, state_meta())
            else:
                self._cell.rebind(value)


class CpuStream(Stream):
    """The default stream of each device under LTC_RANDOM=cpu_stream: that of the CPU. `ops.cpu_draws` draws from it."""

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def seed_of_state(self) -> int | None:
        return None

    @in_own_state
    def get_state(self) -> LazyTensor:
        state = torch.default_generator.get_state()
        meta = TensorMeta.packed(state.shape, torch.uint8)
        return wrap(Cell(self.trace, state_value(self.trace, state), meta))

    def set_state(self, state: torch.Tensor) -> None:
        try:
            torch.default_generator.set_state(state.detach().cpu())
        except (RuntimeError, TypeError) as error:
            raise _not_a_state(error) from None


def _not_a_state(error: Exception) -> DeviceError:
    return DeviceError(
        f"this is not the state of a random stream: {error}",
        next="pass what get_rng_state() gave",
    )


def state_value(trace: Trace, state: torch.Tensor) -> Value:
    """A state as a value of the graph."""
    return Value.of(Buffer.ready(trace.memory, state.clone(), state.nbytes))


class Streams:
    """All streams: the default one of each device and one for each generator, by the generator's id."""

    def __init__(self, trace_of: Callable[[int], Trace]) -> None:
        self._trace_of = trace_of
        # No lock: each access is one dict operation, and a signal handler or a finalizer may interrupt with another.
        self._defaults: dict[int, Stream] = {}
        # The index of a device stands for its default stream: which kind that is, a setting says at the first use.
        self._by_generator: dict[int, Stream | int] = {}

    def default(self, device: int) -> Stream:
        found = self._defaults.get(device)
        if found is None:
            kind = CpuStream if settings.random == "cpu_stream" else Stream
            found = self._defaults.setdefault(device, kind(device, self._trace_of))
        return found

    def add(self, generator: int, device: int, default: bool = False) -> None:
        self._by_generator[generator] = device if default else Stream(device, self._trace_of)

    def remove(self, generator: int) -> None:
        self._by_generator.pop(generator, None)

    def of(self, generator: int) -> Stream:
        found = self._by_generator[generator]
        return self.default(found) if isinstance(found, int) else found


streams: Streams | None = None


def install(
    trace_of: Callable[[int], Trace], generator_id: Callable[[torch.Generator], int] | None
) -> Streams:
    """Set up the streams of this process; `generator_id` names the stream of a `torch.Generator`."""
    global streams, _generator_id
    streams = Streams(trace_of)
    _generator_id = generator_id
    return streams


_generator_id: Callable[[torch.Generator], int] | None = None


def stream_of(given: torch.Generator) -> Stream:
    """The stream of a generator of the device."""
    assert streams is not None and _generator_id is not None
    return streams.of(_generator_id(given))


def stream(trace: Trace, given: torch.Generator | None) -> Cell:
    """The state cell that an op on `trace` draws from, with the generator that it was given."""
    assert streams is not None
    if given is None:
        return streams.default(trace.device.index).cell
    if given.device.type != trace.device.type or _generator_id is None:
        raise DeviceError(
            f"Expected a '{trace.device.type}' device type for generator but found '{given.device.type}'",
            next=f"make it with torch.Generator('{trace.device}')",
        )
    found = stream_of(given)
    if found.trace is not trace:
        raise DeviceError(
            f"an op on {trace.device} was given a generator on {found.trace.device}",
            next=f"make it with torch.Generator('{trace.device}')",
        )
    return found.cell
