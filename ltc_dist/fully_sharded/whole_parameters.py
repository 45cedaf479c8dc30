"""`WholeParameters`: a module's parameters, where some are divided over the processes.

`module.weight` is the whole parameter while its unit has gathered it, else a `DividedParameter`. `parameters()` called
in forward finds the whole ones. Outside of it, `parameters()`, `state_dict()` and `to()` do not find them: the shard
stands in the wrapper. Filled by `wrapper`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["WholeParameters"]


class _Unit(Protocol):
    @property
    def is_in_forward(self) -> bool: ...
    def whole(self, index: int, name: str) -> torch.Tensor: ...


class WholeParameters(dict[str, Any]):
    """The `_parameters` of a module; outside of forward, its items are those that are not divided.

    Args:
        rest: the parameters that are not divided.
    """

    def __init__(self, rest: dict[str, Any]) -> None:
        super().__init__(rest)
        self._divided: dict[str, tuple[_Unit, int]] = {}

    def divide(self, name: str, unit: _Unit, index: int) -> None:
        """Have a unit asked for a parameter."""
        self.pop(name, None)
        self._divided[name] = unit, index

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._divided

    def __getitem__(self, name: str) -> Any:
        if name not in self._divided:
            return super().__getitem__(name)
        unit, index = self._divided[name]
        return unit.whole(index, name)

    def items(self) -> Any:
        whole = {
            name: unit.whole(index, name)
            for name, (unit, index) in self._divided.items()
            if unit.is_in_forward
        }
        return {**whole, **dict(super().items())}.items() if whole else super().items()
