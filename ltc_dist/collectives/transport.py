"""How a graph's collectives reach the other processes: one connection for each line, and a transport for each op on it.

All members of a line run its collectives in one order. Each collective has a number in that order, and its message
carries its identity (`identity`), so that two collectives which only look alike are an error and never a number. A
plan that is new is compared before it runs: gloo does not look, and with other sizes elsewhere it may hang. Where a
known plan meets a message of another size, gloo's thread is held until the error is raised. Used by
`process_group`, which connects the lines.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed

from ltc_core.device.register import hold_gloo_threads
from ltc_core.errors import CollectiveError, PeerEndedError
from ltc_core.graph.buckets import deal
from ltc_core.graph.collective import (
    COMBINE,
    TRAILER,
    Route,
    all_reduce_in_vectors,
    is_scaled_first,
    packed,
    plan_text,
    scaled,
    unpacked,
)
from ltc_core.settings import settings
from ltc_core.timeline import marks, slices
from ltc_core.timeline.marks import Awaited
from ltc_core.timeline.slices import Slice
from ltc_dist.collectives.identity import identity, is_agreed, trailer
from ltc_dist.job import protocol
from ltc_dist.job.host_collectives import LOOK_S, Patience, wait_checking
from ltc_dist.job.peers import look_for_ended, too_late

__all__ = ["KINDS", "LINES", "Line", "ProcessTransport", "is_on_gpus", "keep"]

dist: Any = torch.distributed  # its stubs lack what is used here

KINDS = {
    "sum": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
# dtype -> in which gloo reduces it; of another one its reduce-scatter never ends
_REDUCED_AS = {
    dtype: dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    )
} | {torch.int16: torch.int32}  # sums and products of int32 have the same low bits
_LONGEST_PAUSE_S = 0.01  # between two looks at whether a GPU is done
_NUM_TOLD = 8  # collectives that a member tells: the one it is at, and those before
_BETWEEN = "\0"  # two collectives of a text
_HELD_S = 30.0  # a thread of gloo stops so long before it aborts: more than it takes to find out what others are at
_TELL_S = 5.0  # for the others to tell what they are at; a member that waits tells it after LOOK_S


LINES: weakref.WeakSet[Line] = weakref.WeakSet()


@dataclass(frozen=True)
class _Call:
    """One collective of a line, as its members tell each other."""

    number: int
    device: int
    where: str
    plan: str

    def is_other_than(self, other: _Call) -> bool:
        """Whether two members are at different collectives; they may come to one at different lines."""
        return (self.device, self.plan) != (other.device, other.plan)

    def text(self) -> str:
        return "\n".join([str(self.number), str(self.device), self.where, self.plan])

    @staticmethod
    def of(text: str) -> _Call:
        number, device, where, plan = text.split("\n", 3)
        return _Call(int(number), int(device), where, plan)

    def __str__(self) -> str:
        plan = self.plan
        if len(plan) > 400:
            plan = f"{plan[:400]}... ({plan.count('[')} tensors)"
        device = f", on device {self.device}" if self.device >= 0 else ""
        where = f", recorded at {self.where}" if self.where else ""
        return f"{plan}; number {self.number}{device}{where}"


def keep(connection: Any) -> None:
    """Never free a connection: its destructor would wait for the collective that is under way."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


