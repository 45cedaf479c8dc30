"""The devices of this process, or of all processes, as a mesh, and how data lie on it.

Data are divided once somebody shards a tensor; then each program with such an input, or with a sharding in it, is one
program of all devices. XLA divides what nobody has divided, and inserts the collectives. Used by `device`, `launch` and
the rule of `SHARD`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ltc_core import source
from ltc_core.executors.companions import Run
from ltc_core.executors.jax.arrays import as_array
from ltc_core.executors.jax.library import (
    agree,
    devices_of_mesh,
    owners_of,
    wait_together,
    without_greeting,
)
from ltc_core.graph.sharding import Sharding

__all__ = [
    "DeviceMesh",
    "axes_of",
    "checksum",
    "chosen_devices",
    "is_divided",
    "named",
    "offsets_of",
    "whole_on_mesh",
    "with_names",
]

# So often the processes compare tensors of one kind that they divide; each time asks the store of the job.
_NUM_COMPARED = 3
# Elements of the smallest tensor that is divided without being asked for: a bias is no burden, and is read everywhere.
_FEWEST_DIVIDED = 1024
# Runs of programs between two comparisons of the processes' histories.
_COMPARED_EVERY = 16


def is_divided(data: Any) -> bool:
    """Whether data lie on several devices."""
    return len(data.sharding.device_set) > 1


@functools.lru_cache(maxsize=1024)
def named(sharding: Sharding) -> NamedSharding:
    """JAX's form of a sharding.

    Each axis of the mesh becomes several, one for each prime factor of its size. JAX says how outputs lie in terms of
    the first input's mesh, and fails where XLA has divided an output into fewer parts than an axis has devices.

    A program has one order of devices, so each mesh of JAX has that of their numbers. Another order is that of the
    parts: `jax.device_put` within a program says it so, too.
    """
    factors = [_prime_factors(size) for size in sharding.mesh]
    names = [axes_of(sharding, axis) for axis in range(len(sharding.mesh))]
    grid = np.array(devices_of_mesh(), dtype=object)
    mesh = Mesh(grid.reshape(list(chain(*factors))), list(chain(*names)))
    spec = [tuple(chain(*(names[axis] for axis in axes))) or None for axes in sharding.spec]
    is_ordered = sharding.devices == tuple(range(len(sharding.devices)))
    order = None if is_ordered else sharding.devices
    return NamedSharding(mesh, PartitionSpec(*spec), _logical_device_ids=order)


@functools.lru_cache(maxsize=1024)
def _as_named(sharding: Any, shape: tuple[int, ...]) -> NamedSharding:
    """The form of `named` for a division that JAX has no mesh for, found from each device's part."""
    known = {device: k for k, device in enumerate(devices_of_mesh())}
    parts = {known[d]: index for d, index in sharding.devices_indices_map(shape).items()}
    counts = [
        len({index[dim].indices(size)[0] for index in parts.values()})
        for dim, size in enumerate(shape)
    ]
    order = sorted(parts, key=lambda k: (offsets_of(parts[k]), k))
    copies = len(order) // math.prod(counts)
    spec = tuple((dim,) for dim in range(len(shape)))
    return named(Sharding(tuple(order), (*counts, copies), spec))


def with_names(data: Any) -> Any:
    """Data of a program that divides them as JAX cannot say, as it can; others as they are. Cost: 0.1 us, or 50 us."""
    at = data.sharding
    if isinstance(at, NamedSharding | SingleDeviceSharding):
        return data
    parts = [shard.data for shard in data.addressable_shards]
    return jax.make_array_from_single_device_arrays(data.shape, _as_named(at, data.shape), parts)


def whole_on_mesh() -> NamedSharding:
    """How data lie of which each device has all."""
    count = len(devices_of_mesh())
    return named(Sharding(tuple(range(count)), (count,), ()))


def axes_of(sharding: Sharding, axis: int) -> list[str]:
    """JAX's names for an axis of a mesh, one for each prime factor of its size."""
    return [f"axis{axis}_{k}" for k in range(len(_prime_factors(sharding.mesh[axis])))]


def _prime_factors(n: int) -> list[int]:
    """Prime factors of a number, the small ones first."""
    found: list[int] = []
    factor = 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found


