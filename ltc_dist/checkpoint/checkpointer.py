"""Checkpoints of a training job, the whole job's state at a step: `Checkpointer` saves, finds and restores them.

    checkpointer = ltd.Checkpointer("runs/a", every=100, model=model, optimizer=optimizer, loader=loader)
    found = checkpointer.restore()
    step = found.step if found else 0
    for data, target in loader:
        ...
        step += 1
        checkpointer.step(step)

Comes from `transaction` (how one is written) and `agreement` (how all processes find one).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch.utils.data import DataLoader

from ltc_core import progress
from ltc_core.errors import CheckpointError, listed
from ltc_core.runtime.collective_tokens import hand_over
from ltc_core.runtime.devices import contexts
from ltc_core.serialization.cpu_copy import CpuCopies
from ltc_core.serialization.directory import Plan
from ltc_core.serialization.tree import map_tensors
from ltc_core.settings import settings
from ltc_core.source import user_line
from ltc_dist.checkpoint import random_state
from ltc_dist.checkpoint.agreement import Agreement
from ltc_dist.checkpoint.layout import SHARED, abandoned_in, own_part, step_name, steps_in
from ltc_dist.checkpoint.mesh_parts import Divider
from ltc_dist.checkpoint.reading import Checkpoint, Contents
from ltc_dist.checkpoint.reshard import is_sharded
from ltc_dist.checkpoint.resplit import check_dealing, loader_state
from ltc_dist.checkpoint.stopping import Stopped, Stopping
from ltc_dist.checkpoint.transaction import Transaction
from ltc_dist.data.dealing import dealing_of
from ltc_dist.data.loader import MpDeviceLoader, ParallelLoader
from ltc_dist.fully_sharded.checkpointed import Divided, checkpointed
from ltc_dist.job.ranks import master_print, ranks
from ltc_dist.train.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["Checkpointer"]

_KNOWN = (
    DataLoader,
    MpDeviceLoader,
    ParallelLoader,
    ZeroRedundancyOptimizer,
    Divided,
)  # have a state in each process

_ONE_FOR_ALL = "one state for all processes"
_ONE_EACH = "a state of each process, as divided parameters and loaders have"

_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class Checkpointer:
    """Saves and restores the state of a job. Make it in every process, with the same arguments.

    A checkpoint is whole or not there: whatever is killed at whatever moment, the ones before it stay. It is checked
    by size and digest when it is read, holds no pickle, and can be restored by another number of processes.
    Random generators are saved with it. SIGTERM becomes a checkpoint (see `step`).

    Args:
        directory: where to, shared by all hosts. One Checkpointer of one job at a time writes there.
        keep: how many are kept, the newest; None for all.
        every: steps between two checkpoints; 0 for those asked for with `save`.
        background: write beside training. An error is raised by the next call then.
        on_error: 'raise' what fails in saving, or 'warn' and train on.
        stop_on_sigterm: make a checkpoint of SIGTERM.
        own: names of objects that each process has a state of its own of. Loaders, a ZeroRedundancyOptimizer, and a
            FullyShardedDataParallel with its optimizer are known.
        objects: what is saved, by name: anything with `state_dict` and `load_state_dict`. A model, an optimizer and a
            scheduler are the same in all processes: rank 0 writes them.

    Raises:
        CheckpointIOError: some process cannot write there, or the processes do not see what the others write; in
            every process.
        CheckpointError: an object has no state, or the directory no name.

    Cost: the processes wait for each other.

    Source: the directory protocol is that of Orbax: a step has its name when it is whole.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int = 0,
        background: bool = True,
        on_error: str = "raise",
        stop_on_sigterm: bool = True,
        own: Iterable[str] = (),
        **objects: Any,
    ) -> None:
        _check(keep, every, on_error, objects)
        if not os.fspath(directory):
            raise CheckpointError(
                "a Checkpointer needs a directory",
                got="an empty name, as of a variable that is not set",
                next="name one; '.' is the working directory",
            )
        self.directory = os.path.realpath(os.fsdecode(directory))
        self._keep = keep
        self._every = every
        self._background = background
        self._on_error = on_error
        objects = {name: checkpointed(held, name) for name, held in objects.items()}
        names = {name for name, held in objects.items() if isinstance(held, _KNOWN)}
        self._own = {name: objects[name] for name in objects if name in names | set(own)}
        self._shared = {name: objects[name] for name in objects if name not in self._own}
        self._here = ranks()
        self._agreement = Agreement(self.directory, self._here)
        self._release = weakref.finalize(self, self._agreement.release)
        self._is_behind = bool(steps_in(self.directory))  # there are some that were not restored
        self._known: set[int] = set()  # steps that this run comes from, or has committed
        self._num_saves = 0
        self._newest: int | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = Stopping() if stop_on_sigterm else None
        if self._stopping is not None:
            weakref.finalize(self, self._stopping.close)
        _live.add(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CheckpointError(
            "a Checkpointer cannot be copied or pickled",
            got="it holds the lock of its directory",
            next="make one in each process, with the same arguments.",
        )

    # -- saving ------------------------------------------------------------------------------------

    def step(self, step: int, **values: Any) -> None:
        """Call this after each step. It is saved if it is a multiple of `every`, or if the job was told to stop.

        On SIGTERM, in any process, all of them save after the same step, some steps later, and end with exit code 143.

        Args:
            step: counted from 1, the same in all processes.
            values: what else is to be found in the checkpoint, such as `epoch=epoch`: numbers, texts, tensors.

        Raises:
            Stopped: it was told to stop, and what there is has been saved, if it could be; a SystemExit.
            CheckpointError: the last checkpoint could not be saved.

        Cost: nothing for most steps; see `Stopping.is_agreed` and `save`.
        """
        stops = self._stopping is not None and self._stopping.is_agreed()
        if stops or (self._every and step % self._every == 0):
            self.save(step, **values)
        elif self._thread is not None and not self._thread.is_alive():
            self.wait()
        if stops:
            self.close()
            is_saved = self._newest == step
            saved = f"step {step} is in" if is_saved else f"step {step} could not be saved in"
            master_print(f"[ltc] stopped by SIGTERM; {saved} {self.directory}", fd=sys.stderr)
            raise Stopped

    def save(self, step: int, **values: Any) -> None:
        """Save the state after a step, and wait for the one before to be saved.

        Raises:
            CheckpointFormatError: something has no place in a checkpoint; names it.
            CheckpointIOError: it cannot be written. Older checkpoints are still there.
            CheckpointError: there are later checkpoints, which were not restored.

        Cost: waits for the device. In the background, rank 0 copies what is shared to host memory, and the rest goes
            on in a thread; else host memory of the largest tensor.
        """
        self.wait()
        if step == self._newest:
            return
        self._num_saves += 1
        transaction = self._staged(step, values)
        if self._background and transaction.failure is None:
            self._thread = threading.Thread(
                target=self._run, args=(transaction,), name="checkpoint-save", daemon=True
            )
            self._thread.start()
        else:
            self._run(transaction)
            self.wait()

    def _staged(self, step: int, values: dict[str, Any]) -> Transaction:
        """Copy the state of this moment."""
        plans: dict[str, Plan] = {}
        failure: BaseException | None = None
        for ctx in contexts():  # what rank 0 writes may need the others' part in a collective
            ctx.cut("Save")
        try:
            if self._is_behind:
                raise CheckpointError(
                    f"{self.directory} has checkpoints that this run has not restored",
                    got=f"steps {listed(steps_in(self.directory))}",
                    next="call restore() first, or give this run another directory.",
                )
            parts: list[dict[str, Any]] = []
            if self._here.rank == 0 or settings.spmd:
                objects = {name: held.state_dict() for name, held in self._shared.items()}
                tree: dict[str, Any] = {"objects": objects, "values": values}
                if settings.spmd:  # each process has a part of a tensor
                    divider = Divider(writes_rest=self._here.rank == 0)
                    tree = {**divider.rest_of(tree), "divided": divider.tensors}
                    parts = divider.parts
                if self._here.rank == 0:
                    plans[SHARED] = self._plan(tree)
            own = {
                name: {
                    "state": held.state_dict(),
                    "batch_size": _batch_size(held),
                    "dealing": dealing_of(held),
                }
                for name, held in self._own.items()
            }
            mine = {"objects": own, "random": random_state.get(), "parts": parts}
            plans[own_part(self._here.rank)] = self._plan(mine)
        except Exception as error:
            failure = error
        return Transaction(
            self.directory, self._agreement.token, step, self._keep, self._here,
            self._num_saves, plans, self._known, failure,
        )  # fmt: skip

    def _plan(self, tree: dict[str, Any]) -> Plan:
        """Plan the writing of a state, as it is now."""
        if self._background:
            tree = map_tensors(CpuCopies(of_cpu=True), tree)
        return Plan(tree, "checkpoint")

    def _run(self, transaction: Transaction) -> None:
        try:
            transaction.run()
            self._newest = transaction.step
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is whole.

        Raises:
            CheckpointError: it could not be saved.
        """
        if self._thread is not None:
            hand_over()  # the others may wait for collectives before they report
            with progress.shown(f"writing a checkpoint into {self.directory}"):
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        if self._on_error == "raise":
            raise error
        print(f"[ltc] training goes on without this checkpoint: {error}", file=sys.stderr)

    # -- restoring ---------------------------------------------------------------------------------

    def restore(self, step: int | None = None, skip: Iterable[str] = ()) -> Checkpoint | None:
        """Load the newest checkpoint that is whole into the objects; all processes load the same one.

        Steps that a run has gone back behind are not taken unless `step` names one. What is skipped because it is
        damaged is said in a warning. Processes that were not there when it was saved keep the random state they have;
        loaders go on behind the samples that were used. With another number of processes, that takes a
        DistributedSampler; with another batch size, a sampler of PyTorch's. The shards of a ZeroRedundancyOptimizer
        and of a FullyShardedDataParallel are cut anew for another number of processes, if all of them share one set of
        parameters.

        Args:
            step: load that of this step instead. With the next save the later ones are abandoned: with keep=None they
                are kept, not taken by a restart, and overwritten when the run reaches their step; else removed.
            skip: names of objects to leave as they are.

        Returns:
            The step and the values that were saved with it; None if there is no checkpoint.

        Raises:
            CheckpointError: there are some, and none is whole; or it does not fit the objects, none of which has
                been changed then.

        Cost: every process reads what is shared and what is its own; they wait for each other. Of what others have of
            their own it reads only shards that are cut anew, those that its own shard overlaps.
        """
        self.wait()
        skipped = set(skip)
        shared, own = ([n for n in held if n not in skipped] for held in (self._shared, self._own))
        # An older version had rank 0 save it for all processes, unless `own` named it.
        shared += [n for n in own if isinstance(self._own[n], ZeroRedundancyOptimizer)]
        with progress.shown(f"reading a checkpoint of {self.directory}"):
            contents = self._agreement.read(step, shared, own)
        if contents is not None:
            self._load(contents, skipped)
            self._come_from(contents.checkpoint.step)
        self._is_behind = False
        return contents.checkpoint if contents is not None else None

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, in order; those too that a run has gone back behind."""
        return steps_in(self.directory)

    def _come_from(self, step: int) -> None:
        """Note the steps of this run: its next commit abandons all others."""
        abandoned = abandoned_in(self.directory)
        earlier = {s for s in steps_in(self.directory) if s <= step and s not in abandoned}
        self._known = {step, *earlier}
        self._newest = None

    def _load(self, contents: Contents, skip: set[str]) -> None:
        _check_cut(contents, self._here.world_size)
        states = {name: contents.objects.get(name) for name in self._shared if name not in skip}
        own = {name: self._own_state(name, contents) for name in self._own if name not in skip}
        missing = [name for name, state in {**states, **own}.items() if state is None]
        if other := [name for name in missing if name in contents.names]:
            is_own = other[0] in self._own
            raise CheckpointError(
                f"{step_name(contents.checkpoint.step)} has {listed(other)} otherwise",
                got=f"{_ONE_FOR_ALL if is_own else _ONE_EACH}; here {_ONE_EACH if is_own else _ONE_FOR_ALL}",
                next=f"make what was saved, or leave them as they are: restore(skip={other!r}).",
            )
        if missing:
            raise CheckpointError(
                f"{step_name(contents.checkpoint.step)} has no {listed(missing)}",
                got=f"it has {listed(contents.names)}",
                next=f"leave them as they are: restore(skip={missing!r}).",
            )
        for name, state in {**states, **own}.items():
            _check_fits(name, {**self._shared, **self._own}[name], state)
        for name, state in states.items():
            self._shared[name].load_state_dict(state)
        for name, state in own.items():
            self._own[name].load_state_dict(state)
        mine = contents.own.get(self._here.rank, {})
        if "random" in mine:
            random_state.put(mine["random"])

    def _own_state(self, name: str, contents: Contents) -> Any:
        if name in contents.objects:  # cut anew
            return contents.objects[name]
        saved = [contents.own[rank]["objects"].get(name) for rank in sorted(contents.own)]
        if None in saved:
            return None
        if contents.checkpoint.world_size == self._here.world_size:
            saved *= self._here.world_size  # only its own has been read, and only that counts
        here = self._here.rank, self._here.world_size, _batch_size(self._own[name])
        check_dealing(name, saved, dealing_of(self._own[name]), *here)
        return loader_state(name, saved, *here)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is being written, and let others write here; more calls do nothing."""
        try:
            self.wait()
        finally:
            self._release()
            if self._stopping is not None:  # last: SIGTERM, sent again, ends no process that writes
                self._stopping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check(keep: Any, every: Any, on_error: str, objects: Mapping[str, Any]) -> None:
    if ranks().threads:
        raise CheckpointError(
            "a Checkpointer is for a process, and this is a thread of DataParallel",
            next="make it outside, and save between two calls.",
        )
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError("keep must be a whole number, 1 or more, or None", got=repr(keep))
    if type(every) is not int or every < 0:
        raise CheckpointError("every must be a whole number, 0 or more", got=repr(every))
    if on_error not in ("raise", "warn"):
        raise CheckpointError(f"there is no on_error={on_error!r}", got="legal are raise, warn")
    for name, held in objects.items():
        if not (hasattr(held, "state_dict") and hasattr(held, "load_state_dict")):
            raise CheckpointError(
                f"{name} has no state to be saved",
                got=f"{type(held).__name__}, without state_dict and load_state_dict",
                next="pass plain values to step() and save(), by name.",
            )


def _batch_size(held: Any) -> int | None:
    found = getattr(held, "batch_size", None)
    return found if type(found) is int else None


def _check_cut(contents: Contents, world_size: int) -> None:
    for name, reason in contents.refused.items():
        saved = contents.checkpoint.world_size
        error = CheckpointError(
            f"{name!r} was saved by {saved} processes and cannot be cut anew for {world_size}",
            got=reason,
            where=user_line(),
            next=f"start {saved} processes, or leave it out: restore(skip=[{name!r}]) begins with an optimizer that "
            "has no state.",
        )
        error.where_words = "restored at"
        raise error


def _check_fits(name: str, held: Any, state: Any) -> None:
    """Find what would fail half-way."""
    if isinstance(held, ZeroRedundancyOptimizer | Divided):
        held.check_state_dict(state, f"the checkpoint's {name}")
    elif isinstance(held, torch.optim.Optimizer) and is_sharded(state):
        raise CheckpointError(
            f"the checkpoint's {name} does not fit",
            got=f"the state of a ZeroRedundancyOptimizer, here {type(held).__name__}",
            next=f"make the {name} it was saved from, or restore(skip=[{name!r}]).",
        )
    elif isinstance(held, torch.nn.Module):
        _compare(name, _shapes(held.state_dict()), _shapes(state))
    elif isinstance(held, torch.optim.Optimizer):
        mine = {f"group {k}": len(g["params"]) for k, g in enumerate(held.param_groups)}
        theirs = {f"group {k}": len(g["params"]) for k, g in enumerate(state["param_groups"])}
        _compare(name, mine, theirs)


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(getattr(value, "shape", ())) for key, value in state.items()}


def _compare(name: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    missing = [key for key in mine if key not in theirs]
    foreign = [key for key in theirs if key not in mine]
    other = [
        f"{k}: {theirs[k]}, here {mine[k]}" for k in mine if k in theirs and mine[k] != theirs[k]
    ]
    if not (missing or foreign or other):
        return
    found = {"not in it": missing, "not here": foreign, "of another size": other}
    raise CheckpointError(
        f"the checkpoint's {name} does not fit",
        got="; ".join(f"{words}: {listed(keys)}" for words, keys in found.items() if keys),
        next=f"make the {name} it was saved from, or restore(skip=[{name!r}]).",
    )


def close_all() -> None:
    """Wait for checkpoints in flight before this process leaves its job.

    Raises:
        CheckpointError: one could not be saved; all are closed.
    """
    failed: CheckpointError | None = None
    for checkpointer in list(_live):
        try:
            checkpointer.close()
        except CheckpointError as error:
            error.what = f"the last checkpoint is missing: {error.what}"
            failed = failed or error
    if failed is not None:
        raise failed
