"""The training loop that every peer runs: a workload, on the device of a peer.

A step is what a training script does: a batch of a fixed pool is moved to the device, gradients
are cleared, forward, loss, backward, optimizer, and the step is cut. Of steps that are timed together
only the last loss is fetched. Comes from models.py and peer_kinds.py; peer_child.py runs it,
and breadth_child.py its `Loop`.
"""

import itertools
import time
from collections.abc import Callable

from torch import Tensor

from benchmarks.models import Workload
from benchmarks.peer_kinds import Peer

POOL_SIZE = 8
_SETTLED_STEPS = 10  # run after the last program was swapped in: they show the steady speed
_BESIDE_COMPILER_S = 10.0  # then it gets the cores for itself; a cache is read long before that

_clock = time.perf_counter


class Loop:
    """Steps that are run, timed and warmed up; the first one is run when it is asked for.

    Args:
        step: runs the next step up to its cut and returns its loss, which may still be computed.
    """

    def __init__(self, peer: Peer, step: Callable[[], Tensor]) -> None:
        self._peer = peer
        self._step = step
        self.times_s: list[float] = []  # of the steps that were waited for, from the first one on
        self.losses: list[float] = []

    def fetched_step(self) -> float:
        """Run a step and fetch its loss."""
        started = _clock()
        loss = self._step().item()
        self.times_s.append(_clock() - started)
        self.losses.append(loss)
        return loss

    def free_step(self) -> None:
        """Run a step that nobody waits for."""
        self._step()

    def warm_up(self, steps: int, timeout_s: float) -> bool:
        """Run steps, each fetched, until at least so many were run and nothing is compiled any more.

        Returns:
            whether the step is compiled; False if it was refused, or the time was not enough.
        """
        started = _clock()
        settled = 0
        while len(self.times_s) < steps or settled < _SETTLED_STEPS:
            self.fetched_step()
            if self._peer.wait_compiler(0.0):
                settled += 1
                continue
            settled = 0
            passed_s = _clock() - started
            is_long = passed_s > min(_BESIDE_COMPILER_S, timeout_s)
            if is_long and not self._peer.wait_compiler(timeout_s - passed_s):
                break
        return self._peer.is_compiled()

    def run(self, steps: int) -> float:
        """Return the seconds a step takes in a loop that waits at its end only."""
        started = _clock()
        for _ in range(steps - 1):
            self._step()
        self._step().item()
        self._peer.settle()
        return (_clock() - started) / steps

    def execute_alone(self, steps: int) -> float:
        """Return the seconds a step's programs run while nothing is recorded beside them."""
        before = self._peer.execute_s()
        for _ in range(steps):
            self._step()
            self._peer.settle()
        return (self._peer.execute_s() - before) / steps


class Training(Loop):
    """A workload in training."""

    def __init__(self, peer: Peer, workload: Workload) -> None:
        super().__init__(peer, self._train)
        self._batches = itertools.cycle(workload.batches(POOL_SIZE))
        model = workload.model().to(peer.device)
        self._optimizer = workload.make_optimizer(model.parameters())

        def loss_of(data: Tensor, target: Tensor) -> Tensor:
            return workload.loss(model(data), target)

        self._loss_of = peer.compile(loss_of)
        self._optimizer_step = peer.compile(self._optimizer.step)

    def _train(self) -> Tensor:
        data, target = next(self._batches)
        data, target = data.to(self._peer.device), target.to(self._peer.device)
        self._optimizer.zero_grad()
        loss: Tensor = self._loss_of(data, target)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer_step()
        self._peer.cut()
        return loss
