"""`torch_xla.experimental.distributed_checkpoint`: PyTorch's distributed checkpoints of a model on a mesh.

`ltc_dist.spmd.planners` has the planners. `CheckpointManager` keeps the checkpoints of a run by their steps.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils import _pytree as pytree

import ltc_core as ltc
from ltc_core.api.sharding import parts_of
from ltc_core.errors import CheckpointError, first_line
from ltc_dist.checkpoint.stopping import Stopping
from ltc_dist.compat.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard
from ltc_dist.spmd import mark_sharding, sharding_of
from ltc_dist.spmd.planners import CpuShards, SPMDLoadPlanner, SPMDSavePlanner, is_divided

__all__ = [
    "CheckpointManager",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "_CheckpointMetadata",
    "_CpuShards",
    "_is_sharded_tensor",
    "_sharded_cpu_state_dict",
    "prime_optimizer",
]

_METADATA_FILE = ".manager_metadata"
_CpuShards = CpuShards


def _is_sharded_tensor(x: object) -> bool:
    """Whether a tensor is divided: devices have different parts of it.

    Cost: for one on the device, cuts and waits for it.
    """
    return isinstance(x, torch.Tensor) and is_divided(x)


def _sharded_cpu_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict on the CPU. What this process's devices have of a divided tensor is a `_CpuShards`.

    Cost: cuts, waits for the tensors, and copies them.
    """
    return pytree.tree_map(_on_cpu, state_dict)  # type: ignore[no-any-return]


