"""What `torch.jit.trace` writes down of the device's convolutions.

PyTorch's tracer leaves `convolution` out and writes down the `_convolution` that eager's kernel calls. A kernel of the
device calls no other op, so a result of a convolution would be a constant of the traced function.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["register_traced_convolution"]

aten = torch.ops.aten

_TRACER: Any = torch._C._parse_dispatch_key("Tracer")  # `torch._C.DispatchKey` has no name for it
_BELOW = torch._C._dispatch_keyset_full_after(_TRACER)
_libraries: list[torch.library.Library] = []


def _convolution(keys: Any, *args: Any) -> Any:
    if type(args[0]) is not LazyTensor:
        return aten.convolution.default.redispatch(keys & _BELOW, *args)
    flags = torch.backends.cudnn
    return aten._convolution.default(
        *args, flags.benchmark, flags.deterministic, flags.enabled, flags.allow_tf32
    )


def register_traced_convolution() -> None:
    """Serve `convolution` while a function is traced; nothing else comes here."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with (
        warnings.catch_warnings()
    ):  # PyTorch's kernel, which does nothing, is replaced for all devices
        warnings.simplefilter("ignore")
        library.impl("convolution", _convolution, "Tracer", with_keyset=True)
    _libraries.append(library)
