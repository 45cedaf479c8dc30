"""ZeRO stage 1: the losses of one eager process on the whole batch, with a share of the state in each process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core.api.grad_scaler import GradScaler
from ltc_core.errors import CheckpointError, CollectiveError, DeviceError
from ltc_dist.train.zero_redundancy_optimizer import UnsupportedOptionError, ZeroRedundancyOptimizer
from tests.core.counting import Counting

optim: Any = torch.optim
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.3, "momentum": 0.9},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
}
NUM_STEPS, CLIPPED = 8, 0.5


def net() -> nn.Module:
    """Parameters of 15, 5, 5 and 1 numbers, which two do not divide, one of 10, and one that has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)
    )
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model


def batch(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(24.0).view(8, 3) / 12 - k / 8
    return x, x.sum(1, keepdim=True).sin()


def groups(model: Any) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": decayed},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def schedule_of(optimizer: Any) -> Any:
    return optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=NUM_STEPS + 1)


def eager(kind: str, clips: bool = True) -> tuple[list[float], nn.Module]:
    model = net()
    optimizer = getattr(optim, kind)(groups(model), **KINDS[kind])
    schedule = schedule_of(optimizer)
    losses = []
    for k in range(NUM_STEPS):
        x, y = batch(k)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, model


def sharded(kind: str, clips: bool = True, **options: Any) -> tuple[list[float], Any, Any]:
    """Train on this process's part of each batch; give the losses of the whole one, the model and the optimizer."""
    model = net().to(ltc.lazy_device())
    optimizer = ZeroRedundancyOptimizer(
        groups(model),
        getattr(optim, kind),
        grad_clipping=clips,
        max_norm=CLIPPED,
        **options,
        **KINDS[kind],
    )
    schedule = schedule_of(optimizer)
    losses = []
    ltc.mark_step()
    with Counting() as counted:
        for k in range(NUM_STEPS):
            x, y = (
                t[ltd.get_ordinal() :: ltd.world_size()].to(ltc.lazy_device()) for t in batch(k)
            )

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss.detach()

            losses.append(optimizer.step(closure))
            schedule.step()
            ltc.mark_step()
    assert counted.syncs == {"MarkStep": NUM_STEPS} and not counted.fallbacks, counted.so_far()
    assert counted.compiles <= 3
    mean = ltd.mesh_reduce("losses", torch.stack(losses), lambda all: sum(all) / len(all))
    return [float(v) for v in mean], model, optimizer


