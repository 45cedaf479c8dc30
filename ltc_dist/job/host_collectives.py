"""Collectives of a job's processes on the host: rendezvous by tag, and reductions of Python values.

Messages go through the job's store, served by its launcher, or by rank 0 at MASTER_ADDR. A wait first hands over the
recorded collectives, because other processes may wait for them: see `wait_for`. A failed wait names the missing
process: as soon as that process has ended, else at the timeout. (`store.synchronize` of torch.distributed.elastic names
no process, and its keys stay in the store.) The threads of `train.data_parallel` meet without a store: `MEETINGS`.
Uses `ranks`; used by `collectives.process_group`, `processes.spawn` and `checkpoint`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed

import ltc_core as ltc
from ltc_core.errors import (
    LtcError,
    PeerEndedError,
    RankEndedError,
    RankError,
    RankTimeoutError,
    SettingsError,
    first_line,
    listed,
)
from ltc_core.runtime.collective_tokens import hand_over
from ltc_core.runtime.devices import abandon_work, contexts, exit_patience_s
from ltc_core.serialization.weights_only import load_weights_only
from ltc_core.settings import settings
from ltc_core.timeline import slices
from ltc_core.timeline.marks import Awaited
from ltc_dist.job import protocol
from ltc_dist.job.ranks import Ranks, owns_rank, ranks
from ltc_dist.job.store import connect

__all__ = [
    "LOOK_S",
    "MEETINGS",
    "Patience",
    "abandon",
    "before_leaving",
    "busy",
    "connected",
    "do_on_ordinals",
    "ended",
    "job_store",
    "leave",
    "await_values",
    "mesh_reduce",
    "rendezvous",
    "tell_ended",
    "wait_for",
    "wait_checking",
]

LOOK_S = 1.0  # between two checks whether an awaited process has ended
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-4, 0.1  # between two polls of the store

c10d: Any = torch.distributed  # its stubs lack what is used here

_lock = threading.Lock()
_store: Any = None
_has_left = 0  # id of the process that has left; a forked child has another id
_meetings: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
exit_code: int | None = None  # of this process; set when its script has failed
_last_calls: list[Callable[[], None]] = []
_idle_calls: list[Callable[[], object]] = []
# name of a thread's group (`Ranks.threads`) -> brings a payload to a meeting of all threads, returns those of all
MEETINGS: dict[str, Callable[[str, bytes], list[bytes]]] = {}


def job_store() -> Any:
    """Return the store of this job, connected on first use.

    Raises:
        RankError: it cannot be reached.
    """
    global _store
    with _lock:
        if _store is None:
            _store = connected()
        return _store


def connected() -> Any:
    """New connection to the store of this job.

    Raises:
        RankError: it cannot be reached.
    """
    here = ranks()
    try:
        found = connect(here.rank, here.world_size)
    except (RuntimeError, ValueError) as error:  # c10d's own errors, and variables that are missing
        raise RankError(
            "the store of the job cannot be reached",
            got=first_line(error),
            next="start the script with ltc-launch or torchrun, or set MASTER_ADDR and MASTER_PORT for srun or mpirun; "
            "on several hosts MASTER_ADDR must be reachable",
        ) from error
    # A launcher may keep its store when it restarts the processes. On one host the prefix separates the attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _keys_of_job(found, here.world_size == here.local_world_size, attempt)


def _keys_of_job(store: Any, is_one_host: bool, attempt: str) -> Any:
    return c10d.PrefixStore(f"ltc/{attempt}" if is_one_host else "ltc", store)


def tell_ended(rank: int, store: Any, is_one_host: bool = True, attempt: int = 0) -> None:
    """Write `ended` into the store for a rank that ended without doing so. The parent of the job calls it.

    Args:
        store: the one that processes find at MASTER_ADDR.
        attempt: how often the processes were started before.
    """
    protocol.ENDED.tell(_keys_of_job(store, is_one_host, str(attempt)), rank=rank)


def before_leaving(call: Callable[[], None]) -> None:
    """Register a function that `leave` calls first, while the other processes can still be reached."""
    _last_calls.append(call)


def before_ended(call: Callable[[], object]) -> None:
    """Register a function that `leave` calls once the devices are idle, before it reports that this process ends."""
    _idle_calls.append(call)


def abandon() -> None:
    """Let this process exit at once: `leave` does nothing, and the jobs in flight are dropped."""
    global _has_left
    _has_left = os.getpid()
    abandon_work()


def leave() -> None:
    """Hand over the recorded collectives, wait for the jobs in flight, and report that this process ends.

    Raises:
        Exception: what a function of `before_leaving` raised; the rest has been done.
    """
    global _has_left
    try:
        here = ranks()
    except (
        SettingsError
    ):  # the environment names a part of a job, which this process has not joined
        here = Ranks()
    if _has_left == os.getpid() or here.threads:
        return
    _has_left = os.getpid()
    try:
        for call in _last_calls:
            call()
    finally:
        if here.world_size > 1:
            _leave_job(here.rank)


def leave_at_exit() -> None:
    """`leave` for `atexit`. What fails then makes exit code 0 to 74: Python has no other way to say it there."""
    try:
        leave()
    except LtcError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if not hasattr(sys, "last_value"):  # else an exception decides
            sys.stdout.flush()
            os._exit(os.EX_IOERR)


def _leave_job(rank: int) -> None:
    global _store
    if not hasattr(
        sys, "last_value"
    ):  # after an uncaught exception the recorded collectives are dropped
        try:
            hand_over()
        except LtcError as error:  # nobody can catch it here; the others see `ended` below
            print(f"ltc: {error}", file=sys.stderr, flush=True)
    for ctx in contexts():
        ctx.worker.drain(exit_patience_s())
    for call in _idle_calls:
        call()
    # A launcher's store outlives this process. A store served by rank 0 may be gone, or may never have been made.
    has_store = _store is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_store and owns_rank():
        with contextlib.suppress(RuntimeError):
            protocol.ENDED.tell(job_store(), rank=rank)
    _store = None


def rendezvous(tag: str, payload: bytes = b"", replicas: Iterable[int] = ()) -> list[bytes]:
    """Wait until every process has called this with `tag` as often as this one; exchange payloads.

    The processes may call it in different places: only the tag must agree. A call that raises does not count. In the
    threads of a DataParallel the threads meet, all of them and in one order of tags.

    Args:
        replicas: the participating ranks; all by default.

    Returns:
        The payloads, in the order of `replicas` (of ranks by default).

    Raises:
        TypeError: the payload is not bytes.
        RankError: a process has ended, or has not come in time; or this rank is not one of `replicas`.
        CollectiveError: a thread of the DataParallel has ended, has failed, is at another tag, or has not come in time.

    Cost: hands over recorded collectives; nothing else is synced.

    Source: `torch_xla.core.xla_model.rendezvous` of the versions that used the tag.
    """
    if not isinstance(payload, bytes):
        raise TypeError(f"`payload` must be bytes, not {type(payload)}")
    here = ranks()
    members = tuple(replicas) or tuple(range(here.world_size))
    if here.rank not in members or not set(members) <= set(range(here.world_size)):
        raise RankError(
            f"rank {here.rank} cannot come to rendezvous {tag!r}",
            got=f"replicas {listed(members)} of {here.world_size} processes",
            next="name this rank and others of the job",
        )
    if len(members) == 1:
        return [payload]
    if here.threads:
        return _meet_threads(here, tag, payload, members)
    with _lock:
        _meetings[tag, members] += 1
        number = _meetings[tag, members]
    store = job_store()
    place = {"tag": tag, "members": ",".join(map(str, members))}
    protocol.MEETING.tell(store, payload, **place, number=number, rank=here.rank)
    keys = [protocol.MEETING.key(**place, number=number, rank=rank) for rank in members]
    try:
        wait_for(keys, members, f"rendezvous {tag!r}")
    except BaseException:
        with _lock:
            if _meetings[tag, members] == number:
                _meetings[tag, members] -= 1
        with contextlib.suppress(RuntimeError):  # the store may be gone
            protocol.MEETING.forget(store, **place, number=number, rank=here.rank)
        raise
    payloads = [bytes(store.get(key)) for key in keys]
    # All processes have arrived at this meeting, so all have read the payloads of the previous one.
    protocol.MEETING.forget(store, **place, number=number - 1, rank=here.rank)
    return payloads


def _meet_threads(here: Ranks, tag: str, payload: bytes, members: tuple[int, ...]) -> list[bytes]:
    if len(members) < here.world_size:
        raise RankError(
            "threads meet all together",
            got=f"rendezvous {tag!r} of {len(members)} of {here.world_size} threads",
            next="leave `replicas` out, or use processes",
        )
    hand_over(here.threads)
    payloads = MEETINGS[here.threads](f"rendezvous {tag!r}", payload)
    return [payloads[rank] for rank in members]


def wait_for(keys: Sequence[str], of: Sequence[int], what: str) -> None:
    """Wait until the keys are in the job's store; rank `of[i]` sets `keys[i]`.

    Collectives that are recorded and not cut are handed over first, because other processes may wait for them. A
    recording thread waits for other processes only through this function, or calls `hand_over` itself.

    Raises:
        RankError: a process has ended without setting its key.
        RankTimeoutError: LTC_COLLECTIVE_TIMEOUT_S has passed.

    Cost: cuts graphs with collectives; nothing else is synced.
    """
    hand_over()
    with slices.watched("wait for other processes", "", Awaited(what, 0, tuple(of))):
        wait_checking(keys, lambda time_is_up: _check_missing(keys, of, what, time_is_up))


def _check_missing(keys: Sequence[str], of: Sequence[int], what: str, time_is_up: bool) -> None:
    """Raise if a missing process has ended, or at the timeout."""
    gone = ended(of)
    missing = [r for r, key in zip(of, keys, strict=True) if not job_store().check([key])]
    came = f"{len(of) - len(missing)} of {len(of)} have come; missing: ranks {listed(missing)}"
    doing = protocol.BUSY.heard(job_store()).decode()
    if doing:
        came += f"; {doing}"
    never = [r for r in gone if r in missing]
    if never:
        raise RankEndedError(
            f"rank {never[0]} has ended and will not come to {what}",
            got=came,
            next="let every process come to it as often as the others",
        )
    if missing and time_is_up:
        raise RankTimeoutError(
            f"{what} was not complete after {settings.collective_timeout_s:g} s",
            got=came,
            next="let every process come to it; LTC_COLLECTIVE_TIMEOUT_S sets how long one waits",
        )


def wait_checking(keys: Sequence[str], check: Callable[[bool], None], store: Any = None) -> None:
    """Wait until the keys are in the job's store.

    Args:
        check: called once a second, with whether the timeout has passed; raises to end the wait.
        store: a connection of the caller's own.
    """
    # Not `store.wait`: PyTorch logs a warning for each wait that times out.
    store = job_store() if store is None else store
    start = looked = time.monotonic()
    patience = Patience(store)
    look_s = min(LOOK_S, settings.collective_timeout_s)
    while not store.check(list(keys)):
        now = time.monotonic()
        if now - looked >= look_s:
            try:
                check(patience.is_over())
            except (PeerEndedError, RankEndedError):
                if store.check(list(keys)):  # it has written its key and ended since the last look
                    return
                raise
            looked = now
        time.sleep(min(max(_FIRST_PAUSE_S, (now - start) / 20), _LAST_PAUSE_S))


class Patience:
    """How long to wait for other processes: LTC_COLLECTIVE_TIMEOUT_S since one of them has told progress (`busy`).

    Args:
        store: connection to the job's store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._since = time.monotonic()
        self._heard = b""

    def is_over(self) -> bool:
        """Whether the time is up. Cost: a question to the store; ask it about once a second."""
        heard, now = protocol.BUSY.heard(self._store), time.monotonic()
        if heard != self._heard:
            self._heard, self._since = heard, now
        return now - self._since >= settings.collective_timeout_s


