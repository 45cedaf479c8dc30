"""PyTorch's settings of the process that decide which numbers compiled code computes.

Precision of float32 products, oneDNN, and deterministic algorithms: PyTorch's compiler reads them while it compiles.
They are part of a request and of its key (`request`), `build_artifact` sets them in the compiler's process, and
`tiers` runs a compiled program only under the flags for which it was compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["NumericFlags"]

_precision = torch._C._get_fp32_precision_getter
_set_precision = torch._C._set_fp32_precision_setter
_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("mkldnn", "cuda") for op in ("all", "matmul", "conv", "rnn")),
)


class NumericFlags(NamedTuple):
    """The settings at one time. Equal ones decide equal numbers.

    Attributes:
        deterministic: `torch.are_deterministic_algorithms_enabled()`.
        warns_only: `torch.is_deterministic_algorithms_warn_only_enabled()`.
        fills_uninitialized: `torch.utils.deterministic.fill_uninitialized_memory`.
        onednn: `torch.backends.mkldnn.enabled`.
        deterministic_onednn: `torch.backends.mkldnn.deterministic`.
        precisions: `fp32_precision` of each backend and kind of op, in the order of `_PRECISIONS`.
    """

    deterministic: bool
    warns_only: bool
    fills_uninitialized: bool
    onednn: bool
    deterministic_onednn: bool
    precisions: tuple[str, ...]

    @classmethod
    def now(cls) -> NumericFlags:
        """The settings of this process. Cost: 1.4 us."""
        c = torch._C
        return cls(
            c._get_deterministic_algorithms(),
            c._get_deterministic_algorithms_warn_only(),
            c._get_deterministic_fill_uninitialized_memory(),
            c._get_mkldnn_enabled(),
            c._get_mkldnn_deterministic(),
            tuple([_precision(backend, op) for backend, op in _PRECISIONS]),
        )

    def apply(self) -> None:
        """Set them in this process."""
        c = torch._C
        c._set_deterministic_algorithms(self.deterministic, warn_only=self.warns_only)
        c._set_deterministic_fill_uninitialized_memory(self.fills_uninitialized)
        c._set_mkldnn_enabled(self.onednn)
        c._set_mkldnn_deterministic(self.deterministic_onednn)
        for (backend, op), value in zip(_PRECISIONS, self.precisions, strict=True):
            _set_precision(backend, op, value)
