"""`torch_xla.experimental` and `torch_xla.experimental.eager`: eager mode, and steps compiled within it."""

from ltc_core.api.eager import eager_mode, eager_mode_context, is_eager_mode
from ltc_dist.compat.torch_xla import compile

__all__ = ["compile", "eager_mode", "eager_mode_context", "is_eager_mode"]