@contextlib.contextmanager
def busy(what: str) -> Iterator[Callable[[], None]]:
    """While this process does what others wait for, such as to write a checkpoint, their timeouts begin anew.

    Yields:
        A function to be called at each bit of progress. It tells them so once a second.
    """
    here = ranks()
    if here.world_size == 1 or here.threads:
        yield lambda: None
        return
    store, began, told = job_store(), time.monotonic(), -math.inf

    def progress() -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= LOOK_S:
            told = now
            with contextlib.suppress(RuntimeError):  # without a store nobody waits
                protocol.BUSY.tell(store, f"rank {here.rank} {what}, since {now - began:.1f} s")

    progress()
    try:
        yield progress
    finally:
        with contextlib.suppress(RuntimeError):
            protocol.BUSY.take_back(store)


def await_values(keys: Sequence[str], of: Sequence[int], what: str) -> list[bytes]:
    """Wait until the keys are in the job's store, and return their values; rank `of[i]` sets `keys[i]`.

    For background threads: unlike `wait_for`, it does not hand over recorded collectives.

    Raises:
        RankError: a process has ended without setting its key.
        RankTimeoutError: LTC_COLLECTIVE_TIMEOUT_S has passed.
    """
    store = job_store()
    wait_checking(keys, lambda time_is_up: _check_missing(keys, of, what, time_is_up), store)
    return [bytes(store.get(key)) for key in keys]


