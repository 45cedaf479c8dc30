"""The version that the old packages report: scripts choose names by it."""

import ltc_core

__all__ = ["__version__", "__xla_gitrev__"]

__version__ = f"2.9.0+ltc{ltc_core.__version__}"  # the newest whose names are all here
__xla_gitrev__ = f"ltc {ltc_core.__version__}"
