"""`Transparent`: a module that stands for another one."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Transparent"]


class Transparent(nn.Module):
    """A module with the attributes and the items of the one that it holds.

    Attributes:
        HELD: name of the attribute that holds that one.
    """

    HELD: str

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.HELD:
                raise
            return getattr(getattr(self, self.HELD), name)

    def __getitem__(self, key: int) -> nn.Module:
        return getattr(self, self.HELD).__getitem__(key)  # type: ignore[no-any-return]
