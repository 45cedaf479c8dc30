"""`torch_xla.experimental.gru`: torch_xla's own GRU over `scan`; here PyTorch's, one op over a long sequence."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["GRU"]


class GRU(torch.nn.GRU):
    """`torch.nn.GRU`; `GRU(bidirectional=True)` makes a plain `torch.nn.GRU` with a warning, as torch_xla does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> torch.nn.GRU:  # type: ignore[misc]
        if kwargs.get("bidirectional"):
            warnings.warn(
                "Scan-based GRU only supports unidirectional GRU: this is a torch.nn.GRU.",
                stacklevel=2,
            )
            return torch.nn.GRU(*args, **kwargs)
        return super().__new__(cls)

    def forward(self, input: Any, hx: torch.Tensor | None = None) -> Any:
        assert not isinstance(input, PackedSequence), (
            "PackedSequence is not supported. Use a regular tensor instead."
        )
        return super().forward(input, hx)
