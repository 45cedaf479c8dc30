"""Whether the graphs of this process come again, or each step is another one, as with trees or searches.

What is prepared for later runs of a graph costs more than its first run: where graphs do not come again, it waits for
the second one. Told by `runtime.program_cache`; asked by `debug.explain`, the launcher and `ReferenceProgram`.
"""

from __future__ import annotations

__all__ = ["novelty"]

_MANY = 16  # graphs in a row, each of them new
_NO_HOPE = 128  # such graphs, after which it is not likely that one of them comes again


class _Novelty:
    """One for the process."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note_new(self) -> None:
        self._in_a_row += 1

    def note_again(self) -> None:
        self._in_a_row = 0

    @property
    def is_rule(self) -> bool:
        """Whether the last graphs were all new."""
        return self._in_a_row >= _MANY

    @property
    def is_lasting(self) -> bool:
        """Whether that is so for long: what is known of them is hardly of use."""
        return self._in_a_row >= _NO_HOPE


novelty = _Novelty()
