"""`torch_xla.experimental.mark_pattern_utils`: composites of StableHLO in exported programs."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from ltc_core import source
from ltc_core.errors import ExportError
from ltc_dist.compat.torch_xla.experimental import xla_marker

__all__ = ["StableHLOCompositeBuilder"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _new_id() -> str:
    return uuid.uuid4().hex


class StableHLOCompositeBuilder:
    """Makes one `stablehlo.composite` of what is computed between its marked inputs and results.

    A value in between that is computed of no marked input becomes part of the composite; weights and inputs of the
    program that are not marked follow the marked inputs.

    Args:
        name: of the composite.
        attr: its attributes: name -> string, number, truth value, or list of numbers or truth values.
    """

    def __init__(self, name: str, attr: dict[str, Any] | None = None) -> None:
        self.name = name
        self.attr = attr
        self.id = _new_id()

    def mark_inputs(self, *tensors: torch.Tensor) -> Any:
        """Mark the inputs, once; returns what to use in their place: a tensor, or a tuple of several.

        Raises:
            ValueError: one is no tensor.
        """
        return self._marked(tensors, True)

    def mark_outputs(self, *tensors: torch.Tensor) -> Any:
        """Mark the results, once; returns what to use in their place: a tensor, or a tuple of several.

        Raises:
            ValueError: one is no tensor.
        """
        return self._marked(tensors, False)

    def _marked(self, tensors: tuple[torch.Tensor, ...], is_input: bool) -> Any:
        for t in tensors:
            if not isinstance(t, torch.Tensor):
                raise ExportError(
                    "only tensors can be marked as inputs and results of a composite",
                    got=type(t).__name__,
                    where=source.user_line(),
                    next="give numbers as attributes: StableHLOCompositeBuilder(name, {'scale': 2.0})",
                )
        attr = None if is_input else xla_marker.serialize_composite_attr(self.attr)
        mark = torch.ops.xla.mark_tensor
        marked = [
            mark(t, name=self.name, pos=pos, id=self.id, is_input=is_input, attr=attr)
            for pos, t in enumerate(tensors)
        ]
        return marked[0] if len(marked) == 1 else tuple(marked)
