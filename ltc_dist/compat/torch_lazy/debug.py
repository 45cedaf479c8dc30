"""`torch._lazy.debug`: the pending graph as text."""

from collections.abc import Sequence

import torch

import ltc_core as ltc
from ltc_core import dump_ir

__all__ = ["dump_ir", "render_ir_graph"]


def render_ir_graph(tensors: Sequence[torch.Tensor]) -> str:
    """Write the pending graph that tensors come from, for Graphviz."""
    return ltc.dump_ir(tensors, "dot")