def ended(of: Iterable[int], store: Any = None) -> list[int]:
    """Those of the ranks whose processes have ended."""
    store = job_store() if store is None else store
    return [rank for rank in of if protocol.ENDED.heard(store, rank=rank)]


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """Collect `data` from every process, in the order of ranks, and reduce it in every process.

    Args:
        data: numbers, strings, tensors, numpy arrays, and lists, tuples and dicts of them. Tensors arrive on the CPU.
        reduce_fn: called with the list, such as `sum`, `max`, `torch.cat`, `numpy.mean`.

    Raises:
        RankError: a process does not come; or `data` holds another type.

    Cost: waits for all processes; syncs tensors of a device.

    Source: `torch_xla.core.xla_model.mesh_reduce`.
    """
    payloads = rendezvous(f"mesh_reduce/{tag}", _encode(ltc.to_cpu(data)))
    return reduce_fn([_decode(payload) for payload in payloads])


def _encode(data: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    payload = buffer.getvalue()
    _decode(payload)  # so that an error is raised in this process, not in all others
    return payload


def _decode(payload: bytes) -> Any:
    """Decode data of another process; code in it is not run."""
    try:
        with torch.serialization.safe_globals(_numpy_types()):
            return load_weights_only(io.BytesIO(payload), "the data of another process")
    except Exception as error:
        raise RankError(
            "this cannot be sent to other processes",
            got=first_line(error),
            next="send numbers, texts, tensors, numpy arrays, or lists, tuples and dicts of them",
        ) from error


def _numpy_types() -> list[Any]:
    try:
        import numpy
    except ImportError:
        return []
    core = getattr(numpy, "_core", None) or numpy.core
    dtypes = {type(numpy.dtype(kind)) for kind in numpy.typecodes["All"]}
    return [
        core.multiarray._reconstruct,
        core.multiarray.scalar,
        numpy.ndarray,
        numpy.dtype,
        *dtypes,
    ]


def do_on_ordinals(
    target: Callable[..., Any], data: Sequence[Any] = (), ordinals: int | Iterable[int] = (0,)
) -> Any:
    """Call `target(*data)` in some processes; the others wait for them.

    Returns:
        What `target` returned; None in the others.

    Source: `torch_xla.core.xla_model.do_on_ordinals`.
    """
    chosen = (ordinals,) if isinstance(ordinals, int) else tuple(ordinals)
    result = target(*data) if ranks().rank in chosen else None
    rendezvous("do_on_ordinals")
    return result
