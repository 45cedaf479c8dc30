"""`torch_xla.amp.syncfree`: optimizers that skip a step without looking at a value."""

from ltc_core.api.syncfree import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
