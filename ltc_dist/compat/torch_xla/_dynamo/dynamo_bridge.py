"""`torch_xla._dynamo.dynamo_bridge`: the parts that scripts and tools call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc_core import metrics
from ltc_dist.compat.torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

__all__ = [
    "NoneRemover",
    "alias_with_buffer_donor_config",
    "extract_compiled_graph",
    "get_fallback_ops",
]

get_fallback_ops = metrics.executed_fallback_ops


class NoneRemover:
    """Takes the None out of a list or tuple, and puts them back; `none_poslist` has their positions.

    A list is changed in place and returned, a tuple made anew.
    """

    def __init__(self) -> None:
        self.none_poslist: list[int] = []

    def remove_nones(self, value_list: Any) -> Any:
        """What a list or tuple has besides None."""
        self.none_poslist += [at for at, value in enumerate(value_list) if value is None]
        return self._replaced(value_list, [value for value in value_list if value is not None])

    def add_nones(self, value_list: Any) -> Any:
        """A list or tuple with None at the positions that were noted."""
        values = list(value_list)
        for at in self.none_poslist:
            values.insert(at, None)
        return self._replaced(value_list, values)

    @staticmethod
    def _replaced(given: Any, values: list[Any]) -> Any:
        if isinstance(given, tuple):
            return tuple(values)
        given[:] = values
        return given


def extract_compiled_graph(
    xla_model: torch.nn.Module, xla_args: Sequence[Any]
) -> Callable[..., Any]:
    """Return a function of the arguments that calls the module: its calls are recorded."""
    return xla_model.__call__
