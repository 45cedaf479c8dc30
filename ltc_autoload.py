"""The `torch.backends` entry point: `load` is called with no argument as `import torch` ends.

It does nothing unless `LTC_AUTOLOAD` is true, since registering the device changes programs that
never asked for it (PyTorch then takes it for the accelerator of the machine), or `LTC_COMPAT`, as in
the worker processes of an old script's DataLoader. It never raises: an exception here would break
`import torch` for every program of the environment. A top-level module, because importing anything
inside `ltc_core` imports all of it, and registers.
"""

import importlib
import os
import sys
import warnings

# Variable -> what is imported where it is true; the first counts.
_PACKAGES = {"LTC_COMPAT": "ltc_dist", "LTC_AUTOLOAD": "ltc_core"}


def load() -> None:
    """Import `ltc_core`, which registers the device, or `ltc_dist`, which serves old scripts too, if asked to.

    Where `import ltc_core` is what imported torch, nothing is left to do: that import goes on and
    registers.
    """
    # settings.py, the one place that reads the environment, cannot be imported without ltc_core.
    true = ("1", "true", "yes", "on")
    asked = [n for n in _PACKAGES if os.environ.get(n, "").strip().lower() in true]
    if not asked or not sys.modules.keys().isdisjoint(_PACKAGES.values()):
        return
    package = _PACKAGES[asked[0]]
    try:
        importlib.import_module(package)
    except Exception as error:
        warnings.warn(
            f"{asked[0]} is set, but {package} cannot be imported: {error!r}",
            stacklevel=2,
        )
