"""Loops as one op of a graph: `SCAN` calls a body once for each slice of its operands, `WHILE` while a condition holds.

A body is a functional FX graph that all calls of it share; the op names it by a hash of its text, so that equal loops
are equal nodes in every process. `executors.jax` makes a loop of the program of it; the kernel of the CPU calls the
body once an iteration. Recorded by `api.pure_scan` and `api.pure_while`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["BODIES", "LOOPS", "SCAN", "WHILE", "add_body"]

Tensor = torch.Tensor

# Hash of its text -> the body. Inputs: the carry, a slice of each operand that is sliced, and the operands that each
# iteration gets whole. Outputs: the next carry, then the results that are stacked. A condition has one output.
BODIES: dict[str, GraphModule] = {}
# What a function belongs to -> its loops, by what they depend on; kept as long as that lives.
LOOPS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def add_body(module: GraphModule) -> str:
    """Keep a body; returns its name."""
    inputs = [
        (n.meta["val"].shape, n.meta["val"].dtype)
        for n in module.graph.find_nodes(op="placeholder")
    ]
    constants = [(name, t.tolist()) for name, t in sorted(module.named_buffers())]
    text = f"{module.code}\n{inputs}\n{constants}"
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    BODIES.setdefault(name, module)
    return name


def _shapes(
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    whole: Sequence[Tensor],
    body: str,
    length: int,
    reverse: bool,
) -> list[Tensor]:
    (output,) = BODIES[body].graph.find_nodes(op="output")
    return [
        torch.empty(t.shape if k < len(carry) else (length, *t.shape), dtype=t.dtype, device="meta")
        for k, t in enumerate(node.meta["val"] for node in output.args[0])
    ]


def _run(
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    whole: Sequence[Tensor],
    body: str,
    length: int,
    reverse: bool,
) -> list[Tensor]:
    call = BODIES[body]
    state, xs, whole = ([t.contiguous() for t in each] for each in (carry, xs, whole))
    rows: list[Sequence[Tensor]] = [[] for _ in range(length)]
    for at in reversed(range(length)) if reverse else range(length):
        found = call(*state, *(x[at] for x in xs), *whole)
        state, rows[at] = list(found[: len(state)]), found[len(state) :]
    return [t.clone() for t in state] + [torch.stack(column) for column in zip(*rows, strict=True)]


def _while_shapes(
    carry: Sequence[Tensor], whole: Sequence[Tensor], cond: str, body: str
) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in carry]


def _run_while(
    carry: Sequence[Tensor], whole: Sequence[Tensor], cond: str, body: str
) -> list[Tensor]:
    state, whole = ([t.contiguous() for t in each] for each in (carry, whole))
    while BODIES[cond](*state, *whole)[0].item():
        state = list(BODIES[body](*state, *whole))
    return [t.clone() for t in state]


_library: Any = torch.library.Library("ltc_loop", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "scan(Tensor[] carry, Tensor[] xs, Tensor[] whole, str body, int length, bool reverse) -> Tensor[]"
)
_library.impl("scan", _shapes, "Meta")
for _key in ("CPU", "CUDA"):
    _library.impl("scan", _run, _key)
_library.define("while_loop(Tensor[] carry, Tensor[] whole, str cond, str body) -> Tensor[]")
_library.impl("while_loop", _while_shapes, "Meta")
for _key in ("CPU", "CUDA"):
    _library.impl("while_loop", _run_while, _key)
for _name in ("scan", "while_loop"):
    _library.impl(_name, torch.library.fallthrough_kernel, "AutogradPrivateUse1")

SCAN: torch._ops.OpOverload = torch.ops.ltc_loop.scan.default
WHILE: torch._ops.OpOverload = torch.ops.ltc_loop.while_loop.default
