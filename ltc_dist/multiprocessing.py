"""`xmp`: `spawn(fn)` runs a function in several processes of this host and waits for them."""

from ltc_dist.processes.serial import MpModelWrapper, MpSerialExecutor
from ltc_dist.processes.spawn import SpawnContext, spawn

__all__ = ["MpModelWrapper", "MpSerialExecutor", "SpawnContext", "spawn"]
