"""The programs of one graph: each is made for some values of the scalars that are constants of it.

A scalar that has changed between two runs becomes an input of later programs, if its op has a rule for that
(`scalar_inputs`). Used by each executor that compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from ltc_core.program.partitioned import PartitionedProgram
from ltc_core.program.scalar_inputs import same_scalar

__all__ = ["Specialized"]

Variant = TypeVar("Variant")


class Specialized(Generic[Variant]):
    """Programs by scalars, and by what else they were made for (`Variant`, such as numeric flags).

    Args:
        most: number of programs that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._programs: list[tuple[Variant, PartitionedProgram]] = []
        self._first: list[Any] | None = None
        self._varied: set[int] = set()

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[PartitionedProgram]:
        return (program for _, program in self._programs)

    @property
    def newest(self) -> PartitionedProgram:
        return self._programs[-1][1]

    @property
    def is_full(self) -> bool:
        return len(self._programs) >= self._most

    @property
    def varied(self) -> frozenset[int]:
        """Positions of the scalars that have changed between runs."""
        return frozenset(self._varied)

    def note(self, scalars: Sequence[Any]) -> None:
        """Note which scalars differ from those of the first run."""
        if self._first is None:
            self._first = list(scalars)
            return
        pairs = zip(self._first, scalars, strict=True)
        self._varied.update(k for k, (a, b) in enumerate(pairs) if not same_scalar(a, b))

    def find(self, scalars: Sequence[Any], variant: Variant) -> PartitionedProgram | None:
        """The program for a run; None if there is none."""
        fits = (p for made_for, p in self._programs if made_for == variant and p.fits(scalars))
        return next(fits, None)

    def add(self, program: PartitionedProgram, variant: Variant) -> None:
        """Keep a program; the oldest one goes if there are too many."""
        if self.is_full:
            del self._programs[0]
        self._programs.append((variant, program))

    def clear(self) -> None:
        self._programs.clear()