class Line:
    """The connected processes of one line.

    Args:
        name: of the line.
        members: ranks.
        position: of this process among them.
        store: connection to the job's store, of this line's own if another thread than the main one uses it.
        backend: torch.distributed's backend that connects them.
    """

    def __init__(
        self, name: str, members: Sequence[int], position: int, store: Any, backend: Any
    ) -> None:
        self.members = tuple(members)
        self.position = position
        self.backend = backend
        self._rank = self.members[position]
        self.is_pair = len(members) == 2 and not is_on_gpus()
        # address of a vector -> its reduction, its collective, and what is to be done at its end
        self.under_way: dict[int, tuple[Any, _Call, Callable[[], Any]]] = {}
        self.replicas: Sequence[int] | None = None
        self._name = name
        self._store = store
        self._identity = 0  # of the last collective
        self._recent: deque[_Call] = deque(maxlen=_NUM_TOLD)
        self._known: set[str] = set()
        self._num_awaited = 0
        self._slices: dict[int, Slice] = {}  # of the collectives under way, by their numbers
        self._met = 0  # number of the last collective whose plan was new
        LINES.add(self)
        if not is_on_gpus():
            hold_gloo_threads(_HELD_S)

    def on(self, route: Route) -> ProcessTransport:
        return ProcessTransport(self, route)

    # -- agreeing ------------------------------------------------------------------------------

    def begin(self, plan: str, route: Route) -> tuple[_Call, int]:
        """Begin a collective; the first time with this plan, wait until all members have the same one.

        Returns:
            The collective and its identity.
        """
        number = self._recent[-1].number + 1 if self._recent else 1
        call = _Call(number, route.device, route.where, plan)
        self._recent.append(call)
        self._identity = identity(self._identity, route.device, plan)
        if plan not in self._known:
            self._known.add(plan)
            self._meet(call)
        return call, self._identity

    def _meet(self, call: _Call) -> None:
        protocol.NEW_PLAN.tell(self._store, call.text(), **self._place(call.number))
        for position in range(len(self.members)):

            def check(time_is_up: bool, position: int = position) -> None:
                self._check_others(call)
                self._look_for_ended(call)
                if time_is_up:
                    raise too_late(f"rank {self.members[position]}", self._rank, f"is at {call}")

            key = protocol.NEW_PLAN.key(**self._place(call.number, position))
            with slices.watched("wait for other processes", "", self._meeting(call)):
                wait_checking([key], check, self._store)
        self._check_others(call)
        if self._met:  # all are here, and so all have read what was told at the meeting before
            protocol.NEW_PLAN.forget(self._store, **self._place(self._met))
        self._met = call.number

    def _place(self, number: int, position: int | None = None) -> dict[str, Any]:
        position = self.position if position is None else position
        return {"line": self._name, "number": number, "position": position}

    def _tell(self) -> None:
        """Write the collective in which this member waits, and those before it, into the store."""
        told = _BETWEEN.join(call.text() for call in self._recent)
        protocol.AT.tell(self._store, told, line=self._name, position=self.position)

    def _calls_of_others(self, number: int) -> Iterator[tuple[int, _Call]]:
        """What other members tell: at a new plan, or where they wait for a known one. Old news are true, too."""
        for position in range(len(self.members)):
            if position == self.position:
                continue
            told = [
                protocol.NEW_PLAN.heard(self._store, **self._place(number, position)),
                protocol.AT.heard(self._store, line=self._name, position=position),
            ]
            for text in b"".join(t + _BETWEEN.encode() for t in told).decode().split(_BETWEEN):
                if text:
                    yield position, _Call.of(text)

    def _check_others(self, call: _Call) -> None:
        """Raise if another member is, or was, at another collective."""
        own = {each.number: each for each in self._recent}
        for position, other in self._calls_of_others(call.number):
            mine = own.get(other.number)
            if mine is not None and mine.is_other_than(other):
                hold_gloo_threads(math.inf)  # the error ends this process, or the script decides
                raise CollectiveError(
                    f"rank {self._rank} and rank {self.members[position]} are at different "
                    "collectives",
                    got=f"rank {self._rank}: {mine}\n       rank {self.members[position]}: {other}",
                    next="let all processes of a group run the same collectives, on the same devices and on tensors "
                    "of the same sizes",
                )

    def _disagree(self, call: _Call, error: Exception, patience_s: float) -> NoReturn:
        """Raise a CollectiveError when another member tells a different collective; `error` if none does in time."""
        self._tell()
        deadline = time.monotonic() + patience_s
        while True:
            self._check_others(call)
            self._look_for_ended(call)
            if time.monotonic() >= deadline:
                raise error
            time.sleep(LOOK_S / 20)

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, work: Any, call: _Call, looks_for_ended: bool = True) -> None:
        """Wait for an op; now and then check what the missing processes do.

        Args:
            looks_for_ended: False if a member may end while the others are not done: a lost one makes the op fail then.
        """
        self._num_awaited += 1
        with slices.watched("wait for other processes", "", self._meeting(call)) as seen:
            if seen is not None:
                seen.note(plan=call.plan, group=self._name, line=call.where)
            self._wait(work, call, looks_for_ended)
        self._num_awaited -= 1
        begun = self._slices.pop(call.number, None)
        if begun is not None:
            begun.end()

    def show(self, call: _Call, num_bytes: int) -> None:
        """Begin the collective's slice of a timeline; it ends when `wait` is over."""
        seen = slices.begin("collective", "collectives", ends_elsewhere=True)
        if seen is not None:
            seen.note(plan=call.plan, group=self._name, bytes=num_bytes, line=call.where)
            self._slices[call.number] = seen

    def _meeting(self, call: _Call) -> Awaited | None:
        """What a live view is told of a wait; None if nobody watches."""
        return None if marks.on is None else Awaited(self._name, call.number, self.members)

    @property
    def is_stuck(self) -> bool:
        """Whether a collective is under way, or was left under way by an error."""
        return bool(self.under_way) or self._num_awaited > 0

    def disconnect(self) -> None:
        """End the threads of gloo, unless a collective is under way, for which they would be waited for.

        A thread that frees the tensors of the last collective takes the GIL. If the interpreter is being ended by then,
        CPython unwinds the thread, and PyTorch aborts the process. Call this only at exit.
        """
        if self.is_stuck:
            keep(self.backend)
        elif not is_on_gpus():
            self.backend = None

    def _wait(self, work: Any, call: _Call, looks_for_ended: bool) -> None:
        is_done = _is_done_on_gpu if is_on_gpus() else _is_done
        patience = Patience(self._store)
        tells = False
        gone: PeerEndedError | None = None
        while True:
            try:
                if is_done(work):
                    break
            except RuntimeError as error:
                self._disagree(call, error, 2 * LOOK_S)
            if gone is not None:
                raise gone
            self._tell()
            tells = True
            self._check_others(call)
            if looks_for_ended:
                try:
                    self._look_for_ended(call)
                except PeerEndedError as error:
                    gone = error  # it may have come here and ended since the last look at `work`
                    continue
            if patience.is_over():
                raise too_late("one of the others", self._rank, f"is at {call}")
        if tells:
            protocol.AT.take_back(self._store, line=self._name, position=self.position)

    def check(self, agreed: bool, call: _Call) -> None:
        """Raise if the identities in a message did not agree."""
        if agreed:
            return
        error = CollectiveError(
            f"rank {self._rank} is at another collective than others of its group",
            got=f"rank {self._rank}: {call}; the others did not tell theirs",
            next="let all processes of a group run the same collectives, in the same order",
        )
        self._disagree(call, error, _TELL_S)

    def _look_for_ended(self, call: _Call) -> None:
        look_for_ended(self.members, self._rank, f"is at {call}", self._store)


