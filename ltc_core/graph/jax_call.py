"""A function of JAX as one op of a graph: `CALL`.

The op names a function by a hash of what it computes, so that equal functions are equal nodes in every process.
`executors.jax` traces the function into its program; the kernel of the CPU runs it with JAX on the host. Functions are
added by `executors.jax.functions`, which needs JAX; this file does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["CALL", "FUNCTIONS", "Function"]

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function of JAX for operands of given shapes and dtypes.

    Attributes:
        trace: takes and returns arrays of JAX.
        run: takes and returns tensors of the CPU.
        results: size and dtype of each result.
    """

    trace: Callable[..., list[Any]]
    run: Callable[[Sequence[Tensor]], list[Tensor]]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]


FUNCTIONS: dict[str, Function] = {}


def _shapes(operands: Sequence[Tensor], function: str) -> list[Tensor]:
    found = FUNCTIONS[function].results
    return [torch.empty(size, dtype=dtype, device="meta") for size, dtype in found]


def _run(operands: Sequence[Tensor], function: str) -> list[Tensor]:
    return FUNCTIONS[function].run(operands)


_library: Any = torch.library.Library("ltc_jax", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("call(Tensor[] operands, str function) -> Tensor[]")
_library.impl("call", _shapes, "Meta")
_library.impl("call", _run, "CPU")
_library.impl("call", torch.library.fallthrough_kernel, "AutogradPrivateUse1")

CALL: torch._ops.OpOverload = torch.ops.ltc_jax.call.default
