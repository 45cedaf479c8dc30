"""Every collective of torch.distributed on the CPU and on the device, in a process that imports the core alone.

Run as a script with PyTorch's variables in the environment: `c10d_calls.py BACKEND`, "" for PyTorch's own choice.
Ends with 1 where the device gives something else than the CPU.
"""

import datetime
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ltc_core as ltc

dist: Any = torch.distributed  # its stubs lack what is used here
Case = Callable[[Any], Any]
_CASES: dict[str, Case] = {}


class Here:
    """Where a case runs: the device, this rank, the number of processes, a group of some of them."""

    def __init__(self, device: str, group: Any) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = group

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = torch.Size(shape).numel()
        made = torch.arange(count, dtype=dtype).reshape(shape) + 100 * self.rank
        return made.to(self.device)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device)


def case(call: Case) -> Case:
    _CASES[call.__name__] = call
    return call


@case
def all_reduce(at: Here) -> Any:
    found = [at.numbers(3, 2, dtype=t) for t in (torch.float32, torch.int64, torch.bfloat16)]
    for t in found:
        dist.all_reduce(t)
    most = at.numbers(4)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [*found, most]


@case
def views(at: Here) -> Any:
    whole = at.numbers(4, 4)
    dist.all_reduce(whole[1])
    dist.broadcast(whole[2:], 1)
    turned = at.numbers(2, 3)
    dist.all_reduce(turned.view(-1)[1:4])
    parts = at.empty(at.size, 4)
    dist.all_gather(list(parts.unbind(0)), whole[0])
    return [whole, turned, parts]


@case
def asynchronous(at: Here) -> Any:
    found = [at.numbers(5) + k for k in range(4)]
    works = [dist.all_reduce(t, async_op=True) for t in found]
    for work in works:
        assert work.wait()
        assert work.is_completed()
    shared = at.empty(3)
    dist.broadcast(shared if at.rank else at.numbers(3), 0, async_op=True).wait()
    gathered = at.empty(2 * at.size)
    work = dist.all_gather_into_tensor(gathered, at.numbers(2), async_op=True)
    work.wait()
    return [*found, shared if at.rank else None, gathered]


@case
def futures(at: Here) -> Any:
    summed = at.numbers(3)
    future = dist.all_reduce(summed, async_op=True).get_future()
    future.wait()
    return [summed, [t + 1 for t in future.value()]]


@case
def broadcast_into_empty(at: Here) -> Any:
    found = []
    for root in range(at.size):
        t = at.numbers(4) if at.rank == root else at.empty(4)
        dist.broadcast(t, root)
        found.append(t)
    return found


@case
def reduce(at: Here) -> Any:
    t = at.numbers(4)
    dist.reduce(t, 1)
    return t if at.rank == 1 else None


@case
def scatter(at: Here) -> Any:
    into = at.empty(3)
    parts = [at.numbers(3) + k for k in range(at.size)] if at.rank == 1 else None
    dist.scatter(into, parts, src=1)
    return into


@case
def gather(at: Here) -> Any:
    into = [at.empty(3) for _ in range(at.size)] if at.rank == 1 else None
    dist.gather(at.numbers(3), into, dst=1)
    return into


@case
def all_gather(at: Here) -> Any:
    into = [at.empty(3) for _ in range(at.size)]
    dist.all_gather(into, at.numbers(3))
    flat = at.empty(3 * at.size)
    dist.all_gather_into_tensor(flat, at.numbers(3))
    return [into, flat]


@case
def reduce_scatter(at: Here) -> Any:
    one, other = at.empty(2), at.empty(2)
    dist.reduce_scatter(one, [at.numbers(2) + k for k in range(at.size)])
    dist.reduce_scatter_tensor(other, at.numbers(2 * at.size))
    return [one, other]


@case
def all_to_all(at: Here) -> Any:
    even, uneven = at.empty(at.size), at.empty((at.rank + 1) * at.size)
    dist.all_to_all_single(even, at.numbers(at.size))
    counts = [k + 1 for k in range(at.size)]
    dist.all_to_all_single(uneven, at.numbers(sum(counts)), [at.rank + 1] * at.size, counts)
    return [even, uneven]


@case
def coalesced(at: Here) -> Any:
    several = [at.numbers(3), at.numbers(2, 2)]
    dist.all_reduce_coalesced(several)
    lists = [[at.empty(2), at.empty(3)] for _ in range(at.size)]
    dist.all_gather_coalesced(lists, [at.numbers(2), at.numbers(3)])
    outs = [at.empty(2 * at.size), at.empty(3 * at.size)]
    group = dist.group.WORLD
    group.allgather_into_tensor_coalesced(outs, [at.numbers(2), at.numbers(3)]).wait()
    into = [at.empty(2), at.empty(1)]
    group.reduce_scatter_tensor_coalesced(
        into, [at.numbers(2 * at.size), at.numbers(at.size)]
    ).wait()
    return [several, lists, outs, into]


@case
def send_and_receive(at: Here) -> Any:
    after, before = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    into, more = at.empty(3), at.empty(2, 2)
    # All receive first: receiving must not wait.
    works = [dist.irecv(into, before), dist.isend(at.numbers(3), after)]
    works += dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, more, before, tag=1),
            dist.P2POp(dist.isend, at.numbers(2, 2), after, tag=1),
        ]
    )
    for work in works:
        work.wait()
    found = [into, more]
    for source in range(1, at.size):
        if at.rank == source:
            dist.send(at.numbers(2), 0, tag=source)
    if at.rank == 0:
        for source in range(1, at.size):
            found.append(at.empty(2))
            assert dist.recv(found[-1], source, tag=source) == source
    if at.rank == 1:
        dist.send(at.numbers(2), 0, tag=9)
    if at.rank == 0:
        found.append(at.empty(2))
        assert dist.recv(found[-1], tag=9) == 1
    return found


