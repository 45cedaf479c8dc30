"""Functions that other processes import: what `spawn` runs in the tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import ltc_core as ltc
import ltc_dist
from ltc_core.graph import collective
from ltc_dist.collectives.process_group import group_of
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import ranks
from ltc_dist.processes.serial import MpSerialExecutor

__all__ = [
    "Changed",
    "Mute",
    "Odd",
    "average_halves",
    "deal_out",
    "differ_once_known",
    "differentiate",
    "distributed_checkpoint",
    "end",
    "fail",
    "fail_late",
    "learn_unlike",
    "meet_again",
    "meet_and_tell",
    "numbers",
    "reduce_each_kind",
    "replicate",
    "serial",
    "start_others",
    "tell",
    "train",
    "wait_elsewhere",
    "wait_for_ever",
]

FLOATS = (torch.float32, torch.float64, torch.half, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.uint8, torch.int8)


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise KeyError("no text")


class Changed(Exception):
    """Arrives as something else."""

    def __reduce__(self) -> Any:
        return str, ("not an exception",)


class Odd(Exception):
    """Cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def tell(rank: int, directory: str, *more: Any) -> None:
    """Write down who and where this process is."""
    found = ranks()
    names = ("MASTER_ADDR", "OMP_NUM_THREADS", "LTC_NUM_DEVICES")
    words = [rank, found.rank, found.world_size, found.local_rank, found.local_world_size]
    rows = [*words, torch.get_num_threads(), os.getpid(), *(os.environ[n] for n in names), *more]
    Path(directory, str(rank)).write_text("\n".join(map(str, rows)))


def deal_out(rank: int, directory: str, is_in_turn: bool) -> None:
    """Take three batches of two, of samples that are dealt out in turn or in contiguous shards, and save."""
    data = TensorDataset(torch.arange(48))
    shard = Subset(data, range(24 * rank, 24 * rank + 24))
    sampler = DistributedSampler(data, 2, rank, seed=3) if is_in_turn else None
    plain = DataLoader(data if is_in_turn else shard, 2, sampler=sampler)
    loader = ltc_dist.MpDeviceLoader(plain, ltc.lazy_device())
    model = torch.nn.Linear(1, 1)
    with ltc_dist.Checkpointer(directory, model=model, loader=loader) as checkpointer:
        batches = iter(loader)
        taken = [k for _ in range(3) for k in next(batches)[0].tolist()]
        checkpointer.save(3)
    loader.close()
    Path(directory, f"taken{rank}").write_text(" ".join(map(str, taken)))


def fail(rank: int, failing: int, error: BaseException) -> None:
    if rank == failing:
        raise error
    time.sleep(60)


def fail_late(rank: int, first: Any) -> None:
    """Rank 1 fails by itself; rank 0 ended before, as it does that has lost rank 1."""
    if rank == 1:
        time.sleep(1.0)
        raise LookupError("the cause")
    if isinstance(first, int):
        os._exit(first)
    if first == "handled":
        try:
            raise RuntimeError("[/gloo/transport/tcp/pair.cc:54] Connection closed by peer [::1]:1")
        except RuntimeError:
            sys.exit(1)
    raise first


def end(rank: int, how: str) -> None:
    if rank == 1:
        if how == "exit":
            sys.exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def wait_for_ever(rank: int, directory: str) -> None:
    Path(directory, str(os.getpid())).touch()
    while True:
        time.sleep(0.1)


ADDED_DTYPES = [torch.complex64, torch.complex128, torch.int16]
OTHER_DTYPES = [*ADDED_DTYPES, torch.uint16, torch.float8_e4m3fn, torch.bool]


