"""The sentence that says that a library trains on the device."""

from __future__ import annotations

import functools
import os
import sys

from ltc_core.settings import settings

__all__ = ["tell"]


@functools.cache  # once
def tell(library: str, otherwise: str, verb: str = "trains on") -> None:
    """Say it on stderr, in rank 0. `otherwise`: what chooses the CPU."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(f"ltc: {library} {verb} {settings.device_name}; {otherwise} the CPU", file=sys.stderr)
