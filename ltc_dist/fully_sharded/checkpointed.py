"""The state of divided parameters as `Checkpointer` saves it: with what is needed to cut the shards anew.

`checkpointed` wraps a model whose parameters are divided, or an optimizer of such parameters. The state has the keys of
a ZeroRedundancyOptimizer's, so that `checkpoint.reshard` cuts all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ltc_core.errors import CheckpointError, listed
from ltc_core.source import user_line
from ltc_dist.fully_sharded.shards import is_shard
from ltc_dist.fully_sharded.wrapper import FullyShardedDataParallel

__all__ = ["Divided", "checkpointed"]

_SHARD = "shard"


class Divided:
    """A model or an optimizer whose state each process has a part of.

    Args:
        shards: the shards of its parameters, by name or number.
    """

    def __init__(self, shards: Mapping[Any, Any]) -> None:
        self._shards = shards

    def _described(self, states: dict[Any, Any]) -> dict[str, Any]:
        """A state dict, given the state of each shard."""
        first = next(iter(self._shards.values()))
        return {
            "base_state": states,
            "param_groups": [],
            "shape_info": {key: tuple(p._orig_size) for key, p in self._shards.items()},
            "layouts": {key: p._layout.options for key, p in self._shards.items()},
            "shard": [first._unit_rank, first._layout.count],
        }

    def check_state_dict(self, state: Mapping[str, Any], name: str) -> None:
        """Check that a state can be loaded here.

        Args:
            name: of the state, for messages.

        Raises:
            CheckpointError: it is not one of divided parameters, of another shard, or of other parameters.
        """
        mine = self._described({})
        if "layouts" not in state:
            self._fail(
                f"{name} is not the state of divided parameters",
                f"it has {listed(sorted(map(str, state)))}",
            )
        for key in ("shard", "shape_info", "layouts"):
            theirs, here = _plain(state[key]), _plain(mine[key])
            if theirs != here:
                self._fail(f"{name} is divided otherwise", f"{key} {theirs}; here {here}")

    @staticmethod
    def _fail(what: str, got: str) -> None:
        raise CheckpointError(
            what,
            got=got,
            where=user_line(),
            next="wrap the modules that were wrapped when it was saved, with the same options",
        )


class _Model(Divided):
    def __init__(self, model: nn.Module) -> None:
        super().__init__({n: p for n, p in model.named_parameters() if is_shard(p)})
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        state = self._model.state_dict()
        found = self._described({name: {_SHARD: state.pop(name)} for name in self._shards})
        return {**found, "rest": dict(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        shards = {name: row[_SHARD] for name, row in state["base_state"].items()}
        self._model.load_state_dict({**state["rest"], **shards})


class _Optimizer(Divided):
    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[Any]) -> None:
        super().__init__(dict(enumerate(shards)))
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        return {**self._described(state["state"]), "param_groups": state["param_groups"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(
            {"state": state["base_state"], "param_groups": state["param_groups"]}
        )


def checkpointed(held: Any, name: str) -> Any:
    """What is to be saved in the place of an object: itself, unless it has divided parameters.

    Args:
        name: of the object, for messages.

    Raises:
        CheckpointError: an optimizer has divided parameters and others.
    """
    if isinstance(held, nn.Module):
        is_divided = any(isinstance(m, FullyShardedDataParallel) for m in held.modules())
        return _Model(held) if is_divided and any(True for _ in held.parameters()) else held
    if isinstance(held, torch.optim.Optimizer):
        params = [p for group in held.param_groups for p in group["params"]]
        are_shards = [is_shard(p) for p in params]
        if any(are_shards) and not all(are_shards):
            raise CheckpointError(
                f"{name!r} cannot be saved",
                got=f"an optimizer of {sum(are_shards)} divided parameters and {are_shards.count(False)} others",
                where=user_line(),
                next="make an optimizer for each kind",
            )
        return _Optimizer(held, params) if params and all(are_shards) else held
    return held


def _plain(value: Any) -> Any:
    """A value whose shapes and rows are lists."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