def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Give what a process reduces."""
    if dtype.is_floating_point:
        return (torch.tensor([1.5, -2.0, float("nan"), 0.25]) * (rank + 1)).to(dtype)
    return (torch.tensor([6, 3, -5]) + rank).to(dtype)


def reduce_each_kind(rank: int, directory: str) -> None:
    """Reduce whole and real numbers in each way."""
    found = {
        f"{kind} {dtype}": ltc_dist.all_reduce(kind, numbers(rank, dtype).to("ltc")).cpu()
        for kind, dtypes in (
            *((kind, (*FLOATS, *INTS)) for kind in ("sum", "mul", "min", "max")),
            *((kind, INTS) for kind in ("and", "or")),
        )
        for dtype in dtypes
    }
    torch.save(found, f"{directory}/{rank}.pt")


def move_and_add_each_dtype(rank: int, directory: str) -> None:
    """Collectives on dtypes that torch.distributed's backend for the processor does not know itself."""
    import ltc_dist as ltd

    device, count = ltd.lazy_device(), ltd.world_size()
    found = {}
    for dtype in OTHER_DTYPES:
        x = torch.arange(2 * count).add(10 * rank).to(dtype).reshape(count, 2).to(device)
        y = x.clone()
        ltd.collective_broadcast([y], 1)
        found[dtype] = {
            "gathered": ltd.all_gather(x, 1),
            "exchanged": ltd.all_to_all(x, 0, 1, count),
            "permuted": ltd.collective_permute(x, [(k, (k + 1) % count) for k in range(count)]),
            "broadcast": y,
        }
        if dtype in ADDED_DTYPES:
            found[dtype]["sum"] = ltd.all_reduce("sum", x)
            found[dtype]["listed"] = ltd.all_reduce("sum", [x.clone()], scale=0.5)[0]
            found[dtype]["scattered"] = ltd.reduce_scatter("sum", x, 1.0, 0, count)
    torch.save(ltd.to_cpu(found), Path(directory, f"{rank}.pt"))
    with pytest.raises(RuntimeError, match=r"processes cannot reduce torch.uint16(?s:.*)float32"):
        ltd.reduce_scatter("sum", x.to(torch.uint16), 1.0, 0, count).cpu()


def serial(rank: int, path: str) -> None:
    """Read, wait, write: what others do meanwhile would be lost."""

    def add_one() -> None:
        file = Path(path)
        count = int(file.read_text())
        time.sleep(0.05)
        file.write_text(str(count + 1))

    for _ in range(3):
        MpSerialExecutor().run(add_one)


def train(rank: int, directory: str) -> None:
    """A few steps on the device of this process."""
    torch.manual_seed(0)
    device = ltc.lazy_device()
    net = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(8, 4, device=device)).square().mean().backward()
        optimizer.step()
        ltc.mark_step()
    torch.save({k: v.cpu() for k, v in net.state_dict().items()}, Path(directory, f"{rank}.pt"))


def meet(rank: int, directory: str) -> None:
    """Meet by tag, from different places, several times, in parts."""
    import numpy as np

    from ltc_dist.job.host_collectives import do_on_ordinals, mesh_reduce, rendezvous

    device = ltc.lazy_device()
    if rank == 0:
        first = rendezvous("cache", b"made")
    else:
        first = rendezvous("cache", f"found by {rank}".encode())
    rounds = [rendezvous("again", bytes([rank, k])) for k in range(3)]
    part = rendezvous("part", bytes([rank]), [2, 0]) if rank != 1 else []
    pending = torch.ones(2, device=device) * rank
    results = {
        "first": first,
        "rounds": rounds,
        "part": part,
        "sum": mesh_reduce("n", rank + 1, sum),
        "mean": float(mesh_reduce("mean", np.float64(rank), np.mean)),
        "concatenated": mesh_reduce("a", np.array([rank, rank]), np.concatenate).tolist(),
        "tensors": mesh_reduce(
            "t", {"x": (pending, "text")}, lambda d: [x["x"][0].tolist() for x in d]
        ),
        "once": do_on_ordinals(lambda a, b: a + b, (3, rank), 2),
    }
    torch.save(results, Path(directory, f"{rank}.pt"))


def miss(rank: int, how: str) -> None:
    from ltc_dist.job.host_collectives import mesh_reduce, rendezvous

    if how == "object":
        mesh_reduce("tag", Odd if rank == 0 else 1, list)
    if rank == 1:
        if how == "slow":
            time.sleep(30)
        return
    rendezvous("epoch")


def start_others(rank: int) -> None:
    """Rank 0 starts a program and a fork that end, and comes to a rendezvous when rank 1 has looked for ended ranks."""
    if rank == 0:
        subprocess.run([sys.executable, "-c", "import ltc_dist"], check=True)
        pid = os.fork()
        if not pid:
            sys.exit(0)
        os.waitpid(pid, 0)
        time.sleep(2 * host_collectives.LOOK_S)
    assert host_collectives.rendezvous("after") == [b"", b""]


