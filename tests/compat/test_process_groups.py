"""Groups of torch.distributed's backend 'xla', on tensors of the device and of the CPU."""

from pathlib import Path

from tests.compat.running import run

CALLS = """
import time, warnings
import torch, torch_xla, torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
from torch_xla.distributed.xla_backend import ProcessGroupXla

def calls(rank):
    warnings.simplefilter("ignore", FutureWarning)  # of calls that newer versions name otherwise
    dist.init_process_group("xla", init_method="xla://")
    assert isinstance(dist.group.WORLD, ProcessGroupXla) and dist.get_backend() == "xla"
    for device in (xm.xla_device(), "cpu"):
        own, out = torch.full((1,), float(rank), device=device), torch.zeros(2, device=device)
        t = torch.ones(2, device=device) * (rank + 1)
        dist.all_reduce(t)
        dist.all_reduce(t, dist.ReduceOp.MAX, async_op=True).wait()
        assert t.tolist() == [3, 3]
        parts = [torch.zeros(1, device=device) for _ in range(2)]
        dist.all_gather(parts, own)
        dist.all_gather_into_tensor(out, own)
        assert torch.cat(parts).tolist() == out.tolist() == [0, 1]
        time.sleep(0.2)  # on the CPU PyTorch's own call waits for ever if gloo's thread has not freed the one before
        dist.all_to_all_single(out, torch.arange(2.0, device=device) + 10 * rank)
        assert out.tolist() == [rank, 10 + rank]
        dist.reduce_scatter_tensor(parts[0], torch.arange(2.0, device=device))
        dist.reduce_scatter(parts[1], list(torch.arange(2.0, device=device).split(1)))
        assert parts[0].item() == parts[1].item() == 2 * rank
        assert functional.all_reduce(own, "sum", dist.group.WORLD).item() == 1
        if rank == 0:
            dist.send(own + 7, 1)
        else:
            dist.recv(own, 0)
            assert own.item() == 7
        dist.broadcast(own, 1)
        assert own.item() == 7
    found = [None, None]
    dist.all_gather_object(found, rank)
    assert found == [0, 1]
    model = torch.nn.Linear(2, 2).to(xm.xla_device())
    whole = torch.nn.parallel.DistributedDataParallel(model)
    whole(torch.ones(1, 2, device=xm.xla_device()) * rank).sum().backward()
    assert model.weight.grad.tolist() == [[0.5, 0.5]] * 2
    both = dist.new_group([0, 1], pg_options={"xla_pg_options": {"spmd": True}})
    alone = [dist.new_group([k]) for k in range(2)][rank]
    assert both._mesh == [[0, 1]] and alone._mesh == [[0], [1]] and both.size() == 2 and alone.rank() == 0
    t = torch.ones(1, device=xm.xla_device())
    dist.all_reduce(t, group=alone)
    dist.all_reduce(t, group=both)
    assert t.item() == 2
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    xmp.spawn(calls, nprocs=2)
"""


def test_all_calls_between_processes(tmp_path: Path) -> None:
    run(tmp_path, CALLS, CPU_NUM_DEVICES="2")


def test_the_groups_of_the_other_processes(tmp_path: Path) -> None:
    code = """
from unittest import mock
import pytest, torch, torch.distributed as dist
import torch_xla.distributed.xla_backend as backend

dist.init_process_group("xla", init_method="xla://")

def mesh(ranks, **wanted):
    world = dist.group.WORLD
    with mock.patch.object(world, "rank", return_value=ranks[1]), mock.patch.object(world, "size", return_value=12):
        with mock.patch.object(dist.distributed_c10d, "_store_based_barrier"):
            group = dist.new_group(ranks=ranks, pg_options={"xla_pg_options": wanted})
    assert isinstance(group, backend.ProcessGroupXla) and (group.rank(), group.size()) == (1, len(ranks))
    return group._mesh

assert mesh([4, 5, 6, 7], spmd=True) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
assert mesh([1, 5, 9], spmd=True) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
assert mesh([4, 5, 6, 7]) == [[4, 5, 6, 7]] and mesh([0, 3], mesh=[[0, 3], [1, 2]]) == [[0, 3], [1, 2]]
assert mesh(list(range(12)), spmd=True) == [list(range(12))]
for wrong in ([4, 5, 6], [1, 5], [4, 7, 10], [1, 5, 10], [0, 1, 2, 3, 4], [7, 8, 9, 10]):
    with pytest.raises(ValueError, match="(?s)cannot be divided in groups like this one.*got: ranks .*Next: pass"):
        mesh(wrong, spmd=True)
"""
    run(tmp_path, code)


def test_a_group_that_nobody_has_joined(tmp_path: Path) -> None:
    code = """
from datetime import timedelta
import pytest, torch, torch_xla
from torch_xla.distributed.xla_backend import ProcessGroupXla

group = ProcessGroupXla(None, 3, 8, timedelta(minutes=1))
t = torch.ones(2, device=torch_xla.device())
with pytest.raises(RuntimeError, match="(?s)process group has no backend.*got: backends for no device.*Next: init_"):
    group.allreduce([t])
"""
    run(tmp_path, code)
