"""One device at work: cutting its trace, launching programs, waiting for values.

A `DeviceContext` owns the trace, worker, executor and memory of a device. `cut` hands the recorded graph to the worker
and returns. An error in the background is kept until the next sync point and raised there, once, with the user's line
of the op that failed. Called by `devices`; calls `program_cache` and the executor.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ltc_core import debug, errors, metrics
from ltc_core.executors import NodeFailure, make
from ltc_core.executors.openmp import release_team, use_threads
from ltc_core.graph.ir import Graph, Node, TensorMeta, references
from ltc_core.graph.passes import origins
from ltc_core.record import fast_path
from ltc_core.record.trace import Cut, Trace
from ltc_core.runtime.placement import Placement
from ltc_core.runtime.program_cache import CompiledGraph, ProgramCache
from ltc_core.runtime.sigint import DeferredInterrupts
from ltc_core.runtime.unbounded_loop import LoopWatch
from ltc_core.runtime.worker import Job, Worker
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer, MemoryCounter
from ltc_core.tensor.handles import Cell, Value
from ltc_core.thread_state import in_own_state

__all__ = ["DeviceContext", "forget_jobs"]

# Steps kept in a device's trie, about 2 KiB each: a program that never repeats itself must not grow for ever.
_TRIE_STEPS = 300_000
_DONE = object()

# Name of a group -> the last job handed over that runs its collectives, and the index of that job's device.
_last_jobs: dict[str, tuple[int, Job]] = {}
_last_jobs_lock = threading.Lock()


def forget_jobs() -> None:
    """For a forked child: the jobs run in its parent, where another thread may have held the lock at the fork."""
    global _last_jobs_lock
    _last_jobs.clear()
    _last_jobs_lock = threading.Lock()


class _Failure(NamedTuple):
    """An error of the background.

    Attributes:
        error: the error.
        carriers: the buffers that raise it when they are read; none if other values, which do not, are changed too.
    """

    error: errors.LtcError
    carriers: tuple[weakref.ref[Buffer], ...] = ()

    @property
    def is_carried(self) -> bool:
        return any(ref() is not None for ref in self.carriers)


class DeviceContext:
    """One device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device(settings.device_name, index)
        self.memory = MemoryCounter()
        self.executor = make(index)
        self.compiler = ProgramCache(self.executor)
        self.trace = Trace(self.device, self.memory)
        self.watch = LoopWatch(self.trace, lambda: self.cut("GraphLimit"))
        self.worker = Worker(f"ltc-worker-{index}", settings.max_pending_steps)
        self.failures: deque[_Failure] = deque()
        self._worker_has_team = False

    # -- cutting -------------------------------------------------------------------------------

    def cut(self, reason: str) -> Job | None:
        """Hand everything recorded so far to the worker. Gives the job, None if there was nothing to run.

        Cost: compiles a graph that is new; blocks if `settings.max_pending_steps` jobs are waiting.
        """
        with self.trace.lock:
            if not self.trace:
                return None
            fast_path.install()
            self.worker.wait_for_slot()  # here Ctrl-C loses nothing yet
            started = time.perf_counter_ns()
            with DeferredInterrupts():
                compiled, job = self._hand_over(reason)
            if compiled is None:
                return None
        metrics.count("ExecuteComputation")
        metrics.count(f"Sync.{reason}")
        metrics.count_ops(compiled.recorded)
        debug.on_cut(self.device, reason, compiled, time.perf_counter_ns() - started)
        return job

    def _hand_over(self, reason: str) -> tuple[CompiledGraph | None, Job | None]:
        """Take the trace apart and launch its program; (None, None) if nothing of it is alive."""
        cut = self.trace.cut()
        if not cut.alive:
            return None, None
        donated = tuple(index for index, ref, _ in cut.inputs if ref() is None)
        try:
            compiled = self.compiler.compile(self.trace, cut, donated, reason)
        except BaseException as error:
            self._fail_outputs(cut, error)
            raise
        job = self._launch(compiled, cut)
        if self.trace.steps > _TRIE_STEPS:
            self.trace.forget()
            self.compiler.forget()
            metrics.count("TrieForgotten")
        return compiled, job

    def _fail_outputs(self, cut: Cut, error: BaseException) -> None:
        """Leave every value of a graph that could not be compiled as it was before the step, or lost."""
        nodes = [step.node for step in self.trace.path(cut.path) if step.node is not None]
        chains = origins(nodes, [index for index, _ in cut.alive])
        given = {index: (ref(), buffer) for index, ref, buffer in cut.inputs}
        for index, value in cut.alive:
            old, buffer = given.get((index, *chains[index])[-1], (None, None))
            if buffer is None:
                what = f"the graph could not be compiled on {self.device}"
                buffer = Buffer.failed(self.memory, errors.op_error(error, what=what))
            elif old is not None:  # somebody else holds the old value: two must not own one buffer
                buffer.wait_done()
                data = in_own_state(self.executor.copy)(buffer.take())
                buffer = Buffer.ready(self.memory, data, buffer.nbytes)
            value.buffer = buffer

    def _launch(self, compiled: CompiledGraph, cut: Cut) -> Job:
        inputs = [cut.inputs[k][2] for k in compiled.input_slots]
        outputs = []
        more_bytes = 0
        for (_, value), (nbytes, taken) in zip(cut.alive, compiled.outputs, strict=True):
            buffer = value.buffer = Buffer(self.memory, nbytes)
            more_bytes += nbytes if taken < 0 else nbytes - inputs[taken].hand_over_bytes()
            outputs.append(buffer)
        self.memory.add(more_bytes)
        scalars, num_threads = cut.scalars, torch.get_num_threads()
        upload = self._placement(compiled, num_threads)
        if upload is Placement.SPARING:
            num_threads -= 1
        run = self._run(compiled, inputs, scalars, outputs, num_threads)
        earlier: list[Job] = []
        job = Job(
            lambda: _end(run, earlier),
            lambda: self._resolve(self._lost_at_a_fork(), {}, compiled, outputs),
        )
        if compiled.groups:
            earlier += self._stand_in_line(compiled.groups, job)
        if upload is Placement.HERE and not earlier:
            self._take_the_cores()
            is_done = _begin(run)
            if is_done:
                job.execute()
                return job
            # It waits for other processes: so does the worker from here on, beside the recording of the next step.
        for buffer in outputs:
            buffer.made_by(job)
        release_team()
        self._worker_has_team = True
        try:
            self.worker.submit(job)
        except BaseException as error:  # an interrupt: nobody will run it
            lost = errors.op_error(error, what=f"a program was not handed over on {self.device}")
            self._resolve(lost, {}, compiled, outputs)
            job.cancel()
            raise
        return job

    def _stand_in_line(self, groups: Sequence[str], job: Job) -> list[Job]:
        """The jobs of other devices that run collectives of these groups and were handed over before this job.

        The members of a group run its collectives in one order, whatever device of theirs recorded them.
        """
        found = []
        with _last_jobs_lock:
            for group in groups:
                index, last = _last_jobs.get(group, (self.device.index, job))
                if index != self.device.index and not last.is_done:
                    found.append(last)
                _last_jobs[group] = self.device.index, job
        return found

    def _placement(self, compiled: CompiledGraph, num_threads: int) -> Placement:
        if compiled.program.holds_lock:
            return (
                Placement.HERE
                if compiled.placement.is_small and self.worker.is_idle
                else Placement.WORKER
            )
        if settings.compile != "async":
            # Sums over fewer threads end in other digits, and such a run is to be repeatable: none is spared.
            num_threads = 1
        return compiled.placement.choose(time.perf_counter_ns(), num_threads)

    def _take_the_cores(self) -> None:
        """Wait until the worker has done its work and left the cores."""
        if self._worker_has_team:
            self.worker.submit(Job(release_team))
            self._worker_has_team = False
        self.worker.drain()

    def _run(
        self,
        compiled: CompiledGraph,
        inputs: list[Buffer],
        scalars: list[Any],
        outputs: list[Buffer],
        num_threads: int,
    ) -> Iterator[None]:
        """Run a program. The buffers' old contents are dropped as early as possible.

        Yields where it waits for other processes. Another thread may go on then, and none raises.
        """
        _use_threads(num_threads)
        started, cost_ns = time.perf_counter_ns(), 0
        data = [buffer.data for buffer in inputs]
        lost = next((error for buffer in inputs if (error := buffer.error) is not None), None)
        inputs.clear()
        if lost is not None:
            found = compiled.program.salvage(data, scalars)
            if found.older:  # whoever holds what is lost may never read it
                assert isinstance(lost, errors.LtcError)
                self.failures.append(_Failure(lost))
            self._resolve(lost, found.data, compiled, outputs)
            return
        self.memory.note_peak(compiled.program.peak_bytes)
        steps = compiled.program.run_in_steps(data, scalars)
        results: list[Any] | None = None
        while results is None:
            started_cpu = time.thread_time_ns()
            try:
                next(steps)
            except StopIteration as end:
                results = end.value
            except NodeFailure as failure:
                self._fail(failure, compiled, outputs)
                return
            except BaseException as fault:  # an op that exits, or a fault of the executor
                failed = errors.op_error(
                    fault, what=f"a program was left half done on {self.device}", next="report this"
                )
                self.failures.append(_Failure(failed))
                self._resolve(failed, {}, compiled, outputs)
                return
            cost_ns += time.thread_time_ns() - started_cpu
            if results is None:
                yield
                _use_threads(num_threads)
        for buffer, result in zip(outputs, results, strict=True):
            buffer.set(result)
        elapsed = time.perf_counter_ns() - started
        compiled.placement.note_run(cost_ns, elapsed)
        metrics.observe("ExecuteTime", elapsed)

    def _fail(self, failure: NodeFailure, compiled: CompiledGraph, outputs: list[Buffer]) -> None:
        assert failure.__cause__ is not None
        first = self._error_of(failure.node, failure.__cause__, compiled)
        found = {id(failure.__cause__): first}  # an exception of the user's may have no hash
        for node, original in failure.causes.values():
            if id(original) not in found:
                found[id(original)] = self._error_of(node, original, compiled)
        others = {o: found[id(original)] for o, (_, original) in failure.causes.items()}
        lost = [
            (others.get(number, first), weakref.ref(buffer))
            for number, buffer in zip(compiled.graph.outputs, outputs, strict=True)
            if number not in failure.salvaged
        ]
        for error in found.values():
            # An op may have failed whose results are lost to an earlier failure, too.
            carriers = tuple(ref for by, ref in lost if by is error)
            if failure.older or carriers:
                self.failures.append(_Failure(error, () if failure.older else carriers))
        # Last: who sees values that are older than they should be finds the failure.
        self._resolve(first, failure.salvaged, compiled, outputs, others)
        metrics.count("FailedExecution")

    def _error_of(
        self, node: Node | None, original: BaseException, compiled: CompiledGraph
    ) -> errors.LtcError:
        error = errors.op_error(
            original,
            what=f"{_what_failed(node)} on {self.device}",
            got=_operands(node, compiled.graph),
            where="" if node is None else node.line,
            next=_advice(original),
        )
        error.where_words = "first recorded at"  # this graph may have come from elsewhere since
        return error

    def _resolve(
        self,
        error: BaseException,
        kept: dict[int, Any],
        compiled: CompiledGraph,
        outputs: list[Buffer],
        others: Mapping[int, BaseException] | None = None,
    ) -> None:
        """Give the outputs of a run that failed what was kept of them; the rest fail with `error` or as in `others`."""
        for number, buffer in zip(compiled.graph.outputs, outputs, strict=True):
            data = kept.get(number)
            if data is not None:
                buffer.set(data)
            else:
                buffer.fail(others.get(number, error) if others else error)

    # -- forking -------------------------------------------------------------------------------

    def after_fork(self, is_whole: bool) -> None:
        """Begin anew in a forked child; `is_whole` says that nothing was recorded or run at the fork.

        Else values of the running trace and of jobs that were not done are lost in the child.
        """
        self.memory.after_fork()
        self.trace.after_fork()
        self.worker.after_fork()
        if not is_whole:
            for _, value in self.trace.cut().alive:
                value.buffer = Buffer.failed(self.memory, self._lost_at_a_fork())

    def _lost_at_a_fork(self) -> errors.LtcError:
        return errors.ExecutionError(
            f"this process was forked while {self.device} was busy in another thread: the value is lost here",
            got="a device that did not become idle before the fork",
            next="call wait_device_ops() in the thread that uses the device, or start processes by spawn",
        )

    # -- waiting -------------------------------------------------------------------------------

    def raise_failure(self, all_of_them: bool = True) -> None:
        """Raise the first error of the background that nobody was told of yet.

        Args:
            all_of_them: also those that tensors still carry, which raise them when they are read.
        """
        unseen = []
        for _ in range(len(self.failures)):  # the worker may add to them meanwhile
            try:
                failure = self.failures.popleft()
            except IndexError:  # another thread was told of it
                break
            if failure.error.seen:
                continue
            if not all_of_them and failure.is_carried:
                self.failures.append(failure)
            else:
                unseen.append(failure.error)
        if unseen:
            first, more = unseen[0], len(unseen) - 1
            if more:
                first.add_note(f"  {more} more failed after it.")
            raise errors.to_raise(first)

    def wait(self) -> None:
        """Cut, block until the device is idle, raise what failed."""
        with metrics.timer("DeviceLockWait"):
            self.cut("Wait")
            self.worker.drain()
            self.executor.synchronize()
        self.raise_failure()

    def value_data(self, cell: Cell, reason: str) -> Any:
        """Give the data a cell holds now; the caller must not write it. Cost: cuts and waits if pending."""
        with self.trace.lock:
            value = cell.value
            if value.buffer is None:
                if value.epoch != self.trace.epoch:
                    return self._zeros(cell.meta)
                self.cut(reason)
        assert value.buffer is not None
        if value.buffer.is_pending:
            with metrics.timer("DeviceLockWait"):
                value.buffer.wait_done()
        if self.failures and value.buffer.error is None:
            self.raise_failure(all_of_them=False)
        return value.buffer.take()

    @in_own_state
    def _zeros(self, meta: TensorMeta) -> Any:
        return self.executor.upload(torch.zeros(meta.size, dtype=meta.dtype))

    def upload(self, tensor: torch.Tensor, meta: TensorMeta) -> Value:
        """Copy a CPU tensor to the device, with the dtype and the strides of `meta`."""
        return self.upload_all([tensor], [meta])[0]

    @in_own_state
    def upload_all(
        self, tensors: Sequence[torch.Tensor], metas: Sequence[TensorMeta]
    ) -> list[Value]:
        """Copy CPU tensors to the device, each with the dtype and the strides of its meta."""
        tensors = [meta.laid_out(t) for t, meta in zip(tensors, metas, strict=True)]
        with metrics.timer("TransferToDeviceTime"):
            placed = self.executor.upload_all(tensors)
        metrics.observe("OutboundData", sum(tensor.nbytes for tensor in tensors))
        sizes = map(self.executor.nbytes, metas)
        return [
            Value.of(Buffer.ready(self.memory, data, nbytes))
            for data, nbytes in zip(placed, sizes, strict=True)
        ]


def _use_threads(count: int) -> None:
    """Compute with as many threads as the user asked for in another thread."""
    if count != torch.get_num_threads():
        use_threads(count)


@in_own_state
def _begin(run: Iterator[None]) -> bool:
    """Go on with a run up to the next wait for other processes; returns whether it is done."""
    return next(run, _DONE) is _DONE


@in_own_state
def _end(run: Iterator[None], earlier: Sequence[Job] = ()) -> None:
    for job in earlier:
        job.wait()
    for _ in run:
        pass


def _what_failed(node: Node | None) -> str:
    if node is None:
        return "a compiled program failed while it ran"
    return f"{node.op} failed while its graph ran"


def _operands(node: Node | None, graph: Graph) -> str:
    if node is None:
        return f"a graph of {len(graph.nodes)} ops"
    metas = graph.metas()
    return ", ".join(str(metas.get(int(r))) for r in references(node))[:500]


def _advice(error: BaseException) -> str:
    kept = (
        "the op's results are lost, what does not depend on them was computed op by op; parameters keep the values "
        "they had before it. "
    )
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return kept + "Use a smaller batch; get_memory_info() tells what the device holds"
    return kept + "LTC_EAGER=1 runs each op where it is called"
