"""The `torch.backends` entry point: `load` is called with no argument as `import torch` ends.

It does nothing unless `LTC_AUTOLOAD` is true, since registering the device changes programs that
never asked for it (PyTorch then takes it for the accelerator of the machine), or `LTC_COMPAT`, as in
the worker processes of an old script's DataLoader. It never raises: an exception here would break
`import torch` for every program of the environment. A top-level module, because importing anything
inside `ltc_dist` imports all of it, and registers.
"""

import importlib
import os
import sys
import warnings

_VARIABLES = ("LTC_COMPAT", "LTC_AUTOLOAD")
_PACKAGES = ("ltc_core", "ltc_dist")


def load() -> None:
    """Import `ltc_dist`, which registers the device, if asked to; it serves old scripts, or tells libraries of it.

    Where `import ltc_core` is what imported torch, nothing is left to do: that import goes on and
    registers.
    """
    # settings.py, the one place that reads the environment, cannot be imported without ltc_core.
    true = ("1", "true", "yes", "on")
    asked = [n for n in _VARIABLES if os.environ.get(n, "").strip().lower() in true]
    if not asked or not sys.modules.keys().isdisjoint(_PACKAGES):
        return
    try:
        importlib.import_module("ltc_dist")
    except Exception as error:
        warnings.warn(
            f"{asked[0]} is set, but ltc_dist cannot be imported: {error!r}",
            stacklevel=2,
        )
