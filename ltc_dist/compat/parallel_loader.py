"""`pl`: `torch_xla.distributed.parallel_loader`."""

from ltc_dist import MpDeviceLoader, ParallelLoader
from ltc_dist.parallel_loader import PerDeviceLoader

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader"]
