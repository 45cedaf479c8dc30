"""Launches programs: each runs in C++ in this thread, as a `Launch` there, or as one in the worker.

One for each device, called by `device_context` with what a cut has given; `run_policy` says which is quicker.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ltc_core import errors, metrics
from ltc_core.executors import Executor, core_sharing
from ltc_core.executors.openmp import release_team
from ltc_core.graph.ir import TensorMeta
from ltc_core.program.novelty import novelty
from ltc_core.program.program import Tier
from ltc_core.record.trace import Cut
from ltc_core.runtime.early_run import EarlyRun
from ltc_core.runtime.launch import Failure, Launch, note_run
from ltc_core.runtime.placement import Placement, Places
from ltc_core.runtime.program_cache import CompiledGraph
from ltc_core.runtime.worker import Job, Worker
from ltc_core.settings import settings
from ltc_core.tensor.buffer import Buffer, MemoryCounter, fill_pending, pending_outputs
from ltc_core.thread_state import num_dispatch_modes
from ltc_core.timeline.slices import Slice

__all__ = ["Launcher", "forget_jobs"]

# Name of a group -> the last job handed over that runs its collectives, and the index of that job's device.
_last_jobs: dict[str, tuple[int, Job]] = {}
_last_jobs_lock = threading.Lock()


def forget_jobs() -> None:
    """Forget the parent's jobs in a forked child. Renew the lock: another thread may have held it at the fork."""
    global _last_jobs_lock
    _last_jobs.clear()
    _last_jobs_lock = threading.Lock()


