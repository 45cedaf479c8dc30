"""A device at run time: it cuts its trace, launches programs and waits for values.

A `DeviceContext` owns the trace, worker, executor and memory of a device. `cut` hands the recorded graph to the worker
and returns. An error of the worker is kept until the next sync point and raised there, once, with the user's line of
the op that failed. Called by `devices`; calls `program_cache` and the executor.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ltc_core import debug, errors, metrics, progress, source
from ltc_core.executors import make, spinning
from ltc_core.executors.openmp import one_thread
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.passes import origins
from ltc_core.program.novelty import novelty
from ltc_core.record import fast_path
from ltc_core.record.trace import Cut, Trace
from ltc_core.runtime import execution_gate, fork_gate
from ltc_core.runtime.at_once import AtOnce
from ltc_core.runtime.early_run import EarlyRuns
from ltc_core.runtime.found_steps import FoundSteps
from ltc_core.runtime.known_reads import KnownReads
from ltc_core.runtime.known_uploads import KnownUploads
from ltc_core.runtime.later_checks import LaterChecks
from ltc_core.runtime.launch import Failure, Launch, Published, lost_at_a_fork
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.placement import Placement
from ltc_core.runtime.probe import Probes
from ltc_core.runtime.program_cache import CompiledGraph, ProgramCache
from ltc_core.runtime.reads import Reads
from ltc_core.runtime.streaming import Streaming
from ltc_core.runtime.unbounded_loop import LoopWatch
from ltc_core.runtime.worker import Job, Worker
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer, MemoryCounter
from ltc_core.tensor.handles import Cell, Value
from ltc_core.thread_state import in_own_state
from ltc_core.timeline import slices
from ltc_core.timeline.slices import Slice
from ltc_core.uninterrupted import uninterrupted

__all__ = ["DeviceContext"]

# Limit for the steps in a device's trie, about 2 KiB each: a program that never repeats itself must not use ever more.
_TRIE_STEPS = 300_000
_STEPS_OF_NEW_GRAPHS = 50_000  # the same, where graphs do not come again

_LONG_UPLOAD_BYTES = 1 << 29  # without a program in between: a model, not a batch

# Smaller uploads, as a batch, are copied by one thread: a program may have the other cores.
_LONG_COPY_BYTES = 1 << 25

_STEP_ENDS = frozenset({"MarkStep", "OptimizerStep", "Upload"})  # reasons for a cut


class DeviceContext:
    """One device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device(settings.device_name, index)
        self.memory = MemoryCounter()
        self.executor = make(index)
        self.compiler = ProgramCache(self.executor)
        self.trace = fast_path.traces[index] = Trace(self.device, self.memory)
        self._note_shapes()
        self.steps = FoundSteps(self.trace, self.cut)
        self.known_uploads = KnownUploads(self.trace, self.executor, self.steps)
        self.worker = Worker(
            f"ltc-worker-{index}", settings.max_pending_steps, self.executor.begin_thread
        )
        self.failures: deque[Failure] = deque()
        self._later_checks = LaterChecks(self._is_true, self.failures)
        self.launcher = Launcher(
            self.device, self.executor, self.memory, self.worker, self.failures
        )
        self._follow_steps()
        self.at_once = AtOnce(
            self.trace,
            self.memory,
            self.executor,
            self._settle,
            lambda: len(fast_path.traces) == 1,
            lambda: self.reads.is_in_parts and not self.executor.is_compiling,
        )
        self.watch = LoopWatch(self.trace, lambda: self.cut("GraphLimit"))
        self.trace.on_limit = self._on_limit
        self.executor.wait_for_programs = self.worker.drain
        self._marked_ns = 0  # the last cut or wait
        self._uploads = progress.Series(f"uploading to {self.device}", at_least=_LONG_UPLOAD_BYTES)
        self._num_steps = 0  # that have ended
        self._is_past_limit = (
            False  # the last cut was the watch's: what is recorded now goes on with a step
        )
        self._memory_curve, self._programs_curve = (
            f"{self.device} memory",
            f"{self.device} programs",
        )

    @property
    def num_steps(self) -> int:
        """Steps that have ended: cuts at `mark_step`, after an optimizer's step and before an upload."""
        return self._num_steps

    def _follow_steps(self) -> None:
        is_interpreted = isinstance(self.executor, ReferenceExecutor)
        may_overlap = is_interpreted and self.executor.hardware.type == "cpu"
        self.streaming = Streaming(self.trace, may_overlap, self._is_compiling)
        self.early = EarlyRuns(self.trace, self.worker, may_overlap, self._is_compiling)
        self.reads = Reads(self.trace)
        self.probes = Probes(self.trace, self.executor)
        self.known_reads = KnownReads(
            self.trace,
            self.executor,
            self.launcher,
            self.reads,
            self.streaming,
            self.early,
            self._later_checks,
            self._on_known_reads,
        )

    def _settle(self) -> None:
        """Compute what is recorded, for an op that runs at once; not for one of a finalizer in the worker's thread."""
        if self.worker.is_this_thread:
            return
        self.cut("AtOnce", is_awaited=True)
        self.worker.drain()
        self.launcher.release_team_of_worker()
        self.known_reads.resume()

    def _is_compiling(self) -> bool:
        return self.executor.is_compiling

    # -- cutting -------------------------------------------------------------------------------

    def _on_limit(self) -> None:
        is_one_graph = execution_gate.is_closed
        if not is_one_graph and self.steps.end_if_due():
            return
        if self.early.is_due:
            self.early.run_more()
        elif is_one_graph:
            return
        elif self.streaming.is_part_due:
            epoch = self.trace.epoch
            self.cut("Streaming")
            self.steps.move(epoch)
        else:
            self.watch.on_limit()

    def cut(self, reason: str, is_awaited: bool = False) -> Job | None:
        """Hand everything recorded so far to the worker. Return the job, or None if there was nothing to run.

        In the worker's thread, where a finalizer may run, nothing is cut: it would wait for itself.

        Args:
            is_awaited: the caller is going to wait for the job.
        Raises:
            ExecutionForbiddenError: see `execution_gate`.
        Cost:
            compiles a graph that is new; blocks while `settings.max_pending_steps` jobs are waiting, or, where the
            program is to run in this thread, until the worker is idle.
        """
        if reason in _STEP_ENDS and self.at_once.is_on:
            self.at_once.end_step()
            self._num_steps += not self.trace
        if not self.trace or self.worker.is_this_thread:
            return None
        self.known_reads.pause()
        if execution_gate.is_closed and not execution_gate.admits(reason):
            return None
        if self._cut_known(reason, is_awaited):
            return None
        if reason != "Streaming" and not self.early.has_begun:
            self._await_worker(is_awaited)
        fork_gate.pass_through()
        with self.trace.lock:
            if not self.trace:
                return None
            self.reads.before_cut()
            self.early.before_cut()
            fast_path.install()
            self._note_shapes()
            started = time.perf_counter_ns()
            with slices.watched("cut") as seen:
                compiled, job = self._hand_over(reason, is_awaited, seen)
            if compiled is None:
                return None
        if job is not None and settings.save_tensors_file and settings.save_tensors_fmt == "hlo":
            job.wait()  # a program is compiled at its first run
        self._note_cut(reason, compiled, time.perf_counter_ns() - started)
        return job

    def _note_cut(self, reason: str, compiled: CompiledGraph, elapsed_ns: int) -> None:
        is_marked = reason in _STEP_ENDS
        self._num_steps += is_marked
        if reason != "Streaming":
            self.reads.end_step(is_marked)
            self._is_past_limit = reason == "GraphLimit"
        self._uploads.end()
        metrics.count("ExecuteComputation")
        metrics.count(f"Sync.{reason}")
        metrics.count_ops(compiled.recorded)
        debug.on_cut(self.device, reason, compiled, elapsed_ns)
        self._mark()

    def _cut_known(self, reason: str, is_awaited: bool) -> bool:
        """Whether this is a cut whose program C++ was last to run, and nobody watches it; then C++ has made it again.

        Cost: a third of that of another cut.
        """
        if self.trace.cursor.known is None:
            return False
        fork_gate.pass_through()
        with self.trace.lock:
            step = self.trace.cursor
            compiled = step.known
            if compiled is None or not self._is_undisturbed:
                return False
            native = compiled.program.native
            if native is None or not compiled.policy.runs_here(is_awaited, self.reads.is_waited):
                return False
            self.reads.before_cut()
            self.early.before_cut()
            started_ns, started_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            made = compiled.known_cut.make(step, self.trace, self.memory, native)
            if made is None:
                return False
            self.launcher.finish_known(
                compiled, made, started_ns, started_cpu_ns, self.reads.is_waited
            )
            self.compiler.note_found(compiled)
            self.reads.after_cut(compiled, is_awaited)
            self.streaming.after_cut(goes_on=False)
            self.early.after_cut(compiled)
            is_compared = compiled.policy.is_comparing(self.reads.is_waited)
            if is_awaited and reason != "Wait" and not is_compared:
                self.known_reads.let_run(compiled)
        self._note_cut(reason, compiled, time.perf_counter_ns() - started_ns)
        return True

    @property
    def _is_undisturbed(self) -> bool:
        """Whether nothing is to happen at a cut but a run in this thread."""
        is_whole = self.streaming.is_whole and not self.early.has_begun
        return is_whole and not slices.is_watched() and self.launcher.is_free

    def _note_shapes(self) -> None:
        """Whether one graph may serve many sizes, and a common size gets a graph that is compiled."""
        self.trace.may_be_dynamic = self.executor.takes_dynamic_shapes
        self.trace.may_compile = self.executor.compiles

    def _await_worker(self, is_awaited: bool) -> None:
        """Wait for room in the queue, and until the cores are free for a program that is to run in this thread.

        A cut waits for nothing else. Ctrl-C loses nothing yet. The lock is not held: a job does not end before the
        finalizers that run in its thread, and they may record ops.
        """
        if self.worker.is_idle:
            return
        is_next_here = self._is_next_here(is_awaited)
        if is_next_here or self.worker.is_full:
            with slices.watched("wait for the worker") as seen, metrics.timer("DeviceLockWait"):
                if seen is not None:
                    seen.note(step=self._num_steps)
                if is_next_here:
                    self.worker.drain()
                else:
                    self.worker.wait_for_slot()

    def _is_next_here(self, is_awaited: bool) -> bool:
        """Whether a program of the path that ends here was last to run in the thread that cuts, or is quicker there.

        A program that is awaited would wait for the worker's jobs anyway.
        """
        programs = self.trace.cursor.programs or {}
        return any(
            compiled.policy.is_here
            or (is_awaited and compiled.policy.is_quicker_here(True))
            or self.early.is_measured(compiled)
            for compiled in programs.copy().values()
        )

    def _on_known_reads(self, last: CompiledGraph, num_cuts: int, now_ns: int) -> None:
        """C++ has cut so often since the last cut or wait; the last time just now."""
        self.compiler.note_newest(last)
        novelty.note_again()
        elapsed_ns, self._marked_ns = now_ns - self._marked_ns, now_ns
        metrics.observe_many("LoopTime", elapsed_ns / num_cuts, num_cuts)
        spinning.follow(now_ns)
        self.at_once.follow(now_ns, num_cuts)

    def _mark(self) -> None:
        """Count the time since the last cut or wait; what was before the first one is the script's start."""
        now = time.perf_counter_ns()
        if self._marked_ns:
            metrics.observe("LoopTime", now - self._marked_ns)
        self._marked_ns = now
        spinning.follow(now)
        self.at_once.follow(now)

    @uninterrupted  # until the job is handed over, nothing computes the values of the cut
    def _hand_over(
        self, reason: str, is_awaited: bool, seen: Slice | None
    ) -> tuple[CompiledGraph | None, Job | None]:
        """Take the trace apart and launch its program; (None, None) if nothing of it is alive."""
        cut = self.trace.cut()
        if not cut.alive:
            return None, None
        donated = tuple(index for index, value, _ in cut.inputs if value is None)
        try:
            cause = "Streaming" if self.streaming.is_in_parts else reason
            compiled = self.compiler.compile(self.trace, cut, donated, cause)
        except BaseException as error:
            self._fail_outputs(cut, error)
            raise
        if seen is not None:
            seen.note(compiled.described(), step=self._num_steps, reason=reason)
        goes_on = reason == "Streaming"
        self.reads.after_cut(compiled, is_awaited)
        is_measured = self.early.is_measured(compiled)
        early = self.early.after_cut(compiled)
        given = None if early is None else early.place
        if is_measured:
            # A whole step that is waited for overlaps with nothing in the worker.
            given = given or Placement.HERE
        elif given is not None:
            self.launcher.choose(compiled, torch.get_num_threads(), self.reads.is_waited, given)
        elif goes_on:
            given = Placement.WORKER
        if seen is not None:
            self._note_counters()
        job = self.launcher.launch(
            compiled,
            cut,
            is_awaited=is_awaited,
            is_waited=self.reads.is_waited,
            is_in_parts=self.reads.is_in_parts,
            given=given,
            early=early,
            seen=seen,
            step=self._num_steps,
        )
        if compiled.policy.is_comparing(self.reads.is_waited):
            self.known_reads.hold_back(compiled)
        self.streaming.after_cut(goes_on)
        if self.trace.steps > (_STEPS_OF_NEW_GRAPHS if novelty.is_lasting else _TRIE_STEPS):
            self.trace.forget()
            self.compiler.forget()
            metrics.count("TrieForgotten")
        return compiled, job

    def _fail_outputs(self, cut: Cut, error: BaseException) -> None:
        """Restore the values that a failed compile would have rebound; values without an older buffer are lost."""
        nodes = [step.node for step in self.trace.path(cut.path) if step.node is not None]
        chains = origins(nodes, [index for index, _ in cut.alive])
        given = {index: (value, buffer) for index, value, buffer in cut.inputs}
        for index, value in cut.alive:
            old, buffer = given.get((index, *chains[index])[-1], (None, None))
            if buffer is None:
                what = f"the graph could not be compiled on {self.device}"
                buffer = Buffer.failed(self.memory, errors.op_error(error, what=what))
            elif old is not None:  # another tensor has the old value: two must not own one buffer
                buffer.wait_done()
                data = in_own_state(self.executor.copy)(buffer.take())
                buffer = Buffer.ready(self.memory, data, buffer.nbytes)
            value.buffer = buffer

    def _note_counters(self) -> None:
        if slices.on is not None:
            slices.on.note_counter(self._memory_curve, self.memory.used_bytes)
            slices.on.note_counter(self._programs_curve, len(self.compiler))

    # -- forking -------------------------------------------------------------------------------

    def after_fork(self, is_whole: bool) -> None:
        """Reset in a forked child; `is_whole`: nothing was being recorded or run at the fork.

        Else values of the running trace and of jobs that were not done are lost in the child.
        """
        self._marked_ns = 0
        self.memory.after_fork()
        self.trace.after_fork()
        self.trace.limit = self.trace.first_limit
        self.worker.after_fork()
        self._later_checks.clear()
        self._follow_steps()
        if not is_whole:
            for _, value in self.trace.cut().alive:
                value.buffer = Buffer.failed(self.memory, lost_at_a_fork(self.device))

    # -- waiting -------------------------------------------------------------------------------

    def raise_failure(self, all_of_them: bool = True) -> None:
        """Raise the worker's first error that was not raised yet.

        Args:
            all_of_them: also errors that tensors carry, and raise when they are read.
        """
        self._later_checks.look()
        unseen = []
        for _ in range(len(self.failures)):  # the worker may add to them meanwhile
            try:
                failure = self.failures.popleft()
            except IndexError:  # another thread has raised it
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
        """Cut, block until the device is idle, raise its errors."""
        self.cut("Wait", is_awaited=True)
        with slices.watched("wait for the device") as seen, metrics.timer("DeviceLockWait"):
            if seen is not None:
                seen.note(step=self._num_steps, line=source.user_line())
            self.worker.drain()
            self.executor.synchronize()
        self._mark()
        self._after_read()
        self.raise_failure()

    def value_data(self, cell: Cell, reason: str, may_probe: bool = False) -> Any:
        """Current data of a cell, not to be written by the caller.

        Args:
            may_probe: whether equal data will do that is not the cell's own memory.

        Cost: cuts and waits if it is pending, unless a probe can compute it (`probe`).

        Raises:
            DeviceError: a finalizer reads a value that is not computed yet, in the thread that computes it.
            LtcError: the op that computes the value failed.
        """
        known = self.known_reads.data(cell, reason)
        if known is not None:
            return known
        self.known_reads.pause()
        if self._is_in_parts:
            self.cut(reason)  # the value may be that of an earlier part
        with self.trace.lock:
            value = cell.value
            if value.buffer is None and value.epoch != self.trace.epoch:
                return self._zeros(cell.meta)
        if may_probe and value.buffer is None and not self.worker.is_this_thread:
            goes_on = not self.reads.is_waited and not self.early.has_begun
            probed = self.probes.data(value, goes_on)
            if probed is not None:
                self.raise_failure(all_of_them=False)
                return probed
        if value.buffer is None or value.buffer.is_pending:
            self._check_thread()
            with slices.watched("fetch") as seen:
                self._await_value(value, reason, seen)
        self._after_read()
        assert value.buffer is not None
        if self.failures and value.buffer.error is None:
            self.raise_failure(all_of_them=False)
        return value.buffer.take()

    @property
    def _is_in_parts(self) -> bool:
        """Whether what is recorded goes on with a step of which a part was cut, and a read of this thread ends it."""
        is_in_parts = self._is_past_limit or self.streaming.is_in_parts
        return is_in_parts and self.reads.may_be_of_reader

    def _after_read(self) -> None:
        seen = self.reads.after_read(is_held=not self.streaming.is_whole)
        if seen is not None:
            self.streaming.after_read(seen)
            self.early.after_read(seen)
        self._later_checks.look()
        self.known_reads.resume()

    def check_later(self, cell: Cell, error: Callable[[], errors.LtcError]) -> None:
        """Raise the error at the first read or `mark_step` after a run has computed that the bool is false."""
        self._later_checks.add(cell, error)

    @in_own_state
    def _is_true(self, cell: Cell, data: Any) -> bool:
        return bool(self.executor.view(data, cell.meta))

    def _await_value(self, value: Value, reason: str, seen: Slice | None) -> None:
        """Cut if the value is only recorded, and wait for it."""
        if seen is not None:
            seen.note(step=self._num_steps, line=source.user_line(), reason=reason)
        if value.buffer is None:
            self.cut(reason, is_awaited=True)
        if value.buffer is None:
            with self.trace.lock:  # another thread is in the middle of the cut
                pass
        assert value.buffer is not None
        job = value.buffer.job
        if value.buffer.is_pending:
            if isinstance(job, Launch):
                # The error of a check comes with the read after it, however early that ends.
                job.note_awaited([value.buffer, *self._later_checks.pending()])
            with metrics.timer("DeviceLockWait"):
                value.buffer.wait_done()
            self._mark()
            if seen is not None and isinstance(job, Launch | Published):
                seen.end_arrow(job.arrow)
                job.arrow = 0  # ended

    def _check_thread(self) -> None:
        if self.worker.is_this_thread:
            raise errors.DeviceError(
                "a value is read in the thread that computes it, and would be waited for for ever",
                got=f"a finalizer or a hook that runs in {threading.current_thread().name}",
                where=source.user_line(),
                next="read the value in the training loop; a finalizer may record ops, and keep their results",
            )

    @in_own_state
    def _zeros(self, meta: TensorMeta) -> Any:
        return self.executor.upload(torch.zeros(meta.size, dtype=meta.dtype))

    def upload(self, tensor: torch.Tensor, meta: TensorMeta) -> Value:
        """Copy a CPU tensor to the device, with the dtype and the strides of `meta`; the transfer may wait for its use.

        Cost: 4 us and the copy.
        """
        started_ns = time.perf_counter_ns()
        may_copy = slices.on is None and self.executor.keeps_host_tensors
        copy = fast_path.copied(tensor, meta) if may_copy else None
        if copy is None:
            return self._deferred(tensor, meta) or self.upload_all([tensor], [meta])[0]
        metrics.observe("TransferToDeviceTime", time.perf_counter_ns() - started_ns)
        self._note_upload(1, meta.nbytes)
        self.known_uploads.begin()
        return Value.of(Buffer.ready(self.memory, copy, meta.nbytes))

    @in_own_state
    def _deferred(self, tensor: torch.Tensor, meta: TensorMeta) -> Value | None:
        """A value that the executor sends to the device when it is used; None if it sends it at once."""
        data = self.executor.defer(tensor, meta)
        if data is None:
            return None
        metrics.count("CreateDataHandles")
        return Value.of(Buffer.ready(self.memory, data, self.executor.nbytes(meta)))

    def _note_upload(self, count: int, num_bytes: int) -> None:
        metrics.observe("OutboundData", num_bytes)
        self._uploads.note(num_bytes)
        metrics.count("CreateDataHandles", count)

    @in_own_state
    def upload_all(
        self, tensors: Sequence[torch.Tensor], metas: Sequence[TensorMeta]
    ) -> list[Value]:
        """Copy CPU tensors to the device, each with the dtype and the strides of its meta."""
        num_bytes = sum(meta.nbytes for meta in metas)
        with one_thread() if num_bytes < _LONG_COPY_BYTES else nullcontext():
            return self._upload_all(tensors, metas, num_bytes)

    def _upload_all(
        self, tensors: Sequence[torch.Tensor], metas: Sequence[TensorMeta], num_bytes: int
    ) -> list[Value]:
        tensors = [meta.laid_out(t) for t, meta in zip(tensors, metas, strict=True)]
        with slices.watched("upload", "transfers") as seen, metrics.timer("TransferToDeviceTime"):
            if seen is not None:
                line = source.user_line()
                seen.note(step=self._num_steps, bytes=num_bytes, tensors=len(tensors), line=line)
            placed = self.executor.upload_all(tensors)
        self._note_upload(len(tensors), num_bytes)
        sizes = map(self.executor.nbytes, metas)
        return [
            Value.of(Buffer.ready(self.memory, data, nbytes))
            for data, nbytes in zip(placed, sizes, strict=True)
        ]
