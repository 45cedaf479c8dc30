"""`dp`: `DataParallel` runs a training loop in a thread for each of several devices of this process."""

from ltc_dist.train.data_parallel import Context, DataParallel

__all__ = ["Context", "DataParallel"]
