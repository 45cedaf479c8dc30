"""What `FullyShardedDataParallel` and its checkpoints refuse, and what they say."""

import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ltc_dist as ltd
from ltc_core.errors import CheckpointError
from ltc_dist import FullyShardedDataParallel as Sharded
from ltc_dist.fully_sharded import consolidate
from ltc_dist.fully_sharded.consolidate import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)
from ltc_dist.fully_sharded.divided_parameter import DividedParameterError
from ltc_dist.fully_sharded.wrapper import FullyShardedError

pytestmark = pytest.mark.usefixtures("marked_steps")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def tied_to_a_unit_inside() -> Any:
    model = net()
    model[2].weight = nn.Parameter(torch.ones(3, 5))
    model[0].weight = nn.Parameter(model[2].weight.t().contiguous())
    model.register_parameter("again", model[0].weight)
    model[0] = Sharded(model[0])
    return Sharded(model)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Sharded(Sharded(net())), RuntimeError, "already wrapped"),
        (lambda: Sharded(nn.ModuleList([net()])), RuntimeError, "ModuleList has none"),
        (lambda: Sharded(net(), compute_dtype=torch.int8), ValueError, "compute_dtype must be one of"),
        (lambda: Sharded(net(), no_such_option=1), TypeError, "unexpected keyword argument 'no_such_option'"),
        (lambda: Sharded(nn.ParameterList([torch.ones(2)])), RuntimeError, "forward"),
        (tied_to_a_unit_inside, FullyShardedError, "again is divided already"),
        (
            lambda: Sharded(nn.Sequential(Sharded(net())), auto_wrap_policy=lambda *_: True),
            ValueError,
            "Expected 0 to NOT be FullyShardedDataParallel",
        ),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_wrapped(
    make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_integers_are_not_divided() -> None:
    model = net()
    model.register_parameter("numbers", nn.Parameter(torch.ones(2, dtype=torch.int64), False))
    with pytest.raises(FullyShardedError, match="numbers cannot be divided"):
        Sharded(model)


def test_a_whole_parameter_outside_of_forward() -> None:
    model = Sharded(net())
    weight = model[0].weight
    assert weight.shape == (5, 3) and weight.requires_grad and isinstance(weight, nn.Parameter)
    assert "0.weight" not in dict(model.named_parameters()) and "bias=True" in str(model)
    x = torch.ones(1, 3, device=ltd.lazy_device())
    uses: list[Callable[[], Any]] = [
        lambda: weight + 1,
        lambda: weight.data + 1,
        lambda: nn.init.zeros_(weight),
        lambda: nn.functional.linear(x, weight),
        lambda: x.copy_(weight),
        lambda: x.add_(1).addmm_(x, weight),
    ]
    for use in uses:
        with pytest.raises(DividedParameterError, match="weight is divided over 1 processes"):
            use()
    model(torch.ones(1, 3, device=ltd.lazy_device())).sum().backward()
    assert repr(model[0].weight) == repr(weight)
    inner = Sharded(nn.Sequential(Sharded(net())))
    inner(torch.ones(1, 3, device=ltd.lazy_device()))
    with (
        pytest.raises(FullyShardedError, match="no_sync was called on an inner unit"),
        inner[0].no_sync(),
    ):
        pass


def test_a_module_on_the_meta_device_without_values() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

        def forward(self) -> torch.Tensor:
            return self.weight

    with pytest.raises(RuntimeError, match="Bare is on the meta device"):
        Sharded(Bare())

    def init(module: Any) -> None:
        module.weight = nn.Parameter(torch.full((2,), 3.0))

    assert Sharded(Bare(), param_init_fn=init)().tolist() == [3, 3]


def test_checkpoints_of_other_wrappings(tmp_path: Path) -> None:
    def held(model: Any) -> dict[str, Any]:
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def restore(model: Any) -> Any:
        with ltd.Checkpointer(tmp_path, **held(model)) as checkpointer:
            return checkpointer.restore()

    saved = Sharded(net())
    objects = held(saved)
    saved(torch.ones(1, 3, device=ltd.lazy_device())).sum().backward()
    objects["optimizer"].step()
    with ltd.Checkpointer(tmp_path, **objects) as checkpointer:
        checkpointer.save(1)

    with pytest.raises(
        CheckpointError, match="(?s)has model, optimizer otherwise.*each process.*one state for"
    ):
        restore(net().to(ltd.lazy_device()))
    with pytest.raises(CheckpointError, match="divided otherwise"):
        restore(Sharded(net(), flatten_parameters=True))
    again = Sharded(net())
    assert restore(again).step == 1
    for one, other in zip(again.parameters(), saved.parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_a_plain_checkpoint_is_not_for_divided_parameters(tmp_path: Path) -> None:
    with ltd.Checkpointer(tmp_path, model=net().to(ltd.lazy_device())) as checkpointer:
        checkpointer.save(1)
    with (
        ltd.Checkpointer(tmp_path, model=Sharded(net())) as checkpointer,
        pytest.raises(
            CheckpointError, match="(?s)has model otherwise.*for all.*here a state of each"
        ),
    ):
        checkpointer.restore()


def test_an_optimizer_of_both_kinds(tmp_path: Path) -> None:
    params = [*Sharded(net()).parameters(), *net().parameters()]
    with pytest.raises(CheckpointError, match="4 divided parameters and 4 others"):
        ltd.Checkpointer(tmp_path, optimizer=torch.optim.SGD(params, lr=0.1))


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="(?s)are not those of all processes.*no file"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "none"))
    model = Sharded(net())
    metadata = {**model.get_shard_metadata(), "world_size": 2}
    with pytest.raises(CheckpointError, match="(?s)1; expected 2, one of each process"):
        consolidate_sharded_state_dicts([model.state_dict()], metadata)
    ltd.save({"model": model.state_dict(), "shard_metadata": metadata}, tmp_path / "model-0.pth")
    with pytest.raises(CheckpointError, match="(?s)ranks 0 of 2"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "model"))


def test_files_that_another_process_writes_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Sharded(net())
    metadata = {**model.get_shard_metadata(), "world_size": 2}
    held = [
        {"model": model.state_dict(), "shard_metadata": {**metadata, "rank": rank}}
        for rank in range(2)
    ]
    monkeypatch.setattr(consolidate, "ranks", lambda: types.SimpleNamespace(world_size=2))
    monkeypatch.setattr(time, "sleep", lambda _: ltd.save(held[1], tmp_path / "model-1.pth"))
    ltd.save(held[0], tmp_path / "model-0.pth")
    found, _ = consolidate.consolidate_sharded_model_checkpoints(
        str(tmp_path / "model"), save_model=False
    )
    assert found.keys() == dict(net().named_parameters()).keys()


def test_a_shard_that_changes_between_forward_and_backward() -> None:
    model = Sharded(net(), disable_reshard_on_root=False)
    loss = model(torch.ones(1, 3, device=ltd.lazy_device())).sum()
    with torch.no_grad():
        model.sharded_params[2].add_(1)
    with pytest.raises(
        RuntimeError, match=r"the shard of 2\.weight is at version 1; expected version 0"
    ):
        loss.backward()


def test_set_gradient_divide_factors() -> None:
    gradients = []
    for factors in ((1, 1), (2, 1), (2, 2)):
        model = Sharded(net())
        model.set_gradient_divide_factors(*factors, recursive=True)
        model(torch.ones(1, 3, device=ltd.lazy_device())).sum().backward()
        gradients.append(model.sharded_params[0].grad.cpu())
    assert torch.equal(gradients[0], gradients[1] * 2) and torch.equal(
        gradients[0], gradients[2] * 4
    )
