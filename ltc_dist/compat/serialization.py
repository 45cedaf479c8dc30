"""`xser`: `torch_xla.utils.serialization`."""

from ltc_dist.serialization import load, save

__all__ = ["load", "save"]
