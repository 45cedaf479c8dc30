"""Which nodes of a subgraph each kernel of its library computes, noted while PyTorch's compiler writes the calls.

`lowering.lower` marks each FX node with the position of the node that it was traced from. PyTorch's compiler reports
each kernel with its FX nodes to a function for its own tracing, in place of which `noted` puts one of ours. Used by
`build_artifact`, in the compiler's process only; the artifact keeps the calls, and `tiers` reports them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch._inductor.codegen.cpp as of_cpp
import torch._inductor.codegen.triton as of_triton
import torch._inductor.debug as of_all

from ltc_core.executors.inductor.lowering.lower import position_of

__all__ = ["Call", "noted"]

_REPORTED_TO = "set_kernel_post_grad_provenance_tracing"

# Name of a kernel, and the positions of the nodes that the call computes.
Call = tuple[str, list[int]]


@contextlib.contextmanager
def noted() -> Iterator[list[Call]]:
    """A context in which one library is compiled; yields its kernel calls, in the order in which they run.

    A node may be in several calls: each kernel that reads a cheap value computes it again. Calls of no node, such as
    copies of outputs, are left out. The list stays empty with a PyTorch that does not report kernels.
    """
    calls: list[Call] = []

    def note(computed: Any, kernel: str, is_extern: bool = False) -> None:
        parts = [computed] if is_extern else [getattr(part, "node", None) for part in computed]
        origins = [node for part in parts if part is not None for node in part.origins]
        found = {at for at in map(position_of, origins) if at is not None}
        if found:
            # The origins of a call of a library have the nodes before it that make its operands, too.
            calls.append((kernel, [max(found)] if is_extern else sorted(found)))

    with contextlib.ExitStack() as patches:
        for module in (of_all, of_cpp, of_triton):
            if hasattr(module, _REPORTED_TO):
                patches.enter_context(mock.patch.object(module, _REPORTED_TO, note))
        yield calls
