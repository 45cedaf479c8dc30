"""The `torch.backends` entry point: `load` is called with no argument as `import torch` ends.

It does nothing unless `LTC_AUTOLOAD` is true, since registering the device changes programs that
never asked for it (PyTorch then takes it for the accelerator of the machine). It never raises: an
exception here would break `import torch` for every program of the environment. A top-level
module, because importing anything inside `ltc_core` imports all of it, and registers.
"""

import importlib
import os
import sys
import warnings


def load() -> None:
    """Import `ltc_core`, which registers the device, if `LTC_AUTOLOAD` is true.

    Where `import ltc_core` is what imported torch, nothing is left to do: that import goes on and
    registers.
    """
    # settings.py, the one place that reads the environment, cannot be imported without ltc_core.
    if os.environ.get("LTC_AUTOLOAD", "").strip().lower() not in ("1", "true", "yes", "on"):
        return
    if "ltc_core" in sys.modules:
        return
    try:
        importlib.import_module("ltc_core")
    except Exception as error:
        warnings.warn(
            f"LTC_AUTOLOAD is set, but ltc_core cannot be imported: {error!r}",
            stacklevel=2,
        )
