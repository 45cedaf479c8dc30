"""How long a measured choice lasts: at first for few steps, and ever longer while it stays the same.

Something else may have used the cores while it was measured for the first time. Used by `placement` and `habit`.
"""

from __future__ import annotations

__all__ = ["Lasting"]

_FIRST_STEPS, _MOST_STEPS = 60, 2000
_GROWTH = 4
_NOTHING = object()


class Lasting:
    """The time until one choice is measured again.

    Attributes:
        steps: until then.
    """

    __slots__ = ("_found", "steps")

    def __init__(self) -> None:
        self._found: object = _NOTHING
        self.steps = _FIRST_STEPS

    def note(self, found: object) -> None:
        """What was quickest was measured."""
        is_same = found is self._found
        self.steps = min(_GROWTH * self.steps, _MOST_STEPS) if is_same else _FIRST_STEPS
        self._found = found

    def rest(self) -> None:
        """It is not measured for as long as possible."""
        self.steps = _MOST_STEPS
