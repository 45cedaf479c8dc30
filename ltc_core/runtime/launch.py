"""One launch of a program: it runs in a thread, fills the output buffers, and reports failures.

A `Launch` is made by `device_context` at a cut. It runs in the thread that cuts (`begin`) or in the device's worker
(`execute`), and the worker continues where `begin` blocked on other processes. Outputs that the script has waited for
in earlier runs are filled before the rest of the program has run (`watch`). Whatever happens, each output buffer ends
with a value or with an error.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ltc_core import errors, metrics
from ltc_core.executors import core_sharing
from ltc_core.executors.openmp import use_threads
from ltc_core.graph.ir import Graph, Node, TensorMeta, references
from ltc_core.program.failure import NodeFailure
from ltc_core.program.program import Watch
from ltc_core.runtime.program_cache import CompiledGraph
from ltc_core.runtime.worker import Job
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer, MemoryCounter, fill_pending
from ltc_core.thread_state import in_own_state
from ltc_core.timeline import slices
from ltc_core.timeline.slices import Slice

__all__ = ["Failure", "Launch", "Published", "lost_at_a_fork", "note_run"]


_MOST_WATCHED = 4  # outputs: a script that reads all of them waits for the last one anyway


class Published(Job):
    """Done when the watched outputs of a launch are there, or will never be."""

    __slots__ = ("arrow",)

    def __init__(self, arrow: int) -> None:
        super().__init__(_nothing)
        self.arrow = arrow  # that of the launch


def _nothing() -> None:
    pass


class Failure(NamedTuple):
    """An error of a launch, kept until a sync point raises it.

    Attributes:
        error: the error. carriers: the buffers that raise it when they are read; empty if the failure also changed
        values that do not raise it.
    """

    error: errors.LtcError
    carriers: tuple[weakref.ref[Buffer], ...] = ()

    @property
    def is_carried(self) -> bool:
        return any(ref() is not None for ref in self.carriers)


class Launch(Job):
    """One run of a program.

    Args:
        device: the device it runs on.
        memory: counts its bytes.
        compiled: the program.
        inputs: the buffers it reads; their data is dropped as early as possible.
        scalars: the Python numbers of this run.
        sized: number -> meta of this run, where the graph has that of another one.
        outputs: the buffers it fills.
        failures: failures are appended to it.
        num_threads: how many threads the script has set.
        shares: whether it leaves one of them out while a step is recorded.
        num_left_out: how many it leaves out all the time.
    """

    __slots__ = (
        "_compiled", "_cost_ns", "_device", "_earlier", "_failures", "_inputs", "_is_eager", "_memory",
        "_num_left_out", "_num_threads", "_outputs", "_published", "_scalars", "_shares", "_sized", "_started_ns",
        "_steps", "_watched", "arrow", "step",
    )  # fmt: skip

    def __init__(
        self,
        device: torch.device,
        memory: MemoryCounter,
        compiled: CompiledGraph,
        inputs: list[Buffer],
        scalars: Sequence[Any],
        sized: Mapping[int, TensorMeta],
        outputs: list[Buffer],
        failures: deque[Failure],
        num_threads: int,
        shares: bool = False,
        num_left_out: int = 0,
    ) -> None:
        super().__init__(self._run_to_end, self._lose_at_a_fork)
        self._device = device
        self._memory = memory
        self._compiled = compiled
        self._inputs = inputs
        self._scalars = scalars
        self._sized = sized
        self._outputs = outputs
        self._failures = failures
        self._num_threads = num_threads - num_left_out
        self._num_left_out = num_left_out
        self._shares = shares
        self._is_eager = settings.eager
        self._earlier: Sequence[Job] = ()
        self._started_ns = self._cost_ns = 0
        self._steps: Generator[None, None, list[Any]] | None = None
        self._watched: tuple[int, ...] = ()  # positions of outputs that are read before the end
        self._published: Published | None = None
        self.arrow = 0  # for the timeline: from the cut to this run, and on to who waits for it
        self.step = 0

    # -- running -------------------------------------------------------------------------------

    def run_after(self, jobs: Sequence[Job]) -> None:
        """Make the worker wait for these jobs of other devices first."""
        self._earlier = jobs

    def watch(self, positions: tuple[int, ...]) -> None:
        """Have these outputs read as soon as they are there, while the rest of the program still runs."""
        self._watched, self._published = positions, Published(self.arrow)
        for k in positions:
            self._outputs[k].made_by(self._published)

    def publish(self, positions: tuple[int, ...], data: Sequence[Any]) -> None:
        """These outputs are there before the program is launched: it has begun to run."""
        for k, made in zip(positions, data, strict=True):
            self._outputs[k].set(made)

    def note_awaited(self, buffers: Sequence[Buffer]) -> None:
        """The script waits for these of the outputs: the next runs of this program are watched for them."""
        watched = self._compiled.watched
        awaited = set(map(id, buffers))
        new = [
            k for k, each in enumerate(self._outputs) if id(each) in awaited and k not in watched
        ]
        if len(watched) + len(new) <= _MOST_WATCHED:
            self._compiled.watched = (*watched, *new)

    @in_own_state
    def begin(self) -> bool:
        """Run in this thread up to the first wait for other processes; returns whether the program has ended."""
        with slices.watched("run") as seen:
            self._describe(seen)
            self._start()
            is_done = self._run_on()
        if is_done:
            self.cancel()
        return is_done

    @in_own_state
    def _run_to_end(self) -> None:
        """Run, or continue where `begin` stopped."""
        for job in self._earlier:
            job.wait()
        with slices.watched("run") as seen:
            self._describe(seen)
            if not self._started_ns:
                self._start()
            while not self._run_on():
                pass

    def _describe(self, seen: Slice | None) -> None:
        if seen is not None:
            compiled = self._compiled
            seen.note(compiled.described(), step=self.step, tier=compiled.program.runs_as)
            if not self._started_ns:
                seen.pass_arrow(self.arrow)

    def _start(self) -> None:
        self._started_ns = time.perf_counter_ns()
        data = [buffer.data for buffer in self._inputs]
        lost = next((e for buffer in self._inputs if (e := buffer.error) is not None), None)
        self._inputs.clear()
        program = self._compiled.program
        if lost is None:
            self._memory.note_peak(self._compiled.peak_bytes(self._sized))
            watch = Watch(self._watched, self._publish) if self._watched else None
            self._steps = program.run_in_steps(data, self._scalars, watch)
            return
        self._use_threads()
        found = program.salvage(data, self._scalars)
        if found.older:  # the lost values may never be read
            assert isinstance(lost, errors.LtcError)
            self._failures.append(Failure(lost))
        self.resolve(lost, found.data)

    def _run_on(self) -> bool:
        """Run up to the next wait for other processes; returns whether the program has ended, well or not."""
        if self._steps is None:
            return True
        self._use_threads()
        started_cpu = time.thread_time_ns()
        try:
            core_sharing.sharing(self._num_threads if self._shares else 0, next, self._steps)
        except StopIteration as end:
            self._finish(end.value, time.thread_time_ns() - started_cpu)
        except BaseException as failure:
            self.fail(failure)
        else:
            self._cost_ns += time.thread_time_ns() - started_cpu
            return False
        self._steps = None
        return True

    def _use_threads(self) -> None:
        """Set this thread's number of threads, which the user has set in another thread."""
        if self._num_threads != torch.get_num_threads():
            use_threads(self._num_threads)
        core_sharing.leave_out(self._num_left_out)

    # -- its ends ------------------------------------------------------------------------------

    def _publish(self, data: list[Any]) -> None:
        """Fill the outputs that are watched. The program has not ended."""
        outputs = self._outputs
        for k, result in zip(self._watched, data, strict=True):
            outputs[k].set(result)
        self._note_published()

    def _note_published(self) -> None:
        if self._published is not None:
            self._published.cancel()

    def _finish(self, results: Sequence[Any], last_cost_ns: int) -> None:
        fill_pending(self._take_outputs(), results)
        self._note_published()
        elapsed_ns = time.perf_counter_ns() - self._started_ns
        note_run(self._compiled, self._cost_ns + last_cost_ns, elapsed_ns, self._is_eager)

    def fail(self, failure: BaseException) -> None:
        """Fill the outputs that are left after a failure, fail the others, and keep the error."""
        if isinstance(failure, NodeFailure):
            return self._fail_at(failure)
        failed = errors.op_error(  # an op that exits, or a fault of the executor
            failure, what=f"a program was left half done on {self._device}", next="report this"
        )
        self._failures.append(Failure(failed))
        return self.resolve(failed)

    def _fail_at(self, failure: NodeFailure) -> None:
        assert failure.__cause__ is not None
        first = self._error_of(failure.node, failure.__cause__)
        found = {id(failure.__cause__): first}  # an exception of the user may be unhashable
        for node, original in failure.left.causes.values():
            if id(original) not in found:
                found[id(original)] = self._error_of(node, original)
        others = {o: found[id(original)] for o, (_, original) in failure.left.causes.items()}
        lost = [
            (others.get(number, first), weakref.ref(buffer))
            for number, buffer in zip(self._compiled.graph.outputs, self._outputs, strict=True)
            if number not in failure.left.data
        ]
        for error in found.values():
            # The results of a failed op may be lost to an earlier failure, too.
            carriers = tuple(ref for by, ref in lost if by is error)
            if failure.left.older or carriers:
                self._failures.append(Failure(error, () if failure.left.older else carriers))
        # Last, so that the failure is there before anybody can see the older values.
        self.resolve(first, failure.left.data, others)
        metrics.count("FailedExecution")

    def _error_of(self, node: Node | None, original: BaseException) -> errors.LtcError:
        error = errors.op_error(
            original,
            what=f"{_what_failed(node)} on {self._device}",
            got=_operands(node, self._compiled.graph, self._sized),
            where="" if node is None else node.line,
            next=_advice(original),
        )
        error.where_words = "first recorded at"  # this graph may have come from elsewhere since
        return error

    def _lose_at_a_fork(self) -> None:
        self.resolve(lost_at_a_fork(self._device))

    def resolve(
        self,
        error: BaseException,
        kept: Mapping[int, Any] | None = None,
        others: Mapping[int, BaseException] | None = None,
    ) -> None:
        """Fill the outputs that were computed; the rest fail, with their error in `others` or with `error`."""
        kept, others = kept or {}, others or {}
        for number, buffer in zip(self._compiled.graph.outputs, self._take_outputs(), strict=True):
            data = kept.get(number)
            if not buffer.is_pending:  # it was read before the failure
                continue
            if data is not None:
                buffer.set(data)
            else:
                buffer.fail(others.get(number, error))
        self._note_published()

    def _take_outputs(self) -> list[Buffer]:
        """The output buffers; the launch no longer keeps them alive."""
        outputs, self._outputs = self._outputs, []
        return outputs