@case
def barriers(at: Here) -> Any:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.barrier(device_ids=[at.rank])  # the number of the process on its host, as scripts give it
    if dist.get_backend() == "gloo":
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
    return []


@case
def groups(at: Here) -> Any:
    mine = at.numbers(3)
    if at.rank < 2:
        dist.all_reduce(mine, group=at.group)
        shared = at.empty(2) if at.rank else at.numbers(2)
        dist.broadcast(shared, 0, group=at.group)
        return [mine, shared]
    return [mine]


@case
def objects(at: Here) -> Any:
    found: list[Any] = [None] * at.size
    dist.all_gather_object(found, {"rank": at.rank, "t": at.numbers(2).cpu()})
    one: list[Any] = [None]
    dist.scatter_object_list(one, [[k] for k in range(at.size)] if at.rank == 0 else None, src=0)
    shared = ["text" if at.rank == 1 else None]
    dist.broadcast_object_list(shared, 1)
    gathered: list[Any] | None = [None] * at.size if at.rank == 0 else None
    dist.gather_object(at.rank, gathered, dst=0)
    return [[f["t"] for f in found], one, shared, gathered]


@case
def functional_collectives(at: Here) -> Any:
    x, group = at.numbers(2 * at.size, at.size), dist.group.WORLD
    tensors = [
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(x, "avg", group),
        functional.all_gather_tensor(x, 0, group),
        functional.all_gather_tensor(x, 1, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.reduce_scatter_tensor(x, "sum", 1, group),
        functional.broadcast(x if at.rank else x + 1, 0, group),
        functional.all_to_all_single(x[:, 0].contiguous(), None, None, group),
        *functional.all_reduce_coalesced([x, x[0]], "sum", group),
        *functional.all_gather_into_tensor_coalesced([x, x[0]], group),
        *functional.reduce_scatter_tensor_coalesced([x, x[0]], "sum", [0, 0], group),
    ]
    c10d, name = torch.ops._c10d_functional, group.group_name
    written = [x.clone(), x.clone(), x[0].clone(), at.empty(at.size * at.size)]
    c10d.wait_tensor(c10d.all_reduce_(written[0], "sum", name))
    c10d.wait_tensor(c10d.broadcast_(written[1], 1, name))
    for t in c10d.all_reduce_coalesced_([written[2]], "max", name):
        c10d.wait_tensor(t)
    c10d.wait_tensor(c10d.all_gather_into_tensor_out(x[0], at.size, name, out=written[3]))
    return [[t.wait() if hasattr(t, "wait") else t for t in tensors], written]


@case
def gradients(at: Here) -> Any:
    x = at.numbers(2 * at.size).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    reduced = functional.reduce_scatter_tensor_autograd(x * 2, "sum", 0, dist.group.WORLD)
    (gathered.square().sum() + reduced.square().sum()).backward()
    return [x.grad]


def _mlp(at: Here) -> torch.nn.Module:
    torch.manual_seed(0)
    width = 4 * at.size
    net = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.GELU(), torch.nn.Linear(width, 6))
    return net.to(at.device)


@case
def distributed_tensors(at: Here) -> Any:
    mesh = init_device_mesh(at.device, (at.size,))
    whole = torch.arange(float(6 * at.size * at.size)).reshape(2 * at.size, 3 * at.size)
    rows = distribute_tensor(whole.to(at.device), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    alone = DTensor.from_local(at.numbers(2, 2), mesh, [Replicate()])
    return [
        rows.to_local(),
        columns.to_local(),
        columns.redistribute(mesh, [Replicate()]).to_local(),
        (rows @ columns.t()).full_tensor(),
        rows.sum().full_tensor(),
        alone.to_local(),
    ]


@case
def tensor_parallel(at: Here) -> Any:
    mesh = init_device_mesh(at.device, (at.size,))
    net = parallelize_module(_mlp(at), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    data = torch.randn(8, 6).to(at.device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (net(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, [p.full_tensor().detach() for p in net.parameters()]]


@case
def data_parallel(at: Here) -> Any:
    torch.manual_seed(at.rank)  # it gives all processes the parameters of rank 0
    net = torch.nn.Linear(6, 3).to(at.device)
    model = torch.nn.parallel.DistributedDataParallel(net)
    for _ in range(2):
        model(at.numbers(2, 6) / 100).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
    return [p.detach() for p in net.parameters()]


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return not torch.allclose(one, ltc.to_cpu(other), rtol=1e-5, atol=1e-6)
    if isinstance(one, list):
        return len(one) != len(other) or any(map(_differ, one, other))
    return bool(one != other)


def main() -> int:
    backend, *chosen = sys.argv[1:]
    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for some
    dist.init_process_group(backend or None)
    group = dist.new_group([0, 1])
    wrong = []
    for name, call in _CASES.items():
        if chosen and name not in chosen:
            continue
        # The device first: its first call lets a group that was made for it alone take tensors of the CPU.
        try:
            found = [call(Here(ltc.settings.device_name, group)) for _ in range(2)]
            expected = call(Here("cpu", group))
        except Exception as error:
            raise RuntimeError(f"{name} failed on rank {dist.get_rank()}") from error
        if _differ([expected] * 2, found):
            wrong.append(f"{name}: {ltc.to_cpu(found)} instead of {expected}")
    print("\n".join(wrong), file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
