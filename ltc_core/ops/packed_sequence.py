"""Packed sequences: batches of sequences of several lengths without their padding.

Lengths and batch sizes live on the CPU on every device, so where each row goes is known while recording: packing is
one `index_select`, and nothing is synced. Called by `composites` as the ATen ops of these names.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ltc_core import errors, source

__all__ = ["pack_padded_sequence", "pack_padded_sequence_backward", "pad_packed_sequence"]

Tensor = torch.Tensor


def pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack the valid steps of a padded batch; `lengths` and the batch sizes live on the CPU, as on every device.

    Returns:
        (data [sum of lengths, ...], batch sizes [longest], int64 on the CPU).
    """
    num_steps = x.shape[1 if batch_first else 0]
    _check_lengths(lengths, x.shape[0 if batch_first else 1], num_steps)
    where, batch_sizes = _packed_positions(lengths, num_steps, batch_first)
    return x.flatten(0, 1).index_select(0, where.to(x.device)), batch_sizes


def _check_lengths(lengths: Tensor, batch: int, num_steps: int) -> None:
    """Raise the errors that eager raises."""
    values = lengths.tolist() if lengths.device.type == "cpu" else []
    if lengths.device.type != "cpu" or lengths.dim() != 1 or lengths.dtype is not torch.int64:
        wrong = "'lengths' argument should be a 1D CPU int64 tensor"
    elif len(values) != batch:
        wrong = f"Expected `len(lengths)` to be equal to batch_size, but got {len(values)} (batch_size={batch})"
    elif any(a < b for a, b in itertools.pairwise(values)):
        wrong = (
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to sidestep this requirement "
            "if you do not need ONNX exportability."
        )
    elif not values or values[-1] <= 0:
        wrong = "Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0"
    elif values[0] > num_steps:
        wrong = f"lengths go beyond the batch: {values[0]} of {num_steps} steps"
    else:
        return
    raise errors.op_error(
        RuntimeError(wrong),
        what="",
        got=f"lengths {values[:5]} on {lengths.device}, a batch of {batch} with {num_steps} steps",
        where=source.user_line(),
        next="pass one length a sample, on the CPU: lengths.cpu()",
    )


def _packed_positions(lengths: Tensor, num_steps: int, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Give, for each packed row, its row in the flattened padded batch; and the batch size of each step."""
    is_there = torch.arange(int(lengths[0]), device="cpu")[:, None] < lengths
    step, b = is_there.nonzero(as_tuple=True)
    rows = b * num_steps + step if batch_first else step * len(lengths) + b
    return rows, is_there.sum(1)


def _lengths_of(batch_sizes: Tensor) -> Tensor:
    """The lengths of packed sequences, the longest first."""
    return (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]), device="cpu")).sum(0)


def pack_padded_sequence_backward(
    grad: Tensor, input_size: Any, batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    """Gradient of `pack_padded_sequence`: the packed rows back in their places, zeros elsewhere."""
    num_steps = input_size[1 if batch_first else 0]
    return _padded(grad, batch_sizes, num_steps, batch_first, 0)[0]


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Pad a packed batch; gives (padded, lengths), the lengths on the CPU."""
    num_steps = max(len(batch_sizes), total_length)
    return _padded(data, batch_sizes, num_steps, batch_first, padding_value)


def _padded(
    data: Tensor, batch_sizes: Tensor, num_steps: int, batch_first: bool, fill: float
) -> tuple[Tensor, Tensor]:
    """A padded batch, and its lengths. In memory the steps come first, as in eager."""
    lengths = _lengths_of(batch_sizes)
    where, _ = _packed_positions(lengths, num_steps, batch_first=False)
    flat = data.new_full((num_steps * len(lengths), *data.shape[1:]), fill)
    flat = flat.index_copy(0, where.to(data.device), data)
    padded = flat.view(num_steps, len(lengths), *data.shape[1:])
    return (padded.transpose(0, 1) if batch_first else padded), lengths