class Launcher:
    """The launches of one device.

    Args:
        device: the device.
        executor, memory, worker: its own.
        failures: where launches note what failed.
    """

    def __init__(
        self,
        device: torch.device,
        executor: Executor,
        memory: MemoryCounter,
        worker: Worker,
        failures: deque[Failure],
    ) -> None:
        self._device = device
        self._executor = executor
        self._memory = memory
        self._worker = worker
        self.failures = failures
        self._worker_has_team = False
        self._latest: Places | None = None  # those of the last launch that was placed

    @property
    def is_alone(self) -> bool:
        """Whether a run in this thread competes with no OpenMP team of the worker, and no dispatch mode sees it."""
        return not self._worker_has_team and not num_dispatch_modes()

    @property
    def is_free(self) -> bool:
        """Whether the worker is idle, and a run in this thread is alone."""
        return self._worker.is_idle and self.is_alone

    def launch(
        self,
        compiled: CompiledGraph,
        cut: Cut,
        *,
        is_awaited: bool,
        is_waited: bool,
        is_in_parts: bool,
        given: Placement | None,
        early: EarlyRun | None,
        seen: Slice | None,
        step: int,
    ) -> Job | None:
        """Run a program on the values of a cut. None if it has run already, in this thread.

        Args:
            is_awaited: the caller is going to wait for the job.
            is_waited: the rhythm of steps.
            is_in_parts: whether steps are cut by reads before they end.
            given: where it runs; None: where it is quickest (`placement`).
            early: the run that goes on, if it has begun.
            seen: the slice of the cut, if somebody watches.
            step: the number of the step.
        """
        num_threads = torch.get_num_threads()
        placement = given or self.placement(
            compiled, num_threads, is_awaited, is_waited, is_in_parts
        )
        if placement is Placement.HERE and not self._worker.is_idle:
            placement = Placement.WORKER  # the next cut waits for it before the lock is taken
        if placement is not Placement.HERE and not self._worker.start():
            metrics.count("WorkerNotStarted")  # slower, but no value is lost
            placement = Placement.HERE
        is_sparing = placement is Placement.SPARING
        is_replay = placement is not Placement.HERE and compiled.program.tier is Tier.REPLAY
        may_share = (is_sparing or is_replay) and core_sharing.may_share(num_threads)
        shares = may_share and not is_sparing
        num_left_out = int(may_share and is_sparing)
        inputs = [cut.inputs[k][2] for k in compiled.input_slots]
        made = []
        if early is not None and compiled.watched:
            made = early.outputs(compiled.watched, [each.data for each in inputs], cut.scalars)
        cut.inputs = []  # those that are donated die at their last use
        outputs = self._output_buffers(compiled, cut, inputs)
        if placement is Placement.HERE and seen is None:
            native = self._native(compiled, inputs)
            if native is not None:
                self._run_in_cpp(compiled, native, cut, inputs, outputs)
                return None
        launch = self._new_launch(
            compiled, inputs, cut.scalars, cut.sized, outputs, num_threads, shares, num_left_out
        )
        if seen is not None:
            launch.arrow, launch.step = seen.send_arrow(), step
        earlier = self._stand_in_line(compiled.lines, launch) if compiled.lines else []
        if placement is Placement.HERE and not earlier:
            with metrics.timer("ExecuteHere"):
                self.release_team_of_worker()
                is_done = launch.begin()
            if is_done:
                return launch
            # It blocks on other processes: the worker runs the rest while the next step is recorded.
        launch.run_after(earlier)
        for buffer in outputs:
            buffer.made_by(launch)
        if made:
            launch.publish(compiled.watched, made)
        elif compiled.watched:
            launch.watch(compiled.watched)
        release_team()
        self._worker_has_team |= num_threads - num_left_out > 1
        try:
            self._worker.submit(launch)
        except BaseException as error:  # an interrupt, or no thread: nobody will run it
            no_thread = isinstance(error, Exception)
            failed = errors.op_error(
                error,
                what=f"a program was not handed over on {self._device}",
                got=f"{threading.active_count()} Python threads in this process"
                if no_thread
                else "",
                next="end other threads or raise their limit (ulimit -u)" if no_thread else "",
            )
            launch.resolve(failed)
            launch.cancel()
            if no_thread:
                raise errors.to_raise(failed) from error
            raise
        return launch

    def _native(self, compiled: CompiledGraph, inputs: Sequence[Buffer]) -> Any | None:
        """The program in C++, if it needs nothing that a `Launch` is for: other threads and processes, lost inputs."""
        can_run = not compiled.lines and self.is_alone
        if not can_run or any(buffer.data is None for buffer in inputs):
            return None
        return compiled.program.native

    def _run_in_cpp(
        self,
        compiled: CompiledGraph,
        native: Any,
        cut: Cut,
        inputs: list[Buffer],
        outputs: list[Buffer],
    ) -> None:
        """Run a program in this thread. Cost: a fifth of a `Launch`."""
        data = [buffer.data for buffer in inputs]
        inputs.clear()
        self._memory.note_peak(compiled.peak_bytes(cut.sized))
        started_ns, started_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        try:
            found = native.run(data, cut.scalars)
        except BaseException as error:
            found = error
        self.finish_in_cpp(
            compiled, found, data, cut.scalars, outputs, cut.sized, started_ns, started_cpu_ns
        )
        if compiled.known_cut is not None:
            cut.path.known = compiled

    def finish_known(
        self,
        compiled: CompiledGraph,
        made: Any,
        started_ns: int,
        started_cpu_ns: int,
        is_waited: bool,
    ) -> None:
        """Fill the output buffers of a cut and run that were one call of C++, which has returned `made`."""
        if compiled.policy.is_measuring(is_waited):
            self.choose(compiled, torch.get_num_threads(), is_waited, Placement.HERE)
        self._finish_made(compiled, made, started_ns, started_cpu_ns)

    def skip(self) -> None:
        """C++ has run programs meanwhile (`known_reads`): how long the last launch took is not known."""
        if self._latest is not None:
            self._latest.skip()

    def finish_now(self, compiled: CompiledGraph, made: Any) -> None:
        """As `finish_known`, of a run that a read has begun, and that has to go on in Python or has failed."""
        self._finish_made(compiled, made, time.perf_counter_ns(), time.thread_time_ns())

    def _finish_made(
        self, compiled: CompiledGraph, made: Any, started_ns: int, started_cpu_ns: int
    ) -> None:
        found, data, scalars, outputs, sized = made
        self.finish_in_cpp(
            compiled, found, data, scalars, outputs, sized, started_ns, started_cpu_ns
        )

    def finish_in_cpp(
        self,
        compiled: CompiledGraph,
        found: Any,
        data: list[Any],
        scalars: list[Any],
        outputs: list[Buffer],
        sized: Mapping[int, TensorMeta],
        started_ns: int,
        started_cpu_ns: int,
    ) -> None:
        """Fill the output buffers with what a program in C++ returned, or fail them with what it raised."""
        try:
            results = compiled.program.results_of(found, data, scalars)
        except BaseException as failure:
            self._new_launch(compiled, [], scalars, sized, outputs, 1).fail(failure)
            return
        fill_pending(outputs, results)
        elapsed_ns = time.perf_counter_ns() - started_ns
        cost_ns = time.thread_time_ns() - started_cpu_ns
        compiled.program.note_native_cost(cost_ns)
        note_run(compiled, cost_ns, elapsed_ns, settings.eager)
        metrics.observe("ExecuteHere", elapsed_ns)

    def _new_launch(
        self,
        compiled: CompiledGraph,
        inputs: list[Buffer],
        scalars: list[Any],
        sized: Mapping[int, TensorMeta],
        outputs: list[Buffer],
        num_threads: int,
        shares: bool = False,
        num_left_out: int = 0,
    ) -> Launch:
        return Launch(
            self._device,
            self._memory,
            compiled,
            inputs,
            scalars,
            sized,
            outputs,
            self.failures,
            num_threads,
            shares,
            num_left_out,
        )

    def _output_buffers(
        self, compiled: CompiledGraph, cut: Cut, inputs: list[Buffer]
    ) -> list[Buffer]:
        """Assign buffers to the live values; a program may reuse the memory of donated inputs."""
        outputs = compiled.outputs
        if cut.sized:
            outputs = tuple(
                (self._executor.nbytes(cut.sized[k]) if k in cut.sized else nbytes, taken)
                for (k, _), (nbytes, taken) in zip(cut.alive, outputs, strict=True)
            )
        return pending_outputs(self._memory, cut.alive, outputs, inputs)

    def _stand_in_line(self, lines: Sequence[str], job: Job) -> list[Job]:
        """The jobs of other devices that run collectives of these lines and were handed over before this job.

        All members of a group must run its collectives in one order, whichever device recorded them.
        """
        found = []
        with _last_jobs_lock:
            for line in lines:
                index, last = _last_jobs.get(line, (self._device.index, job))
                if index != self._device.index and not last.is_done:
                    found.append(last)
                _last_jobs[line] = self._device.index, job
        return found

    def placement(
        self,
        compiled: CompiledGraph,
        num_threads: int,
        is_awaited: bool,
        is_waited: bool,
        is_in_parts: bool,
    ) -> Placement:
        """Where a program runs.

        Where steps have several programs and a thread on each core, all run in this thread: if some ran in the worker,
        the threads of each would be made anew in each step (a mixture of experts on two cores: 15 ms, here 5.6).
        """
        cost, tier = compiled.policy.cost, compiled.program.tier
        # Else it waits for other processes before anything runs.
        may_be_here = tier is Tier.COMPILED or not compiled.lines
        if tier is Tier.OP_BY_OP:
            # A graph that will hardly come again is measured for nothing.
            is_for_once = is_awaited and not cost.cost_ns and novelty.is_rule
            is_here = may_be_here and (cost.is_small or is_for_once) and self._worker.is_idle
            return Placement.HERE if is_here else Placement.WORKER
        is_short = tier is Tier.REPLAY and compiled.policy.is_quicker_here(is_awaited)
        stays_here = is_short or (is_in_parts and core_sharing.takes_all_cores(num_threads))
        given = Placement.HERE if may_be_here and stays_here else None
        placement = self.choose(compiled, num_threads, is_waited, given)
        is_here = placement is Placement.HERE
        return Placement.WORKER if is_here and not may_be_here else placement

    def choose(
        self,
        compiled: CompiledGraph,
        num_threads: int,
        is_waited: bool,
        given: Placement | None = None,
    ) -> Placement:
        """The placement of a launch, after which the program may be in another tier.

        Where each run of the script is to round alike, neither threads nor tiers are chosen by time.
        """
        now_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        if self._latest is not None:
            self._latest.note_next(now_ns, cpu_ns)
        placement = compiled.policy.choose(
            compiled.program,
            now_ns,
            cpu_ns,
            num_threads,
            is_waited,
            settings.compile == "async",
            core_sharing.may_share(num_threads),
            given,
            self._executor.is_compiling,
        )
        self._latest = compiled.policy.latest
        return placement

    def release_team_of_worker(self) -> None:
        """Free the OpenMP threads of the worker, which is idle."""
        # A worker that cannot start has no team either: it was stopped, or is the parent's.
        if self._worker_has_team and self._worker.start():
            self._worker.submit(Job(release_team))
            self._worker_has_team = False
