"""`xf`: `torch_xla.core.functions`, collectives that gradients flow through.

The gradients are those of one loss that all processes compute alike: each process takes its part of its own gradient,
and backward communicates nothing. `ltc_dist.collectives.functions` has the gradients of a loss that is a sum over the
processes.
"""

from __future__ import annotations

from typing import Any

import torch

import ltc_dist as ltd
from ltc_core.errors import CollectiveError
from ltc_dist import SyncBatchNorm
from ltc_dist.collectives.functions import all_to_all, reduce_scatter
from ltc_dist.collectives.process_group import Groups, group_of

__all__ = [
    "SyncBatchNorm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "distributed_mm",
    "nms",
    "reduce_scatter",
]


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Groups = None
) -> torch.Tensor:
    """Reduce over the processes.

    Raises:
        CollectiveError: the value requires a gradient, which only 'sum', 'mul', 'min' and 'max' have.
    """
    if value.requires_grad and reduce_type in ("and", "or"):
        raise CollectiveError(
            f"all_reduce has no gradient for the reduction {reduce_type!r}",
            got="a tensor that requires one; expected sum, mul, min or max",
            next="detach the value, or use xm.all_reduce",
        )
    return _AllReduce.apply(value, reduce_type, scale, groups)  # type: ignore[no-any-return, no-untyped-call]


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the values of all processes along `dim`."""
    return _AllGather.apply(value, dim)  # type: ignore[no-any-return, no-untyped-call]


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """Multiply a weight that is sharded over the processes by this process's input.

    Args:
        w: this process's shard, [N, K / world size].
        x: [K, M].
        split: number of parts of `M`; they are gathered one after the other, to save memory.

    Returns:
        [N, M].

    Raises:
        CollectiveError: the shapes do not fit.

    Cost: for each part an all-gather of `x` and a reduce-scatter of the product.
    """
    size, columns = w.size(1), x.size(1)
    if x.size(0) != size * ltd.world_size() or columns % split:
        raise CollectiveError(
            "distributed_mm cannot multiply these",
            got=f"a shard of {list(w.shape)}, an input of {list(x.shape)} in {split} parts, "
            f"{ltd.world_size()} processes",
            next="x has the rows of all shards' columns together, and columns that the parts divide",
        )
    here = ltd.get_ordinal()
    products = []
    for part in x.chunk(split, 1):
        of_all = all_gather(part, 1)
        product = all_reduce("sum", w @ of_all.narrow(0, here * size, size))
        products.append(product.narrow(1, here * part.size(1), part.size(1)))
    return torch.cat(products, 1)


def nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    score_threshold: float | torch.Tensor,
    iou_threshold: float | torch.Tensor,
    output_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-maximum suppression: choose boxes by score that do not overlap a box chosen before.

    Args:
        boxes: [boxes, 4], two opposite corners each.
        scores: [boxes].
        score_threshold: boxes with a lower score are not chosen.
        iou_threshold: two boxes overlap if their intersection over union is above.
        output_size: maximum number of indices returned.

    Returns:
        The indices of the boxes chosen, then those of the others, the highest scores first; and how many were chosen.

    Cost: waits for the boxes, and chooses on the CPU.

    Source: `torch_xla.core.functions.nms`.
    """
    corners = boxes.detach().cpu()
    low = torch.minimum(corners[:, :2], corners[:, 2:])
    high = torch.maximum(corners[:, :2], corners[:, 2:])
    areas = (high - low).prod(1)
    points = scores.detach().cpu()
    least, most = float(score_threshold), float(iou_threshold)
    chosen: list[int] = []
    others: list[int] = []
    for box in points.argsort(descending=True, stable=True).tolist():
        sides = torch.minimum(high[box], high[chosen]) - torch.maximum(low[box], low[chosen])
        shared = sides.clamp(min=0).prod(1)
        overlaps = shared / (areas[box] + areas[chosen] - shared) > most
        fits = points[box] > least and not overlaps.any()
        (chosen if fits else others).append(box)
    indices = torch.tensor((chosen + others)[:output_size], dtype=torch.int32)
    count = torch.tensor(min(len(chosen), output_size), dtype=torch.int32)
    return indices.to(boxes.device), count.to(boxes.device)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, reduce_type: str, scale: float, groups: Groups
    ) -> torch.Tensor:
        result = ltd.all_reduce(reduce_type, value, scale, groups)
        ctx.rest = reduce_type, scale
        if reduce_type != "sum":
            ctx.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduce_type, scale = ctx.rest
        if reduce_type == "sum":
            return grad * scale, None, None, None
        value, result = ctx.saved_tensors
        zero = torch.zeros_like(grad)
        if reduce_type == "mul":
            share = torch.where(value != 0, result / value, zero)
            return grad * share, None, None, None
        return torch.where(value * scale == result, grad * scale, zero), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.shape, ctx.dim = value.shape, dim
        return ltd.all_gather(value, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group = group_of()
        part = grad.chunk(len(group.members), ctx.dim)[group.position]
        return part.reshape(ctx.shape), None
