"""`torch_xla.distributed.fsdp.xla_flatten_params_wrapper`: what stands between the wrapper and the module there.

Parameters are flattened by `XlaFullyShardedDataParallel(flatten_parameters=True)`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["XlaFlattenParamsWrapper"]


class XlaFlattenParamsWrapper(nn.Module):
    """Has the attributes and the forward of a module. It is made when it is asked for, and is part of no other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fpw_module = module

    @property
    def module(self) -> nn.Module:
        return self._fpw_module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fpw_module":
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: int) -> nn.Module:
        return self._fpw_module.__getitem__(key)  # type: ignore[operator, no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fpw_module(*args, **kwargs)
