"""Prefetch: batches are loaded in one thread, uploaded in others, returned to the training loop in order.

A dataset that draws from the global generators is read in the training thread instead (`watched`). Each batch is
uploaded as soon as it is loaded, and by the thread that reads where the loader may reuse its memory. The number and the
bytes of prefetched batches are limited. An error of the loader is raised in place of its batch. Nothing here refers to
the objects that the training loop holds, so when they are dropped, `close` ends the threads. Used by `loader`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ltc_core import metrics, source
from ltc_core.errors import LoaderError
from ltc_core.settings import settings
from ltc_core.timeline import slices
from ltc_dist.data.batch import num_bytes, to_device
from ltc_dist.data.sample_order import global_states, set_global_states, with_states
from ltc_dist.data.watched import Draws, Watched

__all__ = ["Limits", "Prefetch", "Resumed"]

_JOIN_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Limits of the prefetch: batches waiting for their upload, batches on each device, bytes of both."""

    host_batches: int
    device_batches: int
    num_bytes: int


@dataclass
class _Item:
    """One batch, or what was raised in its place."""

    index: int
    lane: int
    batch: Any = None
    error: BaseException | None = None
    state: Any = None
    nbytes: int = 0
    is_there: bool = False


@dataclass
class _Lane:
    """Items for one device, in order; those at the head may be uploaded already."""

    device: torch.device
    items: deque[_Item] = field(default_factory=deque)
    num_taken: int = 0
    is_ended: bool = False


