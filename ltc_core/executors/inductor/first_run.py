"""What is checked when a library has run for the first time: dtypes, sizes and addresses of its outputs.

The plan counts each output as memory of its own. The compiler's process has checked that when the library was built
(`own_memory_lowering`); here it is checked by addresses, which no op of the library can hide. Called by
`compiled_subgraph`. Cost: about 2 us a tensor, once for each library and program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc_core.graph.ir import TensorMeta

__all__ = ["shared_outputs", "wrong_output"]


def wrong_output(outputs: Sequence[torch.Tensor], metas: Sequence[TensorMeta]) -> str:
    """The first output that has another dtype or size than planned, in words; "" if there is none."""
    for k, (output, meta) in enumerate(zip(outputs, metas, strict=True)):
        if output.dtype is not meta.dtype or output.size() != meta.size:
            return f"output {k} is {TensorMeta.like(output)}, not {meta}"
    return ""


def shared_outputs(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[int, int | None]:
    """Outputs that share memory with a tensor before them: output -> that input's position, or None for an output."""
    ranges = [(*_addresses(t), -1, k) for k, t in enumerate(inputs) if t.numel()]
    ranges += [(*_addresses(t), k, -1) for k, t in enumerate(outputs) if t.numel()]
    found: dict[int, int | None] = {}
    last_end, last_output, last_input = 0, -1, -1
    for start, end, output, source in sorted(ranges):
        if start < last_end:
            if output >= 0:
                found[output] = last_input if last_output < 0 else None
            elif last_output >= 0:
                found[last_output] = source
        if end > last_end:
            last_end, last_output, last_input = end, output, source
    return found


def _addresses(t: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the one after the last."""
    steps = sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (steps + 1) * t.element_size()
