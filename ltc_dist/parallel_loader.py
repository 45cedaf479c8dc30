"""`pl`: loaders that bring batches to the device while the step before still runs."""

from ltc_dist.data.loader import MpDeviceLoader, ParallelLoader, PerDeviceLoader

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader"]
