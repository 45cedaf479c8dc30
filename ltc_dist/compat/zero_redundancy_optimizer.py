"""`torch_xla.distributed.zero_redundancy_optimizer`."""

from ltc_dist.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
