"""One side of benchmarks.breadth in a process of its own: trains one model, and does what it is asked.

A side is a row of peer_kinds.PEERS in one of the settings that breadth.py starts it with. The commands
are read and answered as in peer_child.py. The random generator is seeded right before the first step, so
that sides that draw eager's numbers have eager's losses. Comes from breadth_models.py; peer_process.py
is the other end.
"""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.breadth_models import SUBJECTS, Subject
from benchmarks.peer_child import serve
from benchmarks.peer_kinds import PEERS, Peer
from benchmarks.snapshot import Snapshot
from benchmarks.training import POOL_SIZE, Loop

KINDS = {"eager": "eager", "compile": "compile", "replay": "ltc", "warm": "ltc"}
NUM_LOSSES = 3
_DRAW_SEED = 2
_BLOCK_S = 0.4
_FEWEST_STEPS = 3
_UNCOUNTED_STEPS = 2  # before a block: the numbers were just written
# Within so many steps of one rhythm the lazy device has chosen where they run, and whether compiled code runs them.
_SETTLING_STEPS = 240
_SETTLING_S = 10.0

_clock = time.perf_counter


class _Clocks:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._processor_s = _clock(), time.process_time()

    def wall_s(self) -> float:
        return _clock() - self._wall_s

    def a_step(self, steps: int) -> dict[str, float]:
        processor_s = time.process_time() - self._processor_s
        return {
            "wall_s": self.wall_s() / steps,
            "processor_s": processor_s / steps,
            "steps": steps,
        }


class SubjectTraining(Loop):
    """A subject in training.

    Attributes:
        tier_steps, tier_s: at which step the last program was swapped in, 0 if none was.
        snapshot: the state after the first steps, once it is warm.
    """

    def __init__(self, peer: Peer, subject: Subject) -> None:
        super().__init__(peer, self._train)
        self._batches = itertools.cycle(subject.batches(POOL_SIZE))
        self._module = subject.module().to(peer.device)
        self._subject_step = subject.make_step(self._module, peer.compile)
        self.snapshot: Snapshot | None = None
        self._started: float | None = None
        self._num_programs = 0
        self.tier_steps, self.tier_s = 0, 0.0
        torch.manual_seed(_DRAW_SEED)

    def _train(self) -> Tensor:
        loss = self._subject_step(*(part.to(self._peer.device) for part in next(self._batches)))
        self._peer.cut()
        return loss

    def fetched_step(self) -> float:
        """Run a step and fetch its loss; note whether a program was swapped in meanwhile."""
        if self._started is None:
            self._started = _clock()
        loss = super().fetched_step()
        num_programs = self._count_programs()
        if num_programs > self._num_programs:
            self._num_programs = num_programs
            self.tier_steps, self.tier_s = len(self.times_s), _clock() - self._started
        return loss

    def warm_up(self, steps: int, timeout_s: float) -> bool:
        """As `Loop.warm_up`; the state after so many steps is what each block begins with."""
        while len(self.times_s) < steps:
            self.fetched_step()
        self.snapshot = Snapshot(self._module)
        return super().warm_up(steps, timeout_s)

    def restart(self) -> None:
        """Go back to the state after the first steps."""
        assert self.snapshot is not None
        self.snapshot.restore()
        self._peer.cut()
        for _ in range(_UNCOUNTED_STEPS):
            self._step().item()
        self._peer.settle()

    def settle(self, timeout_s: float) -> None:
        """Run steps of both rhythms until the lazy device has chosen how to run each, and nothing more is compiled."""
        deadline, are_new = _clock() + timeout_s, True
        while are_new and _clock() < deadline:
            before = self._count_programs()
            self._try_both_rhythms()
            self._peer.wait_compiler(timeout_s)
            are_new = self._count_programs() != before

    def _count_programs(self) -> int:
        return self._peer.counts().get("programs", 0)

    def _try_both_rhythms(self) -> None:
        for is_waited in (False, True):
            self.restart()
            started = _clock()
            for _ in range(_SETTLING_STEPS):
                loss = self._step()
                if is_waited:
                    loss.item()
                if _clock() - started > _SETTLING_S:
                    break
            self._peer.settle()

    def waited_block(self) -> dict[str, float]:
        """Return the figures of steps that are each waited for, as many as fit."""
        self.restart()
        started, steps = _Clocks(), 0
        while steps < _FEWEST_STEPS or started.wall_s() < _BLOCK_S:
            self._step().item()
            steps += 1
        self._peer.settle()
        return started.a_step(steps)

    def free_block(self, steps: int) -> dict[str, float]:
        """Return the figures of steps of which only the last one is waited for."""
        self.restart()
        started = _Clocks()
        self.run(steps)
        return started.a_step(steps)


def _begin(side: str, model: str, device: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Build the model; return what is said first, and what answers commands."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    peer = PEERS[KINDS[side]](device)
    training = SubjectTraining(peer, SUBJECTS[model])

    def answer(command: str, **arguments: Any) -> Any:
        if command == "settle":
            return training.settle(**arguments)
        if command == "warm_up":
            is_compiled = training.warm_up(**arguments)
            return {
                "losses": training.losses[:NUM_LOSSES],
                "is_compiled": is_compiled,
                "tier_steps": training.tier_steps,
                "tier_s": training.tier_s,
            }
        if command == "waited_block":
            return training.waited_block()
        if command == "free_block":
            return training.free_block(**arguments)
        if command == "counts":
            return peer.counts()
        raise ValueError(command)

    return {"versions": peer.versions}, answer


if __name__ == "__main__":
    serve(_begin, "python -m benchmarks.breadth_child", __doc__)