def collect(rank: int, directory: str) -> None:
    """Every collective once, in one graph."""
    import ltc_dist as ltd

    device = ltd.lazy_device()
    x = torch.arange(6.0, device=device).reshape(2, 3) + 10 * rank
    n = torch.tensor([1 << rank, 7], device=device)
    listed = [x.clone(), torch.ones(2, device=device, dtype=torch.float64) * rank]
    same = ltd.all_reduce("sum", listed, 0.5)
    into = torch.zeros(2, 6, device=device)
    copied = [x.clone(), n.clone()]
    ltd.collective_broadcast(copied, 1)
    results = {
        "sum": ltd.all_reduce("sum", x),
        "scaled": ltd.all_reduce("sum", x, 0.5),
        "max": ltd.all_reduce("max", x),
        "or": ltd.all_reduce("or", n),
        "listed": listed,
        "own": ltd.all_reduce("sum", x, groups=[[0], [1]]),
        "gathered": ltd.all_gather(x, dim=1, output=into),
        "into": into,
        "number": ltd.all_gather(x.sum()),
        "scattered": ltd.reduce_scatter("sum", x, 1.0, 0, 2),
        "exchanged": ltd.all_to_all(x, 0, 1, 2),
        "scattered_max": ltd.reduce_scatter("max", n, 3.0, 0, 2),
        "permuted": ltd.collective_permute(x, [[0, 1]]),
        "swapped": ltd.collective_permute(n, [[0, 1], [1, 0]]),
        "kept": ltd.collective_permute(x.t(), [[1, 1]]),
        "dealt": ltd.collective_permute(x.sum(), [[1, 0], [1, 1]]),
        "broadcast": copied,
        "x": x,
    }
    assert same is listed
    torch.save(ltd.to_cpu(results), Path(directory, f"{rank}.pt"))


def differ(rank: int, how: str) -> None:
    """Collectives that do not fit together."""
    import ltc_dist as ltd

    device = ltd.lazy_device()
    x = torch.ones(4, device=device)
    ltd.all_reduce("sum", [x])
    ltd.wait_device_ops()
    if how == "shapes":
        ltd.all_reduce("sum", [torch.ones(4 - 2 * rank, device=device)])
    elif how == "kinds" and rank == 1:
        ltd.all_gather(x)
    elif how == "known" and rank == 1:  # the others repeat an op that they know
        ltd.all_reduce("max", [x])
    elif how in ("kinds", "known") or (how == "ended" and rank == 0):
        ltd.all_reduce("sum", [x])
    elif how == "gradients":
        two = [torch.ones(3, device=device, requires_grad=True) for _ in range(2)]
        two[rank].sum().backward()
        ltd.optimizer_step(torch.optim.SGD(two, lr=0.1))
    ltd.wait_device_ops()


def learn_unlike(rank: int, directory: str, optimizer: str) -> None:
    """Train, rank 0 op by op, the others in compiled code."""
    with ltc.settings.override(compile="sync" if rank else "off"):
        learn(rank, directory, optimizer)
        if rank:
            from ltc_core import metrics

            assert metrics.counter_value("CompiledProgram")


def learn(rank: int, directory: str, optimizer: str) -> None:
    """Train on this process's part of each batch; write down losses and parameters."""
    import ltc_dist as ltd
    from tests.core.models import CNN, OPTIMIZERS, digits

    torch.manual_seed(0)
    device = ltd.lazy_device()
    net = CNN().to(device).eval()  # no dropout: it would draw other numbers for a part of a batch
    stepper = OPTIMIZERS[optimizer](net.parameters())
    data = torch.utils.data.Subset(digits(64), range(64))
    size = ltd.world_size()
    parts = [[data[k] for k in range(at + rank, at + 16, size)] for at in range(0, 64, 16)]
    batches = [(torch.stack([x for x, _ in p]), torch.stack([y for _, y in p])) for p in parts]
    losses = []
    for _ in range(3):
        for x, y in ltd.MpDeviceLoader(batches, device):
            stepper.zero_grad()
            loss = torch.nn.functional.nll_loss(net(x), y)
            loss.backward()
            ltd.optimizer_step(stepper)
            losses.append(loss.detach())
    mean = [
        float(v) for v in ltd.mesh_reduce("losses", torch.stack(losses), lambda a: sum(a) / len(a))
    ]
    state = {k: v.cpu() for k, v in net.state_dict().items()}
    torch.save({"losses": mean, "state": state}, Path(directory, f"{rank}.pt"))


