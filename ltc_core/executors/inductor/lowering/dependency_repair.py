"""A repair of PyTorch's compiler: a kernel ran before the write that it reads.

To be fused with another kernel, a kernel may get other loops. What it reads was then computed anew as well, without
the write that it has to come after: gradients of a max pool were added up before they were there. Used by
`build_artifact`, in the compiler's process only.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch._inductor.scheduler import SchedulerNode

__all__ = ["repaired"]

_recompute = SchedulerNode.recompute_size_and_body


def repaired() -> Any:
    """A context in which kernels with other loops keep the writes that they come after."""
    return mock.patch.object(SchedulerNode, "recompute_size_and_body", _recompute_renamed)


def _recompute_renamed(node: Any, *args: Any, **kwargs: Any) -> None:
    _recompute(node, *args, **kwargs)
    node.set_read_writes(node.read_writes.rename(node.mutation_renames))