def _on_cpu(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not _is_sharded_tensor(leaf):
        return leaf.detach().to("cpu", copy=True)
    shards = [
        XLAShard(
            part.read(),
            [slice(first, first + n, 1) for first, n in zip(part.offsets, part.sizes, strict=True)],
            f"{leaf.device.type.upper()}:{part.device}",
            0 if part.is_chosen else part.device + 1,
        )
        for part in parts_of(leaf)
    ]
    return CpuShards(shards, leaf.shape)


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer's state by a step with gradients of zero, for a checkpoint to be loaded into.

    Parameters and gradients stay what they are, which torch_xla does not promise. Returns the optimizer.

    Cost: two cuts; waits for the device.
    """
    ltc.mark_step()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in parameters]
    with torch.no_grad():
        values = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.grad = torch.zeros_like(p)
            mark = sharding_of(p)
            if mark is not None:  # the state lies as the gradient does
                mark_sharding(p.grad, *mark)
        optimizer.step()
        for p, value, gradient in zip(parameters, values, gradients, strict=True):
            p.copy_(value)
            p.grad = gradient
    ltc.mark_step()
    ltc.wait_device_ops()
    return optimizer


@dataclass
class _CheckpointMetadata:
    """When a checkpoint was taken. torch_xla pickles one into each, so it has the name that it has there."""

    step: int
    ts: datetime


_CheckpointMetadata.__module__ = "torch_xla.experimental.distributed_checkpoint.manager"


class CheckpointManager:
    """Checkpoints of a run, each in a directory named after its step.

    Args:
        path: directory, or a URL that fsspec knows.
        save_interval: `save` and `save_async` take a checkpoint at the steps that it divides.
        max_to_keep: checkpoints that are kept, the last ones taken; 0 keeps all.
        max_pending_async: asynchronous checkpoints that may be unfinished; one more waits.
        num_of_threads: threads that write the files of one checkpoint.
        process_group: group that coordinates a checkpoint; by default a new one of gloo.
        chkpt_on_preemption: take a checkpoint, too, when SIGTERM has come to any process. From then on SIGTERM does not
            end the process: the script ends itself when `reached_preemption` is true.

    Raises:
        AssertionError: a number is out of range, or there is no process group.

    All processes of a job call the methods at the same steps.

    Source: `torch_xla.experimental.distributed_checkpoint.CheckpointManager`. Files and directories have
    the names that they have there.
    """

    def __init__(
        self,
        path: str,
        save_interval: int,
        max_to_keep: int | None = 0,
        max_pending_async: int | None = 1,
        num_of_threads: int | None = 1,
        process_group: Any = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        _require(dist.is_initialized(), "A process group is required.")
        _require(save_interval > 0, "save_interval must be positive")
        _require((max_pending_async or 0) > 0, "max_pending_async must be positive")
        _require((max_to_keep or 0) >= 0, "max_to_keep must be non-negative")
        self.base_path = os.path.join(path, "")
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep or 0
        self.num_of_threads = num_of_threads or 1
        self.chkpt_on_preemption = chkpt_on_preemption
        # On the host: an asynchronous checkpoint is coordinated beside the training loop, and may cut no step of it.
        self.pg = process_group or dist.new_group(backend="gloo")
        self._is_master = dist.get_rank(self.pg) == 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ltc-checkpoints")
        self._free_places = threading.Semaphore(max_pending_async or 1)
        self._pending: list[Future[None]] = []
        self._errors: list[tuple[int, Exception]] = []
        weakref.finalize(self, _tell, self._errors)
        self._saving = threading.Lock()
        self._kept = sorted(self._found(), key=lambda found: found.ts)
        self._asked_at: int | None = None
        self._is_stopping = False
        self._stopping = Stopping() if chkpt_on_preemption else None
        if self._stopping is not None:
            weakref.finalize(self, self._stopping.close)

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is taken at a step: the interval divides it, or a preemption was noticed."""
        is_stopping = self.chkpt_on_preemption and self.reached_preemption(step)
        return step % self.save_interval == 0 or is_stopping

    def save(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """Take a checkpoint if `should_save(step)` or `force`; return whether one was taken.

        Raises:
            CheckpointError: an asynchronous checkpoint before has failed.

        Cost: waits for asynchronous checkpoints, cuts, waits for the device, and writes.
        """
        if not self.should_save(step) and not force:
            return False
        self.join()  # the processes take checkpoints in one order
        ltc.mark_step(wait=True)
        self._save(step, state_dict, SPMDSavePlanner())
        return True

    def save_async(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """The same as `save`, but the files are written in a thread.

        Cost: cuts, waits for the device and copies what this process writes to the CPU; waits for a place among the
            pending ones.
        """
        if not self.should_save(step) and not force:
            return False
        self._raise_failed()
        ltc.mark_step(wait=True)
        copies = pytree.tree_map(_copied, state_dict)
        planner = SPMDSavePlanner()
        planner.stage(copies)
        self._free_places.acquire()
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._pool.submit(self._save_later, step, copies, planner))
        return True

    def restore(self, step: int, state_dict: dict[str, Any]) -> None:
        """Load the checkpoint of a step into the tensors of a state dict, and replace its other values.

        Raises:
            AssertionError: there is no checkpoint of this step.
            CheckpointError: an asynchronous checkpoint before has failed.

        Cost: waits for asynchronous checkpoints, and reads.
        """
        self.join()
        steps = self.all_steps()
        _require(
            step in steps,
            f"Cannot restore from untracked step {step}. Valid steps are: {set(steps)}",
        )
        load(
            state_dict=state_dict,
            storage_reader=FsspecReader(self._path(step)),
            planner=SPMDLoadPlanner(),
            process_group=self.pg,
        )

    def all_steps(self) -> list[int]:
        """Steps of the checkpoints that are there, in ascending order."""
        return sorted(kept.step for kept in self._kept)

    def join(self) -> None:
        """Wait for the asynchronous checkpoints.

        Raises:
            CheckpointError: one has failed.
        """
        wait(self._pending)
        self._raise_failed()

    def reached_preemption(self, step: int) -> bool:
        """Whether the processes have agreed, by this step, that SIGTERM has come to one of them.

        Raises:
            AssertionError: the manager was made without `chkpt_on_preemption`.

        Cost: in a job of several processes one small all-reduce a step, which is read some steps later.
        """
        if self._stopping is None:
            raise AssertionError(
                "Preemption detection not enabled. Please set `chkpt_on_preemption` when creating the CheckpointManager"
            )
        if step != self._asked_at:  # the processes agree once a step, however often a script asks
            self._asked_at = step
            self._is_stopping = self._stopping.is_agreed() or self._is_stopping
        return self._is_stopping

    def _path(self, step: int) -> str:
        return os.path.join(self.base_path, str(step))

    def _found(self) -> Iterator[_CheckpointMetadata]:
        """Metadata of the checkpoints in the directory. What has none was not finished, and is named on stderr."""
        fs, base = url_to_fs(self.base_path)
        fs.makedirs(base, exist_ok=True)
        for path in fs.ls(base, detail=False):
            try:
                with fs.open(os.path.join(path, _METADATA_FILE), "rb") as file:
                    yield pickle.load(file)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                print(f"ltc: {path} is no checkpoint: {first_line(error)}", file=sys.stderr)

    def _delete(self, step: int) -> None:
        if self._is_master:
            fs, path = url_to_fs(self._path(step))
            if fs.exists(path):
                fs.rm(path, recursive=True)

    def _save(self, step: int, state_dict: dict[str, Any], planner: SPMDSavePlanner) -> None:
        with self._saving:
            self._kept = [kept for kept in self._kept if kept.step != step]
            self._delete(step)
            save(
                state_dict=state_dict,
                storage_writer=FsspecWriter(self._path(step), thread_count=self.num_of_threads),
                planner=planner,
                process_group=self.pg,
            )
            taken = _CheckpointMetadata(step, datetime.now())
            if self._is_master:
                fs, path = url_to_fs(self._path(step))
                with fs.open(os.path.join(path, _METADATA_FILE), "wb") as file:
                    pickle.dump(taken, file)
            self._kept = [*self._kept, taken]
            while 0 < self.max_to_keep < len(self._kept):
                oldest, *self._kept = self._kept
                self._delete(oldest.step)

    def _save_later(self, step: int, state_dict: dict[str, Any], planner: SPMDSavePlanner) -> None:
        try:
            self._save(step, state_dict, planner)
        except Exception as error:  # raised by the next call
            self._errors.append((step, error))
        finally:
            self._free_places.release()

    def _raise_failed(self) -> None:
        if self._errors:
            step, error = self._errors[0]
            self._errors.clear()
            raise CheckpointError(
                f"the asynchronous checkpoint of step {step} was not written",
                got=f"{type(error).__name__}: {first_line(error)}",
                next=f"look at {self.base_path}; the checkpoints before it are whole",
            ) from error


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def _copied(leaf: Any) -> Any:
    """A copy of a tensor of the CPU, such as an optimizer's step, which the next step changes."""
    is_of_cpu = isinstance(leaf, torch.Tensor) and not ltc.is_lazy_tensor(leaf)
    return leaf.detach().clone() if is_of_cpu else leaf


def _tell(errors: list[tuple[int, Exception]]) -> None:
    for step, error in errors:
        print(
            f"ltc: the asynchronous checkpoint of step {step} was not written: {first_line(error)}",
            file=sys.stderr,
        )
