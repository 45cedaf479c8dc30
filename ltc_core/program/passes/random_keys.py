"""Random draws by key: a rewrite of the graph that gives each draw a key in place of its generator.

The state of a stream is that of a PyTorch CPU generator: 5 KB that only the host can advance. So the op `next_key` runs
on the host: it derives the key of a draw from the state, and advances the state. The device computes the random numbers
from the key (`random_draws`). Used by `executors.torch_xla.executor`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from ltc_core.graph.arguments import map_leaves
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, Write
from ltc_core.program.lowering import threefry
from ltc_core.program.lowering.random_draws import DRAWS

__all__ = ["NEXT_KEY", "is_draw", "of_host", "with_keys"]

_library: Any = torch.library.Library("ltc_random", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("next_key(Tensor(a!) state) -> Tensor")
NEXT_KEY = torch.ops.ltc_random.next_key.default
_KEY = TensorMeta.packed((2,), torch.int32)


def _next_key(state: torch.Tensor) -> torch.Tensor:
    key, after = threefry.next_key(state)
    state.copy_(after)
    return key


_library.impl("next_key", _next_key, "CPU")


def is_draw(node: Node) -> bool:
    """Whether a node draws random numbers from a stream."""
    return isinstance(node.kwargs.get("generator"), Write)


def with_keys(graph: Graph, refused: frozenset[str]) -> Graph:
    """The graph, with keys for the draws that have a rule in `DRAWS`.

    Args:
        refused: names of ops that stay as they are: they draw from the generator on the host.
    """
    chosen = [
        is_draw(node) and node.op in DRAWS and str(node.op) not in refused for node in graph.nodes
    ]
    if not any(chosen):
        return graph
    metas = graph.metas()
    fresh = itertools.count(max(metas) + 1)
    now: dict[int, int] = {}  # number of a state in `graph` -> its number in the result
    nodes = []
    for node, takes_key in zip(graph.nodes, chosen, strict=True):
        node = _renumbered(node, now)
        if not takes_key:
            nodes.append(node)
            continue
        *writes, state = node.writes
        *outs, meta = node.outs
        key, after = next(fresh), next(fresh)
        args = (Write(0, ()),)
        nodes.append(
            Node(NEXT_KEY, args, {}, key, (_KEY, meta), (state,), result=0, line=node.line)
        )
        now[node.first + len(outs)] = after
        kwargs = {**node.kwargs, "generator": Ref(key)}
        nodes.append(replace(node, kwargs=kwargs, outs=tuple(outs), writes=tuple(writes)))
    outputs = tuple(now.get(i, i) for i in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def of_host(graph: Graph) -> frozenset[int]:
    """Values that stay on the host: states of streams, and keys, which are uploaded as inputs of a program."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op is NEXT_KEY:
            found.add(node.first)
        if node.op is NEXT_KEY or is_draw(node):
            found.update((node.writes[-1], node.first + len(node.outs) - 1))
    return frozenset(found)


def _renumbered(node: Node, now: dict[int, int]) -> Node:
    if not now:
        return node

    def now_read(item: Any) -> Any:
        return Ref(now.get(item, item)) if type(item) is Ref else item

    return replace(
        node,
        args=map_leaves(now_read, node.args),
        kwargs={k: map_leaves(now_read, a) for k, a in node.kwargs.items()},
        writes=tuple(now.get(w, w) for w in node.writes),
    )
