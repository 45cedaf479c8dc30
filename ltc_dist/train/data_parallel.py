"""Several devices in one process: `DataParallel` runs a training loop in a thread for each.

Each thread has a replica of the model, every n-th batch, and ranks of its own, so that `optimizer_step` averages the
gradients over the threads. The first error stops all threads and is raised. Scripts import this file as `dp`.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

import ltc_core as ltc
from ltc_core.api.verbs import alone_on
from ltc_core.device import register
from ltc_core.errors import LoaderError, LtcError, RankError
from ltc_core.graph import collective
from ltc_dist.collectives.thread_group import Stopped, ThreadGroup, ThreadTransport
from ltc_dist.data.loader import ParallelLoader
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import Ranks, ranks, replica

__all__ = ["Context", "DataParallel"]

Network = torch.nn.Module | Callable[[], torch.nn.Module]


class Context:
    """State of one device between calls of `DataParallel`: its optimizer, its schedule."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def getattr_or(self, name: str, defval: Any = None) -> Any:
        """Return an attribute; if there is none, or it is None, make it from `defval` first, which may be callable."""
        found = getattr(self, name, None)
        if found is None:
            found = defval() if callable(defval) else defval
            setattr(self, name, found)
        return found


class DataParallel:
    """Replicas of a model, one for each device.

    Args:
        network: the model, or a function that makes it. All replicas start with the same parameters.
        device_ids: devices; all lazy ones by default. Without any (`[]`) the loop runs once, in the calling thread,
            with the model where it is and the batches as the loader gives them.
        enumerate_batches: loops get pairs (number, batch), as in the documents of 2019; False: batches.
        kwargs: those of `ParallelLoader`.

    Attributes:
        devices, models: in order.

    Source: `torch_xla.distributed.data_parallel.DataParallel`.
    """

    def __init__(
        self,
        network: Network,
        device_ids: Sequence[torch.device | str] | None = None,
        *,
        enumerate_batches: bool = True,
        **kwargs: Any,
    ) -> None:
        if ranks().world_size > 1:
            raise RankError(
                "DataParallel runs threads of one process, and this one is one of a job",
                got=f"rank {ranks().rank} of {ranks().world_size}",
                next="start the script with plain python",
            )
        chosen = ltc.get_lazy_supported_devices() if device_ids is None else device_ids
        self.devices = [torch.device(d) for d in chosen]
        self._enumerates = enumerate_batches
        self._loader_kwargs = kwargs
        first = network if isinstance(network, torch.nn.Module) else network()
        copies = [copy.deepcopy(first) for _ in self.devices[1:]]
        self.models = [first, *copies]
        for model, device in zip(self.models, self.devices, strict=False):
            model.to(device)
        self._contexts = [Context(d) for d in self.devices] or [Context(_device_of(first))]

    def __call__(
        self,
        loop_fn: Callable[..., Any],
        loader: Iterable[Any],
        batchdim: int = 0,
        *,
        enumerate_batches: bool | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `loop_fn(model, loader, device, context, **kwargs)` for each device; return the results in order.

        Args:
            enumerate_batches: as for the constructor, for this call.

        Raises:
            Exception: what the first loop that failed raised, with its device in a note.
        """
        enumerates = self._enumerates if enumerate_batches is None else enumerate_batches
        if not self.devices:
            batches = enumerate(loader) if enumerates else loader
            context = self._contexts[0]
            return [loop_fn(self.models[0], batches, context.device, context, **kwargs)]
        dealt = ParallelLoader(loader, self.devices, batchdim, **self._loader_kwargs)
        try:
            run = _Run(self, loop_fn, dealt, enumerates, kwargs)
            return run.results()
        finally:
            dealt.close()


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _Run:
    """One call: its threads and their results."""

    def __init__(
        self,
        parallel: DataParallel,
        loop_fn: Callable[..., Any],
        loader: ParallelLoader,
        enumerates: bool,
        kwargs: dict[str, Any],
    ) -> None:
        self._parallel = parallel
        self._loop_fn = loop_fn
        self._loader = loader
        self._enumerates = enumerates
        self._kwargs = kwargs
        count = len(parallel.devices)
        self._group = ThreadGroup(count)
        # Of the loops; the devices' workers are at collectives meanwhile.
        self._meetings = ThreadGroup(count)
        self._names = [f"{count} threads, {k}" for k in range(count)]
        self._results: list[Any] = [None] * count
        self._failures: list[tuple[int, BaseException]] = []

    def results(self) -> list[Any]:
        devices = self._parallel.devices
        threads = [
            threading.Thread(target=self._run, args=(k,), name=f"replica on {device}")
            for k, device in enumerate(devices)
        ]
        if self._names[0] in collective.TRANSPORTS:
            raise RankError(
                "DataParallel is running already in this process",
                next="call one after the other has returned",
            )
        indices = [device.index or 0 for device in devices]
        for k, name in enumerate(self._names):
            collective.TRANSPORTS[name] = ThreadTransport(self._group, k, indices)
            host_collectives.MEETINGS[name] = partial(self._meet, k)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C
            self._stop(error)
            for thread in threads:
                thread.join()
            raise
        finally:
            if self._group.is_stopped:
                self._drop_pending()
            for name in self._names:
                del collective.TRANSPORTS[name]
                del host_collectives.MEETINGS[name]
        if self._failures:
            number, first = self._failures[0]
            first.add_note(f"raised by the loop on {devices[number]}; the others were stopped")
            raise first
        return self._results

    def _drop_pending(self) -> None:
        """Raise the failures of the stopped loops' recorded ops now, not at the next step."""
        for device in self._parallel.devices:
            with contextlib.suppress(LtcError):
                ltc.wait_device_ops(device)

    def _run(self, number: int) -> None:
        parallel = self._parallel
        count, device = len(parallel.devices), parallel.devices[number]
        register.set_device(device.index or 0)
        batches: Iterable[Any] = self._loader.per_device_loader(device)
        if self._enumerates:
            batches = enumerate(batches)
        try:
            own = alone_on(device.index or 0)
            with own, replica(Ranks(number, count, number, count, self._names[number])):
                self._results[number] = self._loop_fn(
                    parallel.models[number],
                    batches,
                    device,
                    parallel._contexts[number],
                    **self._kwargs,
                )
                ltc.wait_device_ops(device)
            for group in (self._group, self._meetings):
                group.leave(number)
        except BaseException as error:
            if not isinstance(error, Stopped | LoaderError) or not self._failures:
                self._failures.append((number, error))
            self._stop(error)

    def _meet(self, number: int, what: str, payload: bytes) -> list[bytes]:
        payloads: list[bytes] = self._meetings.exchange(
            number, what, payload, lambda brought: [brought] * len(brought)
        )
        return payloads

    def _stop(self, error: BaseException) -> None:
        for group in (self._group, self._meetings):
            group.stop(error)
        self._loader.close()