@functools.lru_cache(maxsize=4096)
def chosen_devices(sharding: Any, shape: tuple[int, ...]) -> frozenset[Any]:
    """One device for each different part of data; equal parts of several devices are shared out among them."""
    holders: dict[tuple[int, ...], list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(offsets_of(index), []).append(device)
    # The first parts go to the first of their devices, the last ones to the last: so all processes have some.
    return frozenset(own[k * len(own) // len(holders)] for k, own in enumerate(holders.values()))


def offsets_of(index: Sequence[slice]) -> tuple[int, ...]:
    """Index of the first element of a part."""
    return tuple(along.start or 0 for along in index)


@functools.lru_cache(maxsize=4096)
def _text(sharding: Any, num_dims: int) -> str:
    """Text that is equal for equal divisions, whatever names their axes have."""
    return str(sharding._to_xla_hlo_sharding(num_dims))


class DeviceMesh:
    """All devices of this process, or of the job.

    Attributes:
        is_expected: whether tensors are going to be sharded, because the script has made a mesh.
        is_used: whether a tensor was ever sharded.
        is_of_job: whether other processes have some of the devices. Then each process runs the same programs; data that
            are not divided are equal in all of them.
        before_programs_of_job: called before one of them runs that was not handed over with the others.
    """

    def __init__(self) -> None:
        self.devices = devices_of_mesh()
        self.is_expected = False
        self.is_used = False
        self.is_of_job = len({device.process_index for device in self.devices}) > 1
        self.before_programs_of_job: Callable[[], object] = lambda: None
        self._num_divided: Counter[Any] = Counter()
        self._moves: set[str] = set()
        self._under_way: Sequence[Any] = ()
        self._run = Run(0, "", "")
        self._history = 0  # checksum of all runs
        self.whole = whole_on_mesh()
        self._shape_of_uploads: Callable[[], Sequence[int]] | None = None

    def divide_uploads(self, mesh_shape: Callable[[], Sequence[int]]) -> None:
        """Divide large tensors that are uploaded from now on; `mesh_shape` is called at each upload."""
        self._shape_of_uploads = mesh_shape

    def division_of_upload(self, size: Sequence[int]) -> NamedSharding | None:
        """How an uploaded tensor is divided; None if it is not.

        The longest axis of the mesh divides the longest dimension that it divides evenly, and so on: what is left on
        each device is least, and XLA divides the results alike.
        """
        if self._shape_of_uploads is None or math.prod(size) < _FEWEST_DIVIDED:
            return None
        shape = tuple(self._shape_of_uploads())
        spec: list[tuple[int, ...]] = [()] * len(size)
        dims = sorted(range(len(size)), key=lambda dim: -size[dim])
        for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
            free = (dim for dim in dims if not spec[dim] and size[dim] % shape[axis] == 0)
            dim = next(free, None)
            if dim is not None:
                spec[dim] = (axis,)
        if not any(spec):
            return None
        self.is_used = True
        return named(Sharding(tuple(range(len(self.devices))), shape, tuple(spec)))

    def placement(self, inputs: Sequence[Any]) -> Hashable:
        """How inputs are divided; None if none is. Cost: 1 us an input once a tensor was sharded, else nothing."""
        if not self.is_used:
            return None
        found = tuple(_text(x.sharding, x.ndim) if is_divided(x) else "" for x in inputs)
        return found if any(found) else None

    def text_of(self, shardings: Sequence[Any], num_dims: Sequence[int]) -> str:
        """Text of how the inputs of a program lie, for the key of programs on disk, and of who has the devices."""
        if not self.is_used:
            return ""
        lies = (_text(at, count) for at, count in zip(shardings, num_dims, strict=True))
        return " ".join((owners_of(self.devices), *lies))

    def spread(self, data: Any) -> Any:
        """Data on all devices: as they are divided, else a copy on each."""
        return data if is_divided(data) else self.lay(data, self.whole)

    def lay(self, data: Any, sharding: Any) -> Any:
        """Data divided in another way.

        Args:
            data: an array, or a CPU tensor.
        """
        if isinstance(data, torch.Tensor):
            data = as_array(data)
        elif is_divided(data) and self.is_of_job:
            return self._moved(data, sharding)
        if not self.is_of_job:
            return jax.device_put(data, sharding)
        host = np.asarray(data)
        if sharding is not self.whole:  # whose data are compared with the program that takes them
            self._compare(host, sharding)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def _compare(self, host: np.ndarray, sharding: Any) -> None:
        """Compare what the processes divide, the first times that they do so."""
        kind = (host.shape, host.dtype, sharding)
        self._num_divided[kind] += 1
        if self._num_divided[kind] <= _NUM_COMPARED:
            agree(
                "tensors",
                f"dividing {host.dtype}{list(host.shape)} of checksum {checksum([host]):08x}",
                source.user_line(),
            )

    def agree(self, what: str, where: str, is_first: bool) -> None:
        """Compare the programs that the processes run: at the first run of one, and now and then.

        Programs that differ may exchange data that only look alike. So the history of runs is compared, too.
        """
        if is_first or self._run.number % _COMPARED_EVERY == 0:
            agree("programs", f"{what}, after the runs {self._history:08x}", where)

    def launched(self, results: Sequence[Any], what: str, where: str) -> None:
        """Note a program of all processes that runs now; the one before it is done."""
        self._under_way, self._run = results, Run(self._run.number + 1, what, where)
        self._history = zlib.crc32(what.encode(), self._history)

    def wait(self) -> None:
        """Wait for the program of all processes that was launched last.

        Raises:
            CollectiveError: a process has ended, or is at something else.
        """
        if self._under_way:
            self.wait_for(self._under_way)
            self._under_way = ()

    def wait_for(self, arrays: Sequence[Any]) -> None:
        """Wait for results of programs of all processes, as `wait`."""
        wait_together(arrays, self._run)

    def _moved(self, data: Any, sharding: Any) -> Any:
        """Divided data in another way, by a program of all processes."""
        self.before_programs_of_job()
        where = source.user_line()
        what = f"moving {data.dtype}{list(data.shape)} to {_text(sharding, data.ndim)}"
        agree("moves", what, where)
        is_first = what not in self._moves
        self._moves.add(what)
        with without_greeting() if is_first else contextlib.nullcontext():
            found = jax.jit(lambda x: x, out_shardings=sharding)(data)
            self.launched([found], what, where)
            self.wait()
        return found

    def joined(self, part: torch.Tensor, sharding: NamedSharding) -> Any:
        """Data whose parts on this process's devices are those of a tensor."""
        return jax.make_array_from_process_local_data(sharding, as_array(part))

    def here(self, data: Any) -> Any:
        """Divided data as this process can read them. Cost: if other processes have parts, a program of all of them."""
        if data.is_fully_addressable:
            return data
        if not data.is_fully_replicated:
            data = self._moved(data, self.whole)
        return data.addressable_data(0)


def checksum(data: Iterable[Any]) -> int:
    """Checksum of the values of arrays."""
    found = 0
    for array in data:
        found = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, found)
    return found
