"""`xser` of a job: `save` writes a checkpoint of one file a tensor in the master process, `load` reads one."""

from ltc_core.serialization import load
from ltc_dist.checkpoint.saving import save_streamed as save

__all__ = ["load", "save"]