def _newest(module: Any, *names: str) -> Any:
    """Give the first function of these names that this torch has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def distributed(rank: int, directory: str) -> None:
    """torch.distributed on tensors of the device, and DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device = ltc.lazy_device()
    dist.init_process_group()
    x = torch.arange(4.0, device=device) + 10 * rank
    summed, shared, kept = x.clone(), x.clone(), x.clone()
    work = dist.all_reduce(summed, async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(shared, 1)
    gathered = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(gathered, x)
    flat = torch.empty(8, device=device)
    _newest(dist, "all_gather_single", "all_gather_into_tensor")(flat, x)
    part = torch.empty(2, device=device)
    _newest(dist, "reduce_scatter_single", "reduce_scatter_tensor")(part, x)
    mixed = torch.empty_like(x)
    dist.all_to_all_single(mixed, x)
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(kept, 0)
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu)
    own = x.clone()
    group = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(own, group=group)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()

    torch.manual_seed(rank)  # DDP gives all processes the parameters of rank 0
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data, target = torch.arange(64.0).reshape(16, 4) / 64, torch.arange(16.0).reshape(16, 1) / 16
    for _ in range(4):
        optimizer.zero_grad()
        out = model(data[rank::2].to(device))
        torch.nn.functional.mse_loss(out, target[rank::2].to(device)).backward()
        optimizer.step()
        ltc.mark_step()
    results = {
        "tensors": ltc.to_cpu([summed, shared, *gathered, flat, part, mixed, kept, own]),
        "on_cpu": on_cpu,
        "objects": objects,
        "params": [p.detach().cpu() for p in net.parameters()],
    }
    torch.save(results, Path(directory, f"{rank}.pt"))
    dist.destroy_process_group()


def write(rank: int, directory: str) -> None:
    """Save by all, save by the master alone, and read what must be there then."""
    import ltc_dist as ltd

    device = ltd.lazy_device()
    x = torch.ones(3, device=device)
    path = Path(directory, "all.pt")
    for version in range(3):
        x = ltd.all_reduce("sum", x)  # pending: the master's values need the others
        ltd.save({"x": (x, version), "rank": rank}, path)
        found = torch.load(path, weights_only=True)
        assert found["rank"] == 0 and found["x"][1] >= version
        ltd.rendezvous("read")
    if ltd.is_master_ordinal():
        ltd.save({"x": x}, Path(directory, "master.pt"))
    ltd.save(rank, Path(directory, f"own{rank}.pt"), master_only=False)


def leave_unsaved(rank: int, directory: str) -> None:
    import ltc_dist as ltd

    ltd.rendezvous("begin")
    if rank == 1:
        ltd.save({}, Path(directory, "never.pt"))


def differ_once_known(rank: int, how: str) -> None:
    """Collectives of one size that all processes have run before, now another one in rank 1."""
    import ltc_dist as ltd

    device = ltd.lazy_device()
    both = [torch.full((3,), 1.0 + k, device=device, requires_grad=True) for k in range(2)]
    optimizer = torch.optim.SGD(both, lr=0.1)

    def learn(k: int) -> None:
        optimizer.zero_grad()
        (both[k] * (10.0 + 100 * rank)).sum().backward()
        ltd.optimizer_step(optimizer, barrier=True)

    x = torch.ones(4, device=device) + rank
    calls: dict[str, tuple[Any, Any]] = {
        "gradients": (lambda: learn(0), lambda: learn(1)),
        "reductions": (
            lambda: ltd.all_reduce("sum", [x]),
            lambda: ltd.all_reduce("max", [x]),
        ),
        "moves": (
            lambda: ltd.all_gather(x.reshape(2, 2), 0),
            lambda: ltd.all_gather(x.reshape(2, 2), 1),
        ),
        "roots": (
            lambda: ltd.collective_broadcast([x], 0),
            lambda: ltd.collective_broadcast([x], 1),
        ),
        "sizes": (
            lambda: ltd.all_reduce("sum", [x]),
            lambda: ltd.all_reduce("sum", [torch.ones(40, device=device)]),
        ),
        "kinds": (lambda: ltd.all_reduce("sum", [x]), lambda: ltd.all_gather(x)),
    }
    first, second = calls[how]
    for call in (first, second, second, first):
        call()
        ltd.wait_device_ops()
    if rank == 1:
        second()
    else:
        first()
    ltd.all_reduce("sum", [torch.zeros(4, device=device)])  # who only sends learns it here
    ltd.wait_device_ops()
    print("went on", x.tolist(), [p.tolist() for p in both], flush=True)


