"""The C types of recording: values, handles, and the lock of a trace.

`native` is the module of `csrc/ltc_objects.cpp`, or None without a C++ compiler. For that case `handles` has classes of
Python, and `record.trace` takes Python's lock. It is built before the first object is made: half a second, once.
"""

from __future__ import annotations

from pathlib import Path

from ltc_core.native_extension import Extension

__all__ = ["extension", "native"]

extension = Extension("_ltc_objects", Path(__file__).parent / "csrc" / "ltc_objects.cpp", "-O2")
native = extension.load()