@final
class Prefetch:
    """Batch i of `batches` goes to device i modulo their number; an incomplete last group is dropped.

    Args:
        batches: read in a thread of its own. The calling thread reads the first one: a sampler draws its seed then, as
            in a plain loop.
        draws: says when `take` reads, in its thread, because the dataset draws from the global generators.
        begun_with: states of these generators before the first batch.
        state: returns the loader's state after the last batch read; called in the thread that reads.
        may_reuse: whether the loader may write the next batch into the memory of the last one: each batch is uploaded
            before the next one is read.
        num_uploads: threads that upload.

    Attributes:
        followed_at: the user's line that began another pass over the loader, which ended this one.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        devices: Sequence[torch.device],
        limits: Limits,
        num_uploads: int,
        draws: Draws,
        begun_with: dict[str, Any],
        state: Callable[[], Any] | None = None,
        may_reuse: bool = False,
    ) -> None:
        self._may_reuse = may_reuse
        self.followed_at = ""
        self._lanes = [_Lane(device) for device in devices]
        self._limits = limits
        self._state = state
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()  # for their upload
        self._bytes = 0
        self._is_read = False
        self._is_closed = False
        self._was_done = False
        self._had_untaken = False
        self._newest_state: tuple[int, Any] = (0, state() if state is not None else None)
        self._final_state: Any = None
        self._states: deque[tuple[int, Any]] = deque()
        self._counter = itertools.count()
        self._group: list[_Item] = []
        self._draws = draws
        self._batches: Iterator[Any] | None = batches
        self._reading = threading.Lock()  # of several threads that take, one reads
        self._is_parked = False  # the reading thread waits for `take` to read
        self._before_read = (
            begun_with  # states of the generators, for a group that not all devices have taken
        )
        self._read_one(batches)
        reader = threading.Thread(
            target=self._read, args=(batches,), name="prefetch-read", daemon=True
        )
        uploads = [
            threading.Thread(target=self._upload, name=f"prefetch-upload-{k}", daemon=True)
            for k in range(num_uploads)
        ]
        self._threads = [reader, *uploads]
        for thread in self._threads:
            thread.start()

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, batches: Iterator[Any]) -> None:
        while not self._is_read and self._wait_for_room():
            self._read_one(batches)
        with self._changed:
            if self._is_closed or self._is_read:
                self._batches = None

    def _read_one(self, batches: Iterator[Any]) -> None:
        """Read one batch; release the group that it completes."""
        started = time.perf_counter_ns()
        index = next(self._counter)
        item = _Item(index, index % len(self._lanes))
        try:
            with slices.watched("read a batch") as seen:
                if seen is not None:
                    seen.note(batch=index)
                item.batch = next(batches)
            item.nbytes = num_bytes(item.batch)
            if self._may_reuse:
                self._upload_or_note(item)
            if self._state is not None:
                item.state = self._state()
        except StopIteration:
            if self._state is not None:
                self._final_state = self._state()
            self._end([])
            return
        except BaseException as error:  # told where the batch is asked for, on each device
            _end_processes(batches)
            self._end([_Item(index, k, error=error) for k in range(len(self._lanes))])
            return
        metrics.observe("LoadBatchTime", time.perf_counter_ns() - started)
        self._group.append(item)
        if len(self._group) == len(self._lanes):
            self._send(self._group)
            self._group = []

    def _send(self, items: list[_Item]) -> None:
        with self._changed:
            if not self._is_closed:
                self._waiting += items
                self._bytes += sum(item.nbytes for item in items)
                self._changed.notify_all()

    def _end(self, items: list[_Item]) -> None:
        if self._group:
            metrics.count("DroppedBatch", len(self._group))
            self._group = []
        with self._changed:
            self._waiting += items
            self._is_read = True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Block until one more batch may be read in the background; False once there is none, or closed."""

        def is_next() -> bool:
            if self._draws.need_calling_thread and not self._is_parked:
                self._is_parked = True
                self._changed.notify_all()
            return self._is_closed or self._is_read or (not self._is_parked and self._has_room())

        with self._changed:
            self._changed.wait_for(is_next)
            return not (self._is_closed or self._is_read)

    def _has_room(self) -> bool:
        under_way = bool(self._waiting) or any(lane.items for lane in self._lanes)
        fits = self._bytes < self._limits.num_bytes
        return len(self._waiting) < self._limits.host_batches and (fits or not under_way)

    # -- uploading ---------------------------------------------------------------------------------

    def _upload(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._is_over() or self._next())
                item = self._next()
                if self._is_closed or item is None:
                    return
                self._waiting.remove(item)
                lane = self._lanes[item.lane]
                lane.items.append(item)
                self._changed.notify_all()
            if item.error is None and not self._may_reuse:
                self._upload_or_note(item)
            with self._changed:
                item.is_there = True
                self._changed.notify_all()
            del item

    def _upload_or_note(self, item: _Item) -> None:
        """Upload a batch; an error takes its place."""
        device = self._lanes[item.lane].device
        try:
            with slices.watched("upload a batch") as seen:
                if seen is not None:
                    seen.note(batch=item.index, bytes=item.nbytes, device=str(device))
                item.batch = to_device(item.batch, device)
        except BaseException as error:
            item.batch, item.error = None, error

    def _next(self) -> _Item | None:
        """Return the first batch whose device has room for it."""
        most = self._limits.device_batches
        return next((i for i in self._waiting if len(self._lanes[i.lane].items) < most), None)

    def _is_over(self) -> bool:
        return self._is_read and not self._waiting

    # -- taking ------------------------------------------------------------------------------------

    def take(self, lane_number: int) -> Any:
        """Return the next batch of a device.

        Raises:
            StopIteration: there are no more.
            LoaderError: the loader has delivered nothing for too long, or was closed.
            Exception: what the loader raised.
        """
        lane = self._lanes[lane_number]
        started = time.perf_counter_ns()
        with slices.watched("wait for a batch") as seen:
            while (item := self._taken(lane)) is None:
                self._read_here(lane)
            if seen is not None:
                seen.note(batch=lane.num_taken, line=source.user_line())
        metrics.observe("WaitForBatchTime", time.perf_counter_ns() - started)
        if item.error is not None:
            try:
                raise item.error
            finally:
                del item  # else its traceback would hold it, and it the traceback
        return item.batch

    def _taken(self, lane: _Lane) -> _Item | None:
        """Wait for the lane's next item and take it; None if this thread has to read it."""
        with self._changed:
            if (
                lane.is_ended
            ):  # as any iterator that was read to its end, also when the next one has begun
                raise StopIteration
            self._wait_for_batch(lane)
            if self._is_closed:
                raise self._closed()
            if self._is_for_caller(lane):
                return None
            if not lane.items:
                lane.is_ended = True
                raise StopIteration
            item = lane.items.popleft()
            lane.num_taken += 1
            self._bytes -= item.nbytes
            self._note_state(item)
            self._changed.notify_all()
            return item

    def _closed(self) -> LoaderError:
        if not self.followed_at:
            return LoaderError(
                "the loader was closed", next="make a new one, or use MpDeviceLoader"
            )
        return LoaderError(
            "another loop over the same loader has ended this one",
            got=f"the other one begun at {self.followed_at}",
            next="give each of two loops that run at a time a loader of its own",
        )

    def _is_for_caller(self, lane: _Lane) -> bool:
        is_under_way = lane.items or any(self._lanes[i.lane] is lane for i in self._waiting)
        return self._is_parked and not (is_under_way or self._is_read or self._is_closed)

    def _read_here(self, lane: _Lane) -> None:
        """Read a batch in the thread that takes it."""
        with self._reading:
            with self._changed:
                batches = self._batches
                if not self._is_for_caller(lane) or batches is None:
                    return
                if not self._group:
                    self._before_read = global_states()
            self._read_one(batches)
            with self._changed:
                self._is_parked = self._draws.need_calling_thread
                self._changed.notify_all()

    def _wait_for_batch(self, lane: _Lane) -> None:
        def is_decided() -> bool:
            head = lane.items[0].is_there if lane.items else self._is_over()
            return head or self._is_closed or self._is_for_caller(lane)

        started = time.monotonic()
        warned = False
        while not self._changed.wait_for(is_decided, timeout=self._patience_s(started, warned)):
            waited_s = time.monotonic() - started
            if 0 < settings.data_timeout_s <= waited_s:
                raise LoaderError(
                    f"the training loop has waited {waited_s:.0f} s for batch {lane.num_taken}",
                    got=self._what_threads_do(),
                    next="LTC_DATA_TIMEOUT_S sets how long it waits",
                )
            if not warned and waited_s >= settings.data_warning_s:
                warned = True
                print(
                    f"[ltc] the training loop has waited {waited_s:.0f} s for batch {lane.num_taken}, the device is "
                    f"idle: {self._what_threads_do()}",
                    file=sys.stderr,
                    flush=True,
                )

    def _patience_s(self, started: float, warned: bool) -> float:
        limits = [settings.data_timeout_s] if settings.data_timeout_s > 0 else []
        limits += [] if warned else [settings.data_warning_s]
        # A day: a wait with a timeout is one that Ctrl-C ends.
        return max(0.0, min(limits, default=86400.0) - (time.monotonic() - started))

    def _what_threads_do(self) -> str:
        frames = sys._current_frames()
        found = []
        for thread in self._threads:
            frame = frames.get(thread.ident or 0)
            if frame is not None:
                stack = "".join(traceback.format_stack(frame)[-6:])
                found.append(f"{thread.name} is at\n{stack}")
        return "\n".join(found) or "no thread of the loader is running"

    def _note_state(self, item: _Item) -> None:
        """Keep the newest state before which all devices have taken their batches."""
        self._states.append((item.index, item.state))
        taken = min(lane.num_taken for lane in self._lanes) * len(self._lanes)
        done = [s for s in self._states if s[0] < taken]
        if done:
            newest = max(done, key=lambda s: s[0])
            self._newest_state = (newest[0] + 1, newest[1])
            self._states = deque(s for s in self._states if s[0] >= taken)

    def is_ended(self, lane_number: int) -> bool:
        """Whether a device has got its StopIteration."""
        return self._lanes[lane_number].is_ended

    def progress(self) -> tuple[int, Any] | None:
        """Return how many batches all devices have taken, and the loader's state then; None past the end."""
        with self._changed:
            return None if self._is_done() else self._newest_state

    def generators(self) -> dict[str, Any] | None:
        """States of the global generators where the next batch is read; None if the dataset does not draw from them."""
        if not self._draws.are_known:
            return None
        with self._changed:
            return self._before_read if self._has_untaken() else global_states()

    def _has_untaken(self) -> bool:
        has_some = bool(self._group or self._waiting) or any(lane.items for lane in self._lanes)
        return self._had_untaken if self._is_closed else has_some

    def _is_done(self) -> bool:
        # The last batch alone does not end an epoch: who resumes there is to come to its end, not to begin it anew.
        done = all(lane.is_ended for lane in self._lanes)
        return self._was_done if self._is_closed else done

    @property
    def final_state(self) -> Any:
        """The loader's state at its end."""
        return self._final_state

    def close(self) -> None:
        """End the threads and drop what is under way; more calls do nothing. Waits at most 5 s for the dataset."""
        with self._changed:
            self._was_done, self._had_untaken = self._is_done(), self._has_untaken()
            self._is_closed = True
            self._batches = None
            self._waiting.clear()
            self._group = []
            for lane in self._lanes:
                lane.items.clear()
            self._bytes = 0
            self._changed.notify_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