def average_halves(rank: int, directory: str) -> None:
    """The mean of float16 values whose sum is too large."""
    import ltc_dist as ltd

    device = ltd.lazy_device()
    param = torch.zeros(3, dtype=torch.half, device=device, requires_grad=True)
    other = torch.zeros(2, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([param, other], lr=1.0)
    (param * 40000).sum().backward()
    (other * (1.0 + rank)).sum().backward()
    ltd.reduce_gradients(optimizer)
    part = torch.full((4,), 60000.0, dtype=torch.half, device=device)
    scattered = ltd.reduce_scatter("sum", part, 0.5, 0, 2)
    found = [ltd.to_cpu(t) for t in (param.grad, other.grad, scattered)]
    torch.save(found, Path(directory, f"{rank}.pt"))


def differentiate(rank: int, directory: str) -> None:
    """Collectives that gradients flow through, and those on many tensors at once."""
    import ltc_dist as ltd
    from ltc_dist.collectives import functions

    device = ltc.lazy_device()
    start = torch.arange(8.0).reshape(2, 4) + 10 * rank
    weight = torch.linspace(1, 2, 16).reshape(4, 4) * (rank + 1)
    results = {}
    for name, call in {
        "all_reduce": lambda x: functions.all_reduce("sum", x, 0.5),
        "all_gather": lambda x: functions.all_gather(x, 0),
        "all_gather_1": lambda x: functions.all_gather(x, 1),
        "reduce_scatter": lambda x: functions.reduce_scatter("sum", x, 2.0, 1, 2),
        "all_to_all": lambda x: functions.all_to_all(x, 1, 0, 2),
    }.items():
        x = start.to(device).requires_grad_()
        y = call(x)
        w = weight.flatten()[: y.numel()].view(y.shape).to(device)
        (y * w).sum().backward()
        results[name] = y.detach().cpu(), x.grad.cpu()
    many = [torch.full((2, 3), 1.0 + rank), torch.arange(4) + rank, torch.tensor(5.0 + rank)]
    lazy = [value.to(device) for value in many]
    cap = 20 / 2**20  # bytes: less than two of them
    results["gathered"] = [v.cpu() for v in ltd.all_gather_bucketized(lazy, bucket_cap_mb=cap)]
    into = [torch.zeros(2, 6, device=device)]
    ltd.all_gather_bucketized(lazy[:1], 1, output=into)
    results["into"] = into[0].cpu()
    parts = ltd.reduce_scatter_bucketized("sum", lazy[:2], 1.0, 0, 2, bucket_cap_mb=cap)
    results["scattered"] = [v.cpu() for v in parts]
    ltd.all_reduce_bucketized_gradients(lazy[::2], 0.5, bucket_cap_mb=cap)
    results["reduced"] = [v.cpu() for v in lazy[::2]]
    torch.save(results, Path(directory, f"{rank}.pt"))


def distributed_checkpoint(rank: int, directory: str) -> None:
    """torch.distributed.checkpoint, on tensors of the device."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group()
    device = ltc.lazy_device()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(device)
    dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id=directory)
    other = torch.nn.Linear(4, 3).to(device)
    state = {"model": other.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=directory)
    other.load_state_dict(state["model"])
    assert state["step"] == 7
    for name, value in model.state_dict().items():
        assert value.cpu().equal(other.state_dict()[name].cpu()), name
    dist.destroy_process_group()


def normalise(rank: int, directory: str, norm_class: Any) -> None:
    """Train with batch statistics of all processes; the batches are of 5 and 3."""
    import ltc_dist as ltd

    if norm_class is torch.nn.SyncBatchNorm:
        dist: Any = torch.distributed
        dist.init_process_group()

    torch.manual_seed(0)
    batch = torch.randn(8, 3, 4).split([5, 3])[rank].to(ltd.lazy_device())
    batch.requires_grad_()
    norm = norm_class(3).to(ltd.lazy_device())
    average = norm_class(3, momentum=None, affine=False).to(ltd.lazy_device())
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        batch.grad = None
        loss = (norm(batch) ** 4 + average(batch) ** 3).sum()
        loss.backward()
        ltd.optimizer_step(optimizer)
        ltd.mark_step()
    norm.eval()
    kept = {
        "norm": norm.state_dict(),
        "average": average.state_dict(),
        "grad": batch.grad,
        "out": norm(batch).detach(),
    }
    torch.save(ltd.to_cpu(kept), f"{directory}/{rank}.pt")
    if norm_class is torch.nn.SyncBatchNorm:
        dist.destroy_process_group()


def take(rank: int, tensor: torch.Tensor, parameter: torch.nn.Parameter, directory: str) -> None:
    """Be given tensors of the device."""
    assert str(tensor.device) == str(parameter.device) == str(ltc.lazy_device())
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    torch.save([tensor.cpu(), parameter.detach().cpu()], f"{directory}/{rank}.pt")


def normalise_more(rank: int) -> None:
    """Batch statistics of an empty batch beside another, and in half precision."""
    import ltc_dist as ltd

    for dtype in (torch.float16, torch.bfloat16):
        norm = ltd.SyncBatchNorm(2).to(ltd.lazy_device())
        made = norm(torch.full((64, 2, 40, 40), 3.0 + rank, dtype=dtype, device=ltd.lazy_device()))
        assert made.dtype == dtype and made.float().mean().item() == 2 * rank - 1
    norm = ltd.SyncBatchNorm(2).to(ltd.lazy_device())
    batch = torch.arange(8.0).reshape(4, 2)[: 4 * rank].to(ltd.lazy_device()).requires_grad_()
    norm(batch).square().sum().backward()
    assert batch.grad is not None and batch.grad.shape == batch.shape
    assert norm.running_mean.tolist() == pytest.approx([0.3, 0.4])


def replicate(index: int, directory: str) -> None:
    """Which replica each process is, if chips are counted the other way round; and a plan they agree on."""
    transport = collective.transport_of(group_of().name)
    assert isinstance(transport, collective.Replicated)
    found = [transport.replicas(1 - index, 2), transport.replicas(index, 2)]  # the first is kept
    transport.agree("a program")
    transport.launched("a program")
    torch.save([found, transport.replicas(index, 4)], Path(directory, f"{index}.pt"))


def wait_elsewhere(rank: int, directory: str) -> None:
    """Rank 0 reads a sum; rank 1, which has recorded its part, waits for rank 0 on the host. In each way there is."""
    import torch.distributed as dist

    import ltc_dist as ltd

    dist.init_process_group("gloo")
    device = ltd.lazy_device()
    objects: list[Any] = [None, None]
    writer = ltd.Checkpointer(Path(directory, "steps"), model=torch.nn.Linear(2, 2).to(device))
    ways: dict[str, Any] = {
        "rendezvous": lambda: ltd.rendezvous("way"),
        "mesh_reduce": lambda: ltd.mesh_reduce("way", rank, sum),
        "do_on_ordinals": lambda: ltd.do_on_ordinals(int, ordinals=(1,)),
        "save": lambda: ltd.save({}, Path(directory, "way.pt")),
        "checkpoint": lambda: (writer.save(1), writer.wait()),
        "barrier": dist.barrier,
        "objects": lambda: dist.all_gather_object(objects, rank),
        "new group": lambda: ltd.all_reduce("sum", torch.ones(1, device=device), groups=[[1, 0]]),
    }
    for way, wait in ways.items():
        total = ltd.all_reduce("sum", torch.ones(2, device=device) + rank)
        if rank == 0:
            assert total.tolist() == [3.0, 3.0], way
        wait()
        assert total.tolist() == [3.0, 3.0], way
    total = ltd.all_reduce("sum", torch.ones(2, device=device) + rank)
    ltd.rendezvous("serial")
    inside = Path(directory, "inside")
    if rank == 0:
        total = ltd.all_reduce("sum", total)
        ltd.MpSerialExecutor().run(lambda: (inside.touch(), total.tolist()))
    else:
        total = ltd.all_reduce("sum", total)
        while not inside.exists():
            time.sleep(0.01)
        ltd.MpSerialExecutor().run(lambda: None)
    assert total.tolist() == [6.0, 6.0]
    writer.close()
    dist.destroy_process_group()


def meet_again(rank: int) -> None:
    """Rank 0 waits in vain, and comes again when rank 1 does."""
    from ltc_core.errors import RankTimeoutError
    from ltc_dist.job.host_collectives import rendezvous

    for _ in range(2):
        if rank == 0:
            with (
                ltc.settings.override(collective_timeout_s=0.2),
                pytest.raises(RankTimeoutError, match="missing: ranks 1"),
            ):
                rendezvous("late", b"too early")
        rendezvous("between")
        assert rendezvous("late", bytes([rank])) == [b"\0", b"\1"]


def meet_and_tell(rank: int, directory: str) -> None:
    from ltc_dist.job.host_collectives import rendezvous

    Path(directory, f"begun{rank}").touch()
    while not Path(directory, "go").exists():
        time.sleep(0.01)
    rendezvous("met")
    Path(directory, f"met{rank}").touch()
