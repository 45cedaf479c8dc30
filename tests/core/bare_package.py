"""Importing this makes `ltc_core` a package of plain files, without PyTorch: for processes that must start quickly.

A process that has imported the real package keeps it.
"""

import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]

for name in ("ltc_core", "ltc_core.executors", "ltc_core.executors.inductor"):
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package