class Resumed:
    """Batches of a resumed pass: it begins as the interrupted one did, and skips the batches taken before.

    This happens at the first `next`, in its thread.

    Args:
        begin: begins the pass.
        begun_with: states of the global generators when the interrupted pass began. Their own are restored afterwards,
            unless the dataset draws from them.
        num_taken: batches to skip.
        draws: whether the dataset draws from the global generators.
        reached: their states after the skipped batches, if the dataset draws; None to leave them as they are.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        begun_with: Mapping[str, Any],
        num_taken: int,
        draws: Draws,
        reached: Mapping[str, Any] | None,
    ) -> None:
        self._begin = begin
        self._begun_with = begun_with
        self._num_taken = num_taken
        self._draws = draws
        self._reached = reached
        self.batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.batches is not None:
            return next(self.batches)
        if self._reached is not None and not self._num_taken:
            set_global_states(self._begun_with)
            self.batches = self._begin()
            return next(self.batches)
        with with_states(self._begun_with):
            self.batches = self._begin()
            deque(itertools.islice(self.batches, self._num_taken), maxlen=0)
            if not (self._draws.are_known and self._num_taken):
                return next(self.batches)
        if self._reached is not None:
            set_global_states(self._reached)
        return next(self.batches)


def _end_processes(batches: Iterator[Any] | None) -> None:
    """End the processes of a `DataLoader` that has failed: its error's traceback would keep them."""
    if isinstance(batches, Resumed):
        batches = batches.batches
    if isinstance(batches, Watched):
        batches = batches.batches
    if isinstance(batches, _MultiProcessingDataLoaderIter) and not batches._persistent_workers:
        batches._shutdown_workers()
