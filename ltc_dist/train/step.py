"""The end of a training step in a job: gradients are averaged over the processes, then the optimizer steps.

All of it is recorded: backward, reduction and update are one graph. Calls `collectives.ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import ltc_core as ltc
from ltc_core.errors import CollectiveError
from ltc_core.settings import settings
from ltc_dist.collectives.ops import all_reduce
from ltc_dist.collectives.process_group import Groups, group_of
from ltc_dist.fully_sharded.norm import clip_by_norm
from ltc_dist.fully_sharded.shards import is_shard

__all__ = ["clip_grad_norm_", "optimizer_step", "reduce_gradients"]


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Average every gradient over the processes, then step.

    Args:
        barrier: end the step here (`mark_step`). Under a loader of ours the next batch does.
        optimizer_args: arguments for `optimizer.step`.
        groups: lists of ranks; the mean is that of this process's group.

    Returns:
        What `optimizer.step` returned.

    Cost: recorded. With one process, that of `optimizer.step()`.

    Source: `torch_xla.core.xla_model.optimizer_step`, which divides by all processes even with `groups`.
    """
    reduce_gradients(optimizer, groups)
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        ltc.mark_step()
    return result


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Average every gradient of the optimizer's parameters over the processes, in place.

    A second call changes nothing, nor does any with LTC_SPMD. Parameters without a gradient are skipped; they must be
    the same ones in all processes.

    Raises:
        CollectiveError: for the parameters of a FullyShardedDataParallel. When the graph runs, for processes whose
            gradients differ in number or size.
    """
    if settings.spmd:  # one program computes the gradients of all processes
        return
    group = group_of(groups)
    if len(group.members) == 1:
        return
    params = [p for row in optimizer.param_groups for p in row["params"]]
    if any(map(is_shard, params)):
        raise CollectiveError(
            "the gradients of divided parameters are averaged already",
            got="the parameters of a FullyShardedDataParallel",
            next="call the optimizer's own step()",
        )
    present = [k for k, p in enumerate(params) if p.grad is not None]
    label = f"the gradients of parameters {_ranges(present)} of {len(params)}"
    gradients = [params[k].grad for k in present]
    all_reduce("sum", gradients, 1 / len(group.members), groups, label=label)


def _ranges(numbers: Iterable[int]) -> str:
    """'0-3, 5' for 0, 1, 2, 3, 5."""
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [n for _, n in run]
        runs.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    return ", ".join(runs) or "(none)"


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients down so that their total norm is at most `max_norm`; return the norm before.

    Call it between `reduce_gradients` and the optimizer's own step. The shards of a FullyShardedDataParallel count with
    those of the other processes.

    Cost: recorded; it never waits.

    Source: `torch.nn.utils.clip_grad_norm_`.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    shards: list[Any] = [p for p in given if is_shard(p) and p.grad is not None]
    if shards:
        return clip_by_norm(given, float(max_norm), float(norm_type), shards[0]._groups)
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite=False)
