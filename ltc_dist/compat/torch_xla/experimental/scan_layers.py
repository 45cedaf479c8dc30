"""`torch_xla.experimental.scan_layers`: the loop over layers, and the cache that its tests and tools empty."""

from __future__ import annotations

from ltc_core.api.loops import scan_layers
from ltc_core.graph.loop import LOOPS as _ONE_LAYER_CACHE

__all__ = ["_ONE_LAYER_CACHE", "scan_layers"]
