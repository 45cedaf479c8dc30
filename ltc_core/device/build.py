"""The one C++ file of the device, `csrc/ltc_device.cpp`, as a Python module; `register` loads it."""

from pathlib import Path

from ltc_core.native_extension import Extension

__all__ = ["extension"]

# No optimisation: nothing in there runs hot, and -O1 builds half a second longer.
extension = Extension("_ltc_device", Path(__file__).parent / "csrc" / "ltc_device.cpp")