class ProcessTransport:
    """The way of one op through its line: gloo, or NCCL where LTC_DEVICE is cuda."""

    __slots__ = ("_line", "_route")

    def __init__(self, line: Line, route: Route) -> None:
        self._line = line
        self._route = route

    def _begin(self, plan: str, like: torch.Tensor) -> tuple[_Call, torch.Tensor]:
        """Begin a collective; returns it and its trailer, in the dtype of `like`."""
        call, number = self._line.begin(plan, self._route)
        self._line.show(call, like.nbytes)
        return call, trailer(number, like)

    # -- reductions ----------------------------------------------------------------------------

    def all_reduce(
        self, values: list[torch.Tensor], kind: str, scale: float, label: str
    ) -> list[torch.Tensor]:
        return all_reduce_in_vectors(self, values, kind, scale, label)

    def start_all_reduce(self, flat: torch.Tensor, kind: str, plan: str) -> None:
        call, flat[-TRAILER:] = self._begin(plan, flat)
        start = self._start_exchange if self._line.is_pair else self._start_reduction
        work, at_end = start(flat, kind)
        self._line.under_way[flat.data_ptr()] = work, call, at_end

    def _start_reduction(self, flat: torch.Tensor, kind: str) -> tuple[Any, Callable[[], Any]]:
        options = dist.AllreduceOptions()
        options.reduceOp = KINDS[kind]
        wide = _reducible(flat, kind)
        return self._line.backend.allreduce([wide], options), lambda: flat.copy_(wide)

    def _start_exchange(self, flat: torch.Tensor, kind: str) -> tuple[Any, Callable[[], Any]]:
        """Exchange vectors between two processes.

        As many bytes as in gloo's ring, in one go: on two cores 1.2 ms for 1 MiB instead of 2.2, and 0.3 for 4 KiB
        instead of 1.8.
        """
        sizes = [0, 0]
        sizes[1 - self._line.position] = flat.numel()
        come = torch.empty_like(flat)
        work = self._line.backend.alltoall_base(_bytes(come), _bytes(flat), sizes, sizes)
        return work, lambda: COMBINE[kind](flat, come, out=flat)

    def finish_all_reduce(self, flat: torch.Tensor) -> None:
        work, call, at_end = self._line.under_way.pop(flat.data_ptr())
        self._line.wait(work, call)
        at_end()
        self._line.check(is_agreed(flat[-TRAILER:]), call)

    def reduce_scatter(
        self, value: torch.Tensor, kind: str, scale: float, dim: int
    ) -> torch.Tensor:
        plan = plan_text(f"reduce_scatter {kind} along dim {dim} of", [value])
        call, mark = self._begin(plan, value)
        if is_scaled_first(value.dtype, kind):
            value, scale = value * scale, 1.0
        options = dist.ReduceScatterOptions()
        options.reduceOp = KINDS[kind]
        parts = value.chunk(len(self._line.members), dim)
        sent = _reducible(torch.cat([_marked(part, mark) for part in parts]), kind)
        result = sent.new_empty(sent.numel() // len(parts))
        self._line.wait(self._line.backend._reduce_scatter_base(result, sent, options), call)
        self._line.check(is_agreed(result[-TRAILER:]), call)
        return scaled(result[:-TRAILER].view(parts[0].shape).to(value.dtype), scale)

    # -- moves ---------------------------------------------------------------------------------

    def broadcast(self, values: list[torch.Tensor], root: int) -> list[torch.Tensor]:
        plan = plan_text(f"broadcast from {root} of", values)
        call, mark = self._begin(plan, values[0])
        options = dist.BroadcastOptions()
        options.rootRank = root
        buckets = list(deal(values, settings.bucket_mb))
        flats = [packed(values, chosen) for chosen in buckets]
        marks = [mark.to(flat.dtype) for flat in flats]
        for flat, own in zip(flats, marks, strict=True):
            flat[-TRAILER:] = own
        for work in [self._line.backend.broadcast([_bytes(flat)], options) for flat in flats]:
            self._line.wait(work, call)
        self._check_marks([flat[-TRAILER:] for flat in flats], marks, call)
        return unpacked(flats, buckets, [v.shape for v in values])

    def all_gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        call, mark = self._begin(plan_text(f"all_gather along dim {dim} of", [value]), value)
        sent = _marked(value, mark)
        received = [torch.empty_like(sent) for _ in self._line.members]
        rows = [_bytes(row) for row in received]
        self._line.wait(self._line.backend.allgather([rows], [_bytes(sent)]), call)
        self._check_marks([row[-TRAILER:] for row in received], [mark] * len(received), call)
        return torch.cat([row[:-TRAILER].view(value.shape) for row in received], dim)

    def all_to_all(self, value: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
        plan = plan_text(f"all_to_all from dim {split_dim} to dim {concat_dim} of", [value])
        call, mark = self._begin(plan, value)
        parts = value.chunk(len(self._line.members), split_dim)
        sent = torch.stack([_marked(part, mark) for part in parts])
        received = torch.empty_like(sent)
        work = self._line.backend.alltoall_base(_bytes(received), _bytes(sent), [], [])
        self._line.wait(work, call)
        self._check_marks([row[-TRAILER:] for row in received], [mark] * len(parts), call)
        return torch.cat([row[:-TRAILER].view(parts[0].shape) for row in received], concat_dim)

    def permute(self, value: torch.Tensor, pairs: list[int]) -> torch.Tensor:
        call, mark = self._begin(plan_text(f"collective_permute {pairs} of", [value]), value)
        here, size = self._line.position, value.numel() + TRAILER
        routes = list(zip(pairs[::2], pairs[1::2], strict=True))
        members = range(len(self._line.members))
        to = [size * ((here, member) in routes) for member in members]
        come = [size * ((member, here) in routes) for member in members]
        sent = _marked(value, mark).repeat(sum(map(bool, to)))
        received = sent.new_zeros(max(size, sum(come)))
        into = _bytes(received[: sum(come)])
        work = self._line.backend.alltoall_base(into, _bytes(sent), come, to)
        self._line.wait(work, call)
        if any(come):
            self._check_marks([received[-TRAILER:]], [mark], call)
        return received[:-TRAILER].view(value.shape)

    def _check_marks(
        self, came: Sequence[torch.Tensor], marks: Sequence[torch.Tensor], call: _Call
    ) -> None:
        self._line.check(all(map(torch.equal, came, marks)), call)

    # -- programs that reduce by themselves ----------------------------------------------------

    def replicas(self, own: int, count: int) -> Sequence[int] | None:
        if count != len(self._line.members):
            return None
        if self._line.replicas is None:  # chips are not counted as ranks are
            found = self.all_gather(torch.tensor([own]), 0).tolist()
            self._line.replicas = found if sorted(found) == list(range(count)) else ()
        return self._line.replicas or None

    def agree(self, plan: str) -> None:
        self._line.begin(plan, self._route)

    def launched(self, plan: str) -> None:
        return


def _marked(value: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """The message of a value: its elements and a trailer."""
    return torch.cat([value.reshape(-1), mark])


def _bytes(elements: torch.Tensor) -> torch.Tensor:
    """The memory of contiguous elements, a row of bytes each: gloo moves neither complex numbers nor int16."""
    return elements.unsqueeze(-1).view(torch.uint8)


def _reducible(elements: torch.Tensor, kind: str) -> torch.Tensor:
    """The elements in a dtype that is reduced; they themselves if theirs is."""
    unknown = elements.dtype if is_on_gpus() else None  # NCCL raises at once
    dtype = _REDUCED_AS.get(elements.dtype, unknown)
    if dtype is None:
        raise CollectiveError(
            f"processes cannot reduce {elements.dtype}",
            got=f"a reduction {kind!r}",
            next="convert it before, to float32 or int32",
        )
    return elements.to(dtype)


def is_on_gpus() -> bool:
    """Whether the processes are connected by NCCL."""
    return settings.device == "cuda"


def _is_done(work: Any) -> bool:
    """Wait a while for an op; returns whether it is done, and raises its error."""
    try:
        work.wait(datetime.timedelta(seconds=LOOK_S))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # it failed, or was done just after the time was up
    return True


def _is_done_on_gpu(work: Any) -> bool:
    """The same for NCCL, whose wait aborts the communicator at its timeout, and without one does not wait.

    Source: `ProcessGroupNCCL::WorkNCCL::wait` of PyTorch.
    """
    deadline, pause_s = time.monotonic() + LOOK_S, 0.0
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s or 1e-5, _LONGEST_PAUSE_S)
    work.wait(
        datetime.timedelta(seconds=LOOK_S)
    )  # with a time it raises what failed; none is left to pass
    return True