def work(rank: int, directory: str) -> None:
    """What each process of a job does."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for clips in (True, False):
            losses, model, optimizer = sharded(kind, clips)
            parameters = [p.detach().cpu() for p in model.parameters()]
            found[f"{kind} {clips}"] = losses, parameters
    state = ltc.to_cpu(optimizer.state_dict())
    found["shard"] = state["shard"]
    found["sizes"] = [row["exp_avg"].numel() for row in state["base_state"].values()]
    one_a_vector = sharded("SGD", bucket_cap_mb_all_gather=1e-6, bucket_cap_mb_reduce_scatter=1e-6)
    found["one a vector"] = one_a_vector[0]
    alone = [[k] for k in range(ltd.world_size())]
    own = sharded("SGD", sharding_groups=alone, grad_norm_groups=None)[2]
    found["own"] = ltc.to_cpu(own.state_dict())["shard"]
    wide = ZeroRedundancyOptimizer(
        [nn.Parameter(torch.ones(3, device=ltc.lazy_device()))], optim.SGD, lr=1.0,
        sharding_groups=alone, grad_norm_groups=[list(range(ltd.world_size()))],
    )  # fmt: skip
    wide.param_groups[0]["params"][0].grad = torch.ones(3, device=ltc.lazy_device()) * (rank + 1)
    wide.step()
    assert wide.grad_norm is not None
    found["norm over all"] = float(wide.grad_norm)
    found["precise"] = [reduce_bfloat16(rank, precise) for precise in (False, True)]
    found["overflow"] = overflow(rank)
    found["resumed"] = resume(directory)
    if ltd.world_size() > 1:
        other = {**state, "shard": [1 - rank, 2]}
        with pytest.raises(CheckpointError, match="of another shard"):
            optimizer.load_state_dict(other)
        with pytest.raises(CollectiveError, match="every rank in exactly one group"):
            ZeroRedundancyOptimizer(model.parameters(), optim.SGD, sharding_groups=[[0]], lr=0.1)
    torch.save(found, Path(directory, f"{rank}.pt"))


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype, device=ltc.lazy_device()))


def reduce_bfloat16(rank: int, precise: bool) -> float:
    """The sum of 1 and 2 ** -9 is not a bfloat16."""
    p = parameter(0.0, 0.0, dtype=torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(
        [p],
        optim.SGD,
        grad_clipping=False,
        higher_cc_precision=precise,
        maximize=True,
        lr=float(ltd.world_size()),
    )
    p.grad = torch.full_like(p, 2**-9 if rank else 1.0)
    optimizer.step()
    assert optimizer.base_optimizer is not None
    (shard,) = optimizer.base_optimizer.param_groups[0]["params"]
    assert shard.dtype is torch.float32 and p.dtype is torch.bfloat16
    return float(shard.detach()[0])


def overflow(rank: int) -> Any:
    """Only the last process overflows; all skip that step."""
    p = parameter(1.0, 1.0, 1.0)
    optimizer = ZeroRedundancyOptimizer([p], optim.SGD, grad_clipping=False, lr=0.5)
    scaler = GradScaler(init_scale=4.0)
    for overflows in (rank == ltd.world_size() - 1, False):
        optimizer.zero_grad()
        scaler.scale(p.sum() * (float("inf") if overflows else 1.0)).backward()
        ltd.reduce_gradients(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return p.tolist(), scaler.get_scale()


def resume(directory: str) -> bool:
    """Train, save, train on; go back, train on again: the same numbers."""
    p = parameter(1.0, 2.0, 3.0)
    optimizer = ZeroRedundancyOptimizer([p], optim.AdamW, lr=0.1)
    model = nn.ParameterList([p])

    def train() -> list[float]:
        for _ in range(2):
            optimizer.zero_grad()
            (p * p).sum().backward()
            optimizer.step()
        return p.tolist()  # type: ignore[no-any-return]

    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with ltd.Checkpointer(Path(directory, "saved"), own=["optimizer"], **objects) as checkpointer:
        train()
        checkpointer.save(2)
        wanted = train()
        train()
        assert checkpointer.restore() is not None
        return train() == wanted


def check(found: dict[str, Any], rank: int, count: int) -> None:
    for kind in KINDS:
        for clips in (True, False):
            losses, model = eager(kind, clips)
            got, parameters = found[f"{kind} {clips}"]
            assert got == pytest.approx(losses, rel=1e-4, abs=1e-6), kind
            torch.testing.assert_close(
                parameters, [p.detach() for p in model.parameters()], rtol=1e-4, atol=1e-5
            )
    assert losses[-1] < losses[0]
    assert found["shard"] == [rank, count] and found["own"] == [0, 1]
    whole = [15, 10, 2, 5, 1]
    assert found["sizes"] == [-(-n // count) for n in whole]
    assert found["one a vector"] == pytest.approx(eager("SGD")[0], rel=1e-4, abs=1e-6)
    small = 2**-9 if count == 2 else 0.0
    assert found["precise"] == [1.0, 1.0 + small]
    assert found["overflow"] == ([0.5, 0.5, 0.5], 2.0) and found["resumed"]
    assert found["norm over all"] == pytest.approx(
        (3 * sum((k + 1) ** 2 for k in range(count))) ** 0.5
    )


@pytest.mark.dist
@pytest.mark.timeout(180)
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    ltd.spawn(work, (str(tmp_path),), nprocs=2, start_method="forkserver")
    for rank in range(2):
        check(torch.load(tmp_path / f"{rank}.pt"), rank, 2)


def test_one_process(tmp_path: Path) -> None:
    work(0, str(tmp_path))
    check(torch.load(tmp_path / "0.pt"), 0, 1)


def test_groups_stay_in_agreement() -> None:
    first, second = parameter(1.0, 2.0), parameter(3.0)
    optimizer = ZeroRedundancyOptimizer([first], optim.SGD, grad_clipping=False, lr=1.0)
    optimizer.add_param_group({"params": [second], "lr": 2.0})
    inner = optimizer.base_optimizer
    assert (
        inner is not None and optimizer.param_groups[0]["momentum"] == 0
    )  # a default of the inner one
    assert [g["lr"] for g in inner.param_groups] == [1.0, 2.0]
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    schedule.step()
    optimizer.step()
    assert [g["lr"] for g in inner.param_groups] == [0.5, 1.0]
    assert first.tolist() == [-0.5, 0.5] and second.tolist() == [0.0]
    optimizer.zero_grad()
    assert first.grad is None and optimizer.grad_norm is None
    optimizer.step()  # nothing has a gradient
    assert first.tolist() == [-0.5, 0.5]


def test_shards_that_are_more_precise_than_the_parameters_are_saved() -> None:
    options = {"save_master_weights": True, "grad_clipping": False, "lr": 2.0**-10}
    p = parameter(1.0, 1.0, 1.0, dtype=torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer([p], optim.SGD, **options)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    state = ltc.to_cpu(optimizer.state_dict())
    assert state.keys() >= {
        "state",
        "param_groups",
        "base_state",
        "shape_info",
        "sharded_master_weights",
    }
    assert state["shape_info"] == {0: (3,)}
    precise = torch.full((3,), 1 - 3 * 2.0**-10)
    assert torch.equal(state["sharded_master_weights"][0], precise)
    other = parameter(5.0, 5.0, 5.0, dtype=torch.bfloat16)
    resumed = ZeroRedundancyOptimizer([other], optim.SGD, lazy_init=True, **options)
    resumed.load_state_dict(state)
    assert torch.equal(other.detach().cpu(), precise.bfloat16())
    other.grad = torch.ones_like(other)
    resumed.step()
    weights = ltc.to_cpu(resumed.state_dict()["sharded_master_weights"])
    assert torch.equal(weights[0], precise - 2.0**-10)


def test_what_cannot_be_is_refused() -> None:
    p = parameter(1.0)
    with pytest.raises(UnsupportedOptionError, match="summed up in their own dtype"):
        ZeroRedundancyOptimizer([p], optim.SGD, use_grad_acc_hook=True, lr=0.1)
    with pytest.raises(DeviceError, match="must be on one lazy device"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], optim.SGD, lr=0.1)
    later = ZeroRedundancyOptimizer(
        [p], optim.SGD, lazy_init=True, pin_layout=False, coalesce_cc=True, lr=0.1
    )
    for call in (later.step, later.state_dict):
        with pytest.raises(CollectiveError, match="not sharded yet"):
            call()
    later.zero_grad()
    later.sharding_groups = [[0]]
    later.init_zero()
    assert later.sharding_groups == [[0]]
    with pytest.raises(CollectiveError, match="sharded already"):
        later.sharding_groups = None
    with pytest.raises(CheckpointError, match="not the state of a ZeroRedundancyOptimizer"):
        later.load_state_dict(optim.SGD([p], lr=0.1).state_dict())
