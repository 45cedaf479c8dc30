"""What `benchmarks.distributed` runs in each process: training, a loader, or nothing but a start.

    distributed_child.py train ddp|ltc|one MODEL
    distributed_child.py loader
    distributed_child.py start

Rank 0 prints one line of JSON.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import WORKLOADS

_WARM_UP_S = 2.0
_TIMED_S = 4.0
_BLOCK = 10  # steps that are timed together

_clock = time.perf_counter


def train(kind: str, model_name: str) -> dict[str, float]:
    """Train until the speed is steady, then measure it."""
    workload = WORKLOADS[model_name]
    rank, size = (int(os.environ.get(name, d)) for name, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    batches = [
        tuple(part.chunk(size)[rank].clone() for part in batch) for batch in workload.batches(8)
    ]
    model = workload.model()
    make = _ddp if kind == "ddp" else _lazy
    one_step = make(workload, model, batches)
    agree = _agreement(kind, size)
    first = [float(one_step().detach()) for _ in range(3)]
    _for_seconds(one_step, _WARM_UP_S, agree)
    times = _for_seconds(one_step, _TIMED_S, agree)
    if kind == "ddp":
        dist.destroy_process_group()
    return {"step_ms": 1e3 * statistics.median(times), "loss": first[-1]}


def _ddp(workload: Any, model: nn.Module, batches: list[Any]) -> Callable[[], Tensor]:
    dist.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = workload.make_optimizer(replica.parameters())
    count = 0

    def one_step() -> Tensor:
        nonlocal count
        data, target = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad()
        loss: Tensor = workload.loss(replica(data), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return one_step


def _lazy(workload: Any, model: nn.Module, batches: list[Any]) -> Callable[[], Tensor]:
    import ltc_dist as ltd

    device = ltd.lazy_device()
    model.to(device)
    optimizer = workload.make_optimizer(model.parameters())
    count = 0

    def one_step() -> Tensor:
        nonlocal count
        data, target = (part.to(device) for part in batches[count % len(batches)])
        count += 1
        optimizer.zero_grad()
        loss: Tensor = workload.loss(model(data), target)
        loss.backward()  # type: ignore[no-untyped-call]
        ltd.optimizer_step(optimizer, barrier=True)
        return loss

    return one_step


def _agreement(kind: str, size: int) -> Callable[[bool], bool]:
    """All processes go on as long as rank 0 does."""
    if size == 1:
        return lambda more: more
    if kind == "ddp":

        def broadcast(more: bool) -> bool:
            flag = torch.tensor([more])
            dist.broadcast(flag, 0)
            return bool(flag)

        return broadcast
    import ltc_dist as ltd

    return lambda more: ltd.mesh_reduce("more", more, lambda all: bool(all[0]))


def _for_seconds(
    one_step: Callable[[], Tensor], seconds: float, agree: Callable[[bool], bool]
) -> list[float]:
    """Run blocks of steps, of each only the last loss is fetched; give the seconds of a step in each."""
    times = []
    deadline = _clock() + seconds
    while agree(_clock() < deadline or not times):
        started = _clock()
        for _ in range(_BLOCK - 1):
            one_step()
        float(one_step().detach())
        times.append((_clock() - started) / _BLOCK)
    return times


class _Slow(torch.utils.data.Dataset[Any]):
    """Batches of the workload, each after a wait as for a disk."""

    def __init__(self, batches: list[Any], wait_s: float, count: int) -> None:
        self._batches, self._wait_s, self._count = batches, wait_s, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, item: int) -> Any:
        time.sleep(self._wait_s)
        return self._batches[item % len(self._batches)]


def loader() -> dict[str, float]:
    """Measure loading, computing and both; loading takes as long as computing, when overlap is worth most."""
    import ltc_dist as ltd

    workload = WORKLOADS["mnist"]
    batches = workload.batches(8)
    one_step = _lazy(workload, workload.model(), batches)
    _for_seconds(one_step, _WARM_UP_S, lambda more: more)
    compute_s = statistics.median(_for_seconds(one_step, _TIMED_S, lambda more: more))
    count = max(50, int(_TIMED_S / compute_s))
    data = torch.utils.data.DataLoader(_Slow(batches, compute_s, count), batch_size=None)
    started = _clock()
    for _ in data:
        pass
    load_s = (_clock() - started) / count

    device = ltd.lazy_device()
    model = workload.model().to(device)
    optimizer = workload.make_optimizer(model.parameters())

    def epoch(samples: Any) -> None:
        for x, y in ltd.MpDeviceLoader(samples, device):
            optimizer.zero_grad()
            workload.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ltd.wait_device_ops()

    epoch(batches)  # its graph is another one, and compiled here
    started = _clock()
    epoch(data)
    both_s = (_clock() - started) / count
    return {"load_ms": 1e3 * load_s, "compute_ms": 1e3 * compute_s, "both_ms": 1e3 * both_s}


def start() -> dict[str, float]:
    """Meet the other process once."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return {}


def main() -> None:
    what, *rest = sys.argv[1:]
    found = {"train": train, "loader": loader, "start": start}[what](*rest)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
