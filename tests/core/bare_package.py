"""Importing this makes `ltc_core` a package of plain files, without PyTorch: for processes that must start quickly.

A process that has imported the real package keeps it.
"""

import atexit
import importlib
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
IS_BARE = "ltc_core" not in sys.modules

for name in ("ltc_core", "ltc_core.executors", "ltc_core.executors.inductor"):
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package

if IS_BARE:  # what ltc_core/setup.py does for the compile service
    service = importlib.import_module("ltc_core.executors.inductor.compiler.service")
    artifacts = importlib.import_module("ltc_core.executors.artifacts")
    os.register_at_fork(after_in_child=artifacts.after_fork_in_child)
    os.register_at_fork(after_in_child=service.after_fork_in_child)
    atexit.register(service.at_exit)
