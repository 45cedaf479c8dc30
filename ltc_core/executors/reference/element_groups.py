"""Groups of foreach ops that run together on a few tensors at a time: in the order of memory, not in that of the ops.

An optimizer is a row of ops, each of which goes through the lists of all parameters, gradients and states. On the CPU
PyTorch runs such an op tensor by tensor. If the lists are larger than the cache, each op reads them from memory again.
A group runs all its ops on the first tensors of the lists, then on the next ones: the same kernels on the same tensors,
so the same numbers. What an op makes for the next one dies within its chunk.
Found by `find` when a replay is built, run by `csrc/replay_run.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ltc_core.graph.ir import Node, Ref, Scalar, Write
from ltc_core.program.plan import MemoryPlan

__all__ = ["CHUNK_BYTES", "ElementGroup", "find"]

# Bytes of one list that a chunk has at least. A chunk costs a call of each op, 1 us. On two cores with 2 MiB of L2,
# 0.5 to 2 MiB are the quickest for AdamW with float32.
CHUNK_BYTES = 1 << 19
_FEWEST_OPS = 2


@dataclass(frozen=True)
class ElementGroup:
    """Nodes `first` to `last`, the latter not included.

    Attributes:
        ends: for each chunk, one more than its last position in the lists.
        frees: for each node, (position in the lists, value) of those that die after it, in order. A value that belongs
            to no position dies with the last one.
    """

    first: int
    last: int
    ends: tuple[int, ...]
    frees: tuple[tuple[tuple[int, int], ...], ...]


def find(
    nodes: Sequence[Node], memory: MemoryPlan, is_native: Sequence[bool]
) -> list[ElementGroup]:
    """The groups of a graph.

    Args:
        is_native: for each node, whether it is a call of a PyTorch kernel.
    """
    found = []
    at = 0
    while at < len(nodes):
        group = _Group(memory)
        end = at
        while end < len(nodes) and is_native[end] and group.takes(nodes[end]):
            end += 1
        ends = _chunks(nodes[at]) if end - at >= _FEWEST_OPS else ()
        if len(ends) > 1:
            frees = tuple(group.frees(memory.frees[i]) for i in range(at, end))
            found.append(ElementGroup(at, end, ends, frees))
        at = max(end, at + 1)
    return found


def _chunks(node: Node) -> tuple[int, ...]:
    """Ends of the chunks of the lists of an op, by the sizes of its results."""
    ends, held = [], 0
    for k, meta in enumerate(node.outs):
        held += 0 if meta is None else meta.nbytes
        if held >= CHUNK_BYTES:
            ends.append(k + 1)
            held = 0
    if held and ends and held < CHUNK_BYTES // 2:  # too few for a chunk of their own
        ends.pop()
    if held:
        ends.append(len(node.outs))
    return tuple(ends)


class _Group:
    """What is known of a group while nodes are added: which memory belongs to which position of the lists.

    The order of two ops changes only for different positions, so a piece of memory may belong to one position only.
    """

    def __init__(self, memory: MemoryPlan) -> None:
        self._roots = memory.roots
        self._length = 0
        self._position: dict[int, int] = {}  # root -> position
        self._whole: set[int] = set()  # roots of operands that all positions read

    def takes(self, node: Node) -> bool:
        """Add a node; False, and nothing is added, if it does not go through lists position by position."""
        op = node.op
        if not isinstance(op, torch._ops.OpOverload) or not op._schema.name.startswith(
            "aten::_foreach_"
        ):
            return False
        if node.kwargs or node.uses_default_dtype or not node.outs or None in node.outs:
            return False
        length = self._length or len(node.outs)
        if len(node.outs) != length or not _is_of_positions(node, length):
            return False
        placed: dict[int, int] = {}
        whole = set()
        for item in node.args:
            if type(item) not in (list, tuple):
                if type(item) is Ref:
                    whole.add(self._roots[item])
                continue
            if len(item) != length:
                return False
            for k, part in enumerate(item):
                if type(part) is Scalar:
                    continue
                if type(part) is not Ref and (type(part) is not Write or part.lens):
                    return False
                value = node.writes[part.base] if isinstance(part, Write) else int(part)
                if placed.setdefault(self._roots[value], k) != k:
                    return False
        for k in range(length):
            if placed.setdefault(self._roots[node.first + k], k) != k:
                return False
        known = self._position
        if any(known.get(root, k) != k or root in self._whole for root, k in placed.items()):
            return False
        if any(root in known or root in placed for root in whole):
            return False
        self._length = length
        known.update(placed)
        self._whole |= whole
        return True

    def frees(self, values: Sequence[int]) -> tuple[tuple[int, int], ...]:
        last = self._length - 1
        return tuple(sorted((self._position.get(self._roots[v], last), v) for v in values))


def _is_of_positions(node: Node, length: int) -> bool:
    """Whether the results are those of the positions in order: all new ones, or all in place."""
    if node.writes:
        first = node.args[0]
        return (
            len(node.writes) == length
            and isinstance(first, list | tuple)
            and all(type(part) is Write and part.base == k for k, part in enumerate(first))
        )
    is_list = isinstance(node.result, list | tuple)
    return is_list and list(node.result) == list(range(length))
