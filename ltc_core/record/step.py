"""A step of the trie of recorded ops: a node, where it leads to, and the programs of what ends there."""

from __future__ import annotations

from typing import Any

from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.record.dynamic_shapes import Dynamic, Pattern

__all__ = ["Step"]


class Step:
    """One recorded op in the trie.

    `inputs` are the values first read here: (number, meta). `programs` caches the programs of cuts that end here, and
    `known` is the one of them that C++ ran last (`DeviceContext._cut_known`). `probes` are the programs of single
    values, by number (`runtime.probe`); None for one that can have none.
    Of a dynamic step (`record.dynamic_shapes`), the metas of the node and of the inputs are those of one call.
    """

    __slots__ = (
        "children", "dynamic", "end", "expected", "inputs", "known", "lenses", "next", "next_key", "node",
        "num_scalars", "parent", "patterns", "probes", "programs",
    )  # fmt: skip

    def __init__(
        self, parent: Step | None, node: Node | None, inputs: tuple[tuple[int, TensorMeta], ...]
    ) -> None:
        self.parent = parent
        self.node = node
        self.inputs = inputs
        self.children: dict[tuple[Any, ...], Step] | None = (
            None  # the other ones than `next`; most steps have none
        )
        self.next_key: tuple[Any, ...] | None = None
        self.next: Step | None = None
        self.programs: dict[Any, Any] | None = None
        self.known: Any = None
        self.probes: dict[int, Any] | None = None
        self.lenses: tuple[Any, ...] | None = None
        self.expected: Any = None  # `Expected` of `csrc/expected.h`
        self.end = 0  # count of the trace's values after this step
        self.num_scalars = 0  # count of its scalars after this step
        self.dynamic: Dynamic | None = None  # where calls of any size take this step
        self.patterns: list[tuple[Pattern, Step]] | None = (
            None  # the children for calls of any size
        )

    def child(self, key: tuple[Any, ...]) -> Step | None:
        """The known next step with this signature, or None."""
        if self.next_key == key:
            return self.next
        return self.children.get(key) if self.children is not None else None

    def all_children(self) -> list[tuple[tuple[Any, ...], Step]]:
        """Each next step with its key or pattern."""
        found = list(self.children.items()) if self.children is not None else []
        if self.next is not None and self.next_key is not None:
            found.append((self.next_key, self.next))
        return found

    def drop(self, step: Step) -> None:
        """Forget that a step may follow."""
        if self.next is step:
            self.next_key = self.next = None
        if self.children is not None:
            self.children = {
                key: child for key, child in self.children.items() if child is not step
            }

    def forget(self) -> None:
        """Forget what follows, and the programs of what ends here. Whoever holds the step still knows its path."""
        self.children = self.next_key = self.next = self.patterns = None
        self.programs = self.known = self.probes = None

    @property
    def outs(self) -> tuple[TensorMeta | None, ...]:
        """Metas of the results of the call that was recorded last."""
        if self.dynamic is not None:
            return self.dynamic.now.outs
        return self.node.outs  # type: ignore[union-attr]

    def prefer(self, key: tuple[Any, ...], step: Step) -> None:
        """Make `step` the next step that is tried first."""
        if self.next is not None and self.next is not step and self.next_key is not None:
            if self.children is None:
                self.children = {}
            self.children[self.next_key] = self.next
        self.next_key = None  # an interrupt here must not leave a key beside the wrong step
        self.next = step
        self.next_key = key
