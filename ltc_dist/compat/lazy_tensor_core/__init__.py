"""`lazy_tensor_core`: its version."""

from ltc_dist.compat.torch_xla.version import __version__, __xla_gitrev__

__all__ = ["__version__", "__xla_gitrev__"]
