"""`xmp`: `torch_xla.distributed.xla_multiprocessing`."""

from ltc_dist import MpModelWrapper, MpSerialExecutor, spawn

__all__ = ["MpModelWrapper", "MpSerialExecutor", "spawn"]
