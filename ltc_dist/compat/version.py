"""What the old packages say of themselves. The version is that of this package."""

from ltc_core import __version__

__all__ = ["__version__", "__xla_gitrev__"]

__xla_gitrev__ = f"ltc {__version__}"
