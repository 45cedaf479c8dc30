"""A repair of PyTorch's compiler: it could not choose between masks of other dtypes, and wrote C++ that is none.

Where bools are computed for a part of the elements only, as in `mask[:2] = ids[:2] == 3`, it takes zeros for the
others. Its vectors of bools are masks of the dtype that was compared; the zeros are one of float32. Used by
`build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._inductor.codegen.cpp import CppVecOverrides
from torch._inductor.virtualized import V

__all__ = ["repaired"]

_masked = CppVecOverrides.masked


def repaired() -> Any:
    """A context in which both are masks of float32."""
    return mock.patch.object(CppVecOverrides, "masked", staticmethod(_masked_alike))


def _masked_alike(mask: Any, body: Callable[[], Any], other: Any) -> Any:
    def made() -> Any:
        result = body()
        if not result.is_vec or result.dtype is not torch.bool:
            return result
        kernel: Any = V.kernel
        alike = kernel.cse.generate(
            kernel.compute,
            f"{result}.template cast<float,{kernel._get_num_vectors(torch.float)}>()",
            dtype=torch.bool,
        )
        alike.is_vec = True
        return alike

    return _masked(mask, made, other)  # type: ignore[no-untyped-call]
