"""Ops that are one kernel on the CPU and several ops on a device that PyTorch does not know.

`register_cpu_kernels`, called once at import, has such an op reach the recorder whole: with a kernel of the device,
PyTorch does not take the op apart. Executors run it as eager does on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["WHOLE", "register_cpu_kernels"]

# Those with both a kernel for the CPU and one made of other ops.
WHOLE = ("mish_backward", "native_channel_shuffle", "silu_backward")
_libraries: list[Any] = []


def register_cpu_kernels() -> None:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in WHOLE:
        library.impl(name, _unreached, "PrivateUse1")
    _libraries.append(library)


def _unreached(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a tensor of the device that is no LazyTensor")
