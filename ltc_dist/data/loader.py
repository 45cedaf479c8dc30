"""Loaders that upload batches while the previous step still runs.

`MpDeviceLoader` wraps any loader, for one device, epoch after epoch. `ParallelLoader` reads a loader once and
distributes its batches over several devices. `next` ends the step: it first hands the recorded graph to the worker. The
threads are those of `prefetch`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

import ltc_core as ltc
from ltc_core import source
from ltc_core.errors import LoaderError
from ltc_core.runtime.found_steps import leave_alone
from ltc_dist.data import workers
from ltc_dist.data.prefetch import Limits, Prefetch, Resumed
from ltc_dist.data.sample_order import (
    base_seed,
    draws_base_seed,
    global_states,
    order_of,
    set_global_states,
    set_order,
)
from ltc_dist.data.state_copy import copied_state, state_reader
from ltc_dist.data.watched import Draws, Watched
from ltc_dist.spmd.sharding import ShardingSpec, divide

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader"]

_PREFETCH_BYTES = 1 << 30

DeviceLike = torch.device | str


class PerDeviceLoader:
    """The batches of one device of a `ParallelLoader`, which makes it. Iterate over it once."""

    def __init__(self, parent: ParallelLoader, lane: int, device: torch.device) -> None:
        self._parent = parent
        self._lane = lane
        self._device = device
        self._num_taken = 0

    def __iter__(self) -> Iterator[Any]:
        if self._parent._prefetch.is_ended(self._lane):
            raise LoaderError(
                "this loader has been read to its end",
                next="make a ParallelLoader for each epoch, or use MpDeviceLoader, which begins anew",
            )
        return self

    def __next__(self) -> Any:
        """Return the next batch, on the device.

        Cost: every `batches_per_execution` batches a step boundary (`mark_step`); waits if the loader is slower.
        """
        if self._num_taken % self._parent.batches_per_execution == 0:
            ltc.mark_step(device=self._device)
        try:
            batch = self._parent._prefetch.take(self._lane)
        except StopIteration:
            ltc.mark_step(device=self._device)
            raise
        self._num_taken += 1
        if self._parent.input_sharding is not None:
            return divide(batch, self._parent.input_sharding)
        return batch

    def __len__(self) -> int:
        return self._parent.per_device_samples()


class ParallelLoader:
    """Reads a loader once, in the background, and uploads its batches.

    Batch i goes to device i modulo their number. Batches that do not make up a round of all devices are dropped
    at the end, and counted in the metrics as DroppedBatch.

    Args:
        cpu_loader: a `DataLoader`, or any other iterable of batches.
        devices: those to upload to.
        batchdim: accepted for old scripts.
        batches_per_execution: batches between two step boundaries.
        loader_prefetch_size: batches loaded ahead of their upload.
        device_prefetch_size: batches uploaded ahead of the training loop, for each device.
        host_to_device_transfer_threads: threads that upload.
        input_sharding: how the tensors of a batch are divided over a mesh (`ltc_dist.spmd.ShardingSpec`). Tensors of
            another number of dimensions stay whole. For batches that are dicts it may be a dict, with a spec or None
            for each name.
        prefetch_bytes: limit for the bytes of all batches loaded ahead; one batch is always allowed.

    Source: `torch_xla.distributed.parallel_loader`. Unlike there, each batch is uploaded as soon as it is loaded, an
    error of the loader is raised in the training loop, and tuples stay tuples.
    """

    def __init__(
        self,
        cpu_loader: Iterable[Any],
        devices: Sequence[DeviceLike],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
        prefetch_bytes: int = _PREFETCH_BYTES,
        _resume: dict[str, Any] | None = None,
        _draws: Draws | None = None,
    ) -> None:
        _check(devices, input_sharding)
        leave_alone()
        sizes = {
            "batches_per_execution": batches_per_execution,
            "loader_prefetch_size": loader_prefetch_size,
            "device_prefetch_size": device_prefetch_size,
            "host_to_device_transfer_threads": host_to_device_transfer_threads,
            "prefetch_bytes": prefetch_bytes,
        }
        for name, size in sizes.items():
            if size < 1:
                raise LoaderError(f"{name} must be at least 1", got=repr(size))
        self._cpu_loader = cpu_loader
        self._devices = [torch.device(device) for device in devices]
        self.batches_per_execution = batches_per_execution
        self.input_sharding = input_sharding
        draws = Draws() if _draws is None else _draws
        draws.begin()
        self._position = _Position(cpu_loader, _resume)
        self._prefetch = Prefetch(
            self._position.batches(cpu_loader, draws),
            self._devices,
            Limits(loader_prefetch_size, device_prefetch_size, prefetch_bytes),
            host_to_device_transfer_threads,
            draws,
            self._position.before_first_read(),
            state_reader(cpu_loader) if self._position.keeps_state else None,
            _may_reuse_memory(cpu_loader),
        )
        self._finalizer = weakref.finalize(self, self._prefetch.close)

    def per_device_loader(self, device: DeviceLike) -> PerDeviceLoader:
        """Return the iterator over the batches of one device."""
        wanted = torch.device(device)
        for lane, known in enumerate(self._devices):
            only_one = wanted.index is None and len(self._devices) == 1
            if wanted == known or (only_one and wanted.type == known.type):
                return PerDeviceLoader(self, lane, known)
        raise LoaderError(
            f"this loader has no batches for {device}",
            got=", ".join(map(str, self._devices)),
            next="name one of its devices",
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the only device."""
        if len(self._devices) > 1:
            raise LoaderError(
                f"this loader deals its batches out to {len(self._devices)} devices",
                next="iterate over per_device_loader(device), one for each",
            )
        return iter(self.per_device_loader(self._devices[0]))

    def __len__(self) -> int:
        return self.per_device_samples()

    def per_device_samples(self) -> int:
        """Count the batches each device gets."""
        return len(self._cpu_loader) // len(self._devices)  # type: ignore[arg-type]

    def next_item(self, device: DeviceLike) -> Any:
        """Return the next batch of a device, None at the end."""
        return next(self.per_device_loader(device), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop: after the batches it has taken, not those prefetched."""
        return self._position.state_dict(self._prefetch)

    def close(self) -> None:
        """End the threads and drop what was loaded ahead; more calls do nothing."""
        self._finalizer()


def _may_reuse_memory(loader: Iterable[Any]) -> bool:
    """Whether a loader may write a batch into the memory of the one before, as a loop of the user's.

    What a `DataLoader` collates itself is new, and so is what comes from another process.
    """
    if not isinstance(loader, DataLoader):
        return True
    collates = loader.batch_sampler is not None and loader.collate_fn is default_collate
    return not (collates or loader.num_workers)


def _check(devices: Sequence[DeviceLike], input_sharding: Any) -> None:
    if isinstance(devices, str | torch.device) or not devices:
        raise LoaderError(
            "ParallelLoader needs a list of devices",
            got=repr(devices),
            next="pass [device], or use MpDeviceLoader(loader, device)",
        )
    specs = input_sharding.values() if isinstance(input_sharding, dict) else [input_sharding]
    if not all(spec is None or isinstance(spec, ShardingSpec) for spec in specs):
        raise LoaderError(
            "input_sharding is no ShardingSpec, and no dict of them",
            got=repr(input_sharding),
            next="pass ltc_dist.spmd.ShardingSpec(mesh, ('data', None)), with an entry for each dimension",
        )


class _Position:
    """Position of the training loop in one pass over a loader; holds no reference to the pass.

    Args:
        resume: the state the pass goes on from.
    """

    def __init__(self, loader: Iterable[Any], resume: dict[str, Any] | None) -> None:
        self.keeps_state = _keeps_state(loader)
        self._loader = loader
        self._draws_base_seed = draws_base_seed(loader)
        if resume is not None:
            self._draws_base_seed = resume.get("draws_base_seed", self._draws_base_seed)
        self._goes_on = resume is not None and resume["rng_state"] is not None
        self._reached = resume.get("host_now") if resume is not None else None
        if resume is not None and self._goes_on:
            self._begun_with = {"torch": resume["rng_state"], **resume.get("host", {})}
            self._order = resume.get("order")  # None: of a version that did not keep it
            self._skipped = resume["num_batches"]
        elif not self.keeps_state:
            self._begun_with, self._order, self._skipped = global_states(), order_of(loader), 0

    def batches(self, loader: Iterable[Any], draws: Draws) -> Iterator[Any]:
        """Iterate over the batches of this pass."""
        if not self._goes_on:
            return _begun(loader, self._draws_base_seed, draws)
        if self._order is not None:
            set_order(loader, self._order, in_mid_epoch=True)
        if self._reached is not None:
            draws.are_known = True
        begin = partial(_begun, loader, self._draws_base_seed, draws)
        return Resumed(begin, self._begun_with, self._skipped, draws, self._reached)

    def before_first_read(self) -> dict[str, Any]:
        """States of the global generators with which this pass reads its first batch."""
        if self.keeps_state:
            return global_states()
        if self._skipped == 0:
            return self._begun_with
        return global_states() if self._reached is None else self._reached

    def state_dict(self, prefetch: Prefetch) -> dict[str, Any]:
        progress = prefetch.progress()
        if self.keeps_state:
            own = prefetch.final_state if progress is None else progress[1]
            now = prefetch.generators() if progress is not None else None
            state = {"loader": copied_state(own)}
            return state if now is None else {**state, "host_now": now}
        if progress is None:
            return _beginning(self._loader)
        host = dict(self._begun_with)
        state = {
            "num_batches": self._skipped + progress[0],
            "rng_state": host.pop("torch"),
            "host": host,
            "draws_base_seed": self._draws_base_seed,
        }
        if (now := prefetch.generators()) is not None:
            state["host_now"] = now
        return state if self._order is None else {**state, "order": self._order}


_NAMES = {"num_batches", "rng_state"}  # of a state; those of older versions have no more


def _beginning(loader: Iterable[Any]) -> dict[str, Any]:
    """State before the next pass over a loader that is not in mid-epoch."""
    return {
        "num_batches": 0,
        "rng_state": None,
        "order": order_of(loader),
        "draws_base_seed": draws_base_seed(loader),
    }


def _keeps_state(loader: Any) -> bool:
    """Whether a loader has a state of its own; accelerate's always has the methods, and may refuse them."""
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False
    try:
        loader.state_dict()
    except (AttributeError, NotImplementedError):
        return False
    return True


def _begun(loader: Iterable[Any], draws_seed: bool, draws: Draws) -> Iterator[Any]:
    with base_seed(loader, draws_seed):
        return Watched(workers.begin(loader), draws)


class MpDeviceLoader:
    """Wraps a loader so that its batches are on `device`; each iteration is an epoch.

    A new iteration ends the one before. Attributes are those of the wrapped loader (`dataset`, `sampler`,
    `batch_size`, ...).

    Args:
        loader: a `DataLoader`, or any iterable that can be iterated again.
        device: where batches go.
        kwargs: those of `ParallelLoader`.

    Source: `torch_xla.distributed.parallel_loader.MpDeviceLoader`.
    """

    def __init__(self, loader: Iterable[Any], device: DeviceLike, **kwargs: Any) -> None:
        _check([device], kwargs.get("input_sharding"))
        self._loader = loader
        self._device = torch.device(device)
        self._parallel_loader_kwargs = kwargs
        # Weak: when the loop is left, its iterator goes, and the threads end. Where it was is kept.
        self._running: weakref.ref[ParallelLoader] | None = None
        self._reached: Callable[[], dict[str, Any]] | None = None
        self._resume: dict[str, Any] | None = None
        self._draws = Draws()

    def __iter__(self) -> Iterator[Any]:
        if (running := self._running_pass()) is not None:
            running._prefetch.followed_at = source.user_line()
            running.close()
        resume, self._resume = self._resume, None
        if resume is not None and "loader" in resume:  # the loader has its position already
            set_global_states(resume["host_now"])
            self._draws.are_known = True
            resume = None
        kwargs = self._parallel_loader_kwargs
        loader = ParallelLoader(
            self._loader, [self._device], **kwargs, _resume=resume, _draws=self._draws
        )
        self._running = weakref.ref(loader)
        self._reached = partial(loader._position.state_dict, loader._prefetch)
        return iter(loader.per_device_loader(self._device))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet: a copy or a pickle is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training loop in the epoch: after the batches it has taken.

        For a loader with a `state_dict` of its own, that state as of this batch. For others, the number of batches, and
        what decided the order of the samples when the epoch began: the global generators of the host, the generators of
        the loader, its samplers and datasets, and their epochs (`set_epoch`).
        """
        if self._reached is not None:
            return self._reached()
        if _keeps_state(self._loader):
            own = {"loader": copied_state(self._loader.state_dict())}  # type: ignore[attr-defined]
            return own if self._resume is None else {**self._resume, **own}
        if self._resume is None:
            return _beginning(self._loader)
        if self._resume["rng_state"] is not None:
            return self._resume
        return {**self._resume, "order": order_of(self._loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where `state` was taken: each sample of the epoch comes once.

        The samplers' order is restored, whatever `set_epoch` says. Generators that a sampler or a dataset draws from
        during the epoch must be attributes of them, or of the loader.

        Raises:
            LoaderError: the state is not one of a loader of this kind, or cannot be copied. In mid-epoch the next
                iteration raises it if the loader has other generators.

        Cost: a loader without a `state_dict` of its own loads the batches of before once more.
        """
        self.close()
        self._reached = None
        keeps_state = _keeps_state(self._loader)
        if ("loader" in state) != keeps_state or not (keeps_state or _NAMES <= state.keys()):
            raise LoaderError(
                "this is not the state of such a loader",
                got=f"the names {', '.join(state) or '(none)'}, expected "
                + ("loader" if keeps_state else "num_batches, rng_state"),
                next="load it into a loader of the kind it was taken from",
            )
        self._resume = None
        if keeps_state:
            # A copy: a loader may keep what it is given as its live state, and change it.
            self._loader.load_state_dict(copied_state(state["loader"]))  # type: ignore[attr-defined]
            self._resume = state if "host_now" in state else None
            return
        self._resume = state
        if state["rng_state"] is None:  # now, so that the program may still seed for its next epoch
            set_order(self._loader, state.get("order", {}), in_mid_epoch=False)

    def close(self) -> None:
        """End the current iteration, if there is one."""
        if (running := self._running_pass()) is not None:
            running.close()

    def _running_pass(self) -> ParallelLoader | None:
        return self._running() if self._running is not None else None
