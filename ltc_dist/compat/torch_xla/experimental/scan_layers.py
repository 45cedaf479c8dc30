"""`torch_xla.experimental.scan_layers`: the loop over layers, and the cache that its tests and tools empty."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ltc_core.api import loops
from ltc_core.graph.loop import LOOPS

__all__ = ["_ONE_LAYER_CACHE", "scan_layers"]

# (partition function, first layer), by their ids -> the loops of layers that are said to be pure, as long as the first
# of them lives.
_ONE_LAYER_CACHE: dict[tuple[int, int], Any] = {}


def scan_layers(
    layers: Iterable[nn.Module],
    input_data: Any,
    partition_fn: Callable[..., Any] | None = None,
    is_layer_pure: bool = False,
) -> Any:
    """Call layers one after the other; where the executor has loops, as a loop of the program.

    Args:
        layers, input_data, partition_fn: as in `ltc_core.api.loops.scan_layers`.
        is_layer_pure: the first layer is traced once for its sizes, not at each call.

    Raises:
        ValueError: a layer has other names or shapes than the first.

    Source: `torch_xla.experimental.scan_layers`.
    """
    called = list(layers)
    found = loops.scan_layers(called, input_data, partition_fn, is_layer_pure, is_traced=True)
    if is_layer_pure and called and called[0] in LOOPS:
        key = id(partition_fn), id(called[0])
        if key not in _ONE_LAYER_CACHE:
            weakref.finalize(called[0], _ONE_LAYER_CACHE.pop, key, None)
            _ONE_LAYER_CACHE[key] = LOOPS[called[0]]
    return found
