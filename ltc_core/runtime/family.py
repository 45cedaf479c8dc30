"""What programs of one structure share, whatever their sizes: the measurements that say where they run, and if early.

A common size gets a graph of its own beside the one of many sizes, and where sizes depend on the data, as those of a
mixture of experts, there are dozens. Each of them comes too seldom to be measured by itself: from one of its launches
to the next many steps pass. What is quickest on busy cores need not be so on quiet ones: each has measurements of its
own (`executors.spinning`). Made by `program_cache`, used by `run_policy` and `early_run`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from ltc_core.executors import spinning
from ltc_core.graph.ir import Graph, references
from ltc_core.program.program import Tier
from ltc_core.runtime.habit import Choice
from ltc_core.runtime.placement import Places

__all__ = ["Families", "Family"]


class _Measured:
    """What was measured of a family, on busy cores or on quiet ones."""

    __slots__ = ("choice", "places", "replay")

    def __init__(self) -> None:
        self.places: dict[tuple[bool, Tier], Places] = {}
        self.replay: list[Places | None] = [None, None]
        self.choice = Choice()


class Family:
    """The programs of one structure and about one size. Its attributes are those of the cores as they are now."""

    __slots__ = ("__weakref__", "_busy", "_quiet")

    def __init__(self) -> None:
        self._quiet, self._busy = _Measured(), _Measured()

    @property
    def _now(self) -> _Measured:
        return self._busy if spinning.is_brief() else self._quiet

    @property
    def places(self) -> dict[tuple[bool, Tier], Places]:
        """By the rhythm of steps, whether they are waited for, and the tier."""
        return self._now.places

    @property
    def replay(self) -> list[Places | None]:
        """Those of replay, by the rhythm; None before a step of it."""
        return self._now.replay

    @property
    def choice(self) -> Choice:
        """Whether they run early."""
        return self._now.choice

    def places_of(self, is_waited: bool, tier: Tier) -> Places:
        key = is_waited, tier
        found = self.places.get(key)
        if found is None:
            found = self.places[key] = Places(may_overlap=not is_waited)
            if tier is Tier.REPLAY:
                self.replay[is_waited] = found
        return found


class Families:
    """Those of the programs of one device."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, Family] = weakref.WeakValueDictionary()

    def of(self, graph: Graph) -> Family:
        """That of a graph. Programs of half the size, and of twice, have another one. Cost: 0.2 us a node."""
        size = sum(meta.nbytes for node in graph.nodes for meta in node.outs if meta is not None)
        ops = tuple((node.op, references(node)) for node in graph.nodes)
        key = hash((ops, graph.outputs)), size.bit_length()
        family = self._known.get(key)
        if family is None:
            family = self._known[key] = Family()
        return family