def note_run(compiled: CompiledGraph, cost_ns: int, elapsed_ns: int, is_eager: bool) -> None:
    """Count a run that took so much time of the processor, and so much time.

    Args:
        is_eager: whether the graph was cut in eager mode, which may be over when the run is.
    """
    (begun_cost_ns, begun_ns), compiled.begun_ns = compiled.begun_ns, (0, 0)
    compiled.policy.note_run(cost_ns + begun_cost_ns, elapsed_ns)
    name = "EagerOpExecuteTime" if is_eager else "ExecuteTime"
    metrics.observe(name, elapsed_ns + begun_ns)


def lost_at_a_fork(device: torch.device) -> errors.LtcError:
    """The error of a value that a forked child does not have."""
    return errors.ExecutionError(
        f"this process was forked while {device} was busy in another thread: the value is lost here",
        got="a device that did not become idle before the fork",
        next="call wait_device_ops() in the thread that uses the device, or start processes by spawn",
    )


def _what_failed(node: Node | None) -> str:
    if node is None:
        return "a compiled program failed while it ran"
    return f"{node.op} failed while its graph ran"


def _operands(node: Node | None, graph: Graph, sized: Mapping[int, TensorMeta]) -> str:
    if node is None:
        return f"a graph of {len(graph.nodes)} ops"
    metas = {**graph.metas(), **sized}
    return ", ".join(str(metas.get(int(r))) for r in references(node))[:500]


def _advice(error: BaseException) -> str:
    kept = (
        "the op's results are lost, what does not depend on them was computed op by op; parameters keep the values "
        "they had before it. "
    )
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return kept + "Use a smaller batch; get_memory_info() tells what the device holds"
    return kept + "LTC_EAGER=1 runs each op where it is called"
