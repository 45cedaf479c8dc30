"""Serve the old modules: `import torch_xla.core.xla_model` has the names of compat/torch_xla/core/xla_model.py.

`table` maps import paths to modules. Each old module is a module object of its own with the names of ours, so that a
script may assign to it. Child processes serve the old modules, too (LTC_COMPAT).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from ltc_core.errors import LtcError
from ltc_core.settings import settings
from ltc_dist.compat.absent import Absent
from ltc_dist.compat.table import ABSENT, REPLACEABLE, SERVED, Served
from ltc_dist.expected_name import NAMES, root_of

__all__ = ["ImportOrderError", "activate"]


class ImportOrderError(LtcError, ImportError):
    """`ltc_dist.compat` was imported too late."""


def activate() -> None:
    """Serve the old names from now on.

    Raises:
        ImportOrderError: an old module was imported from elsewhere before, or the device has its name already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if os.environ.get("LTC_DEVICE_NAME") != settings.device_name:  # it was not chosen for this
        raise ImportOrderError(
            f"the device is called {settings.device_name} already: something was imported before ltc_dist.compat",
            got="an import of ltc_core or ltc_dist",
            next="begin the script with import ltc_dist.compat, or start it with ltc-launch --compat",
        )
    before = [name for name in NAMES if name in sys.modules]
    if before:
        raise ImportOrderError(
            f"{before[0]} was imported before ltc_dist.compat",
            got=getattr(sys.modules[before[0]], "__file__", None) or "a module without a file",
            next="import ltc_dist.compat first, or start the script with ltc-launch --compat",
        )
    sys.meta_path.insert(0, _Finder())
    settings.compat = True
    os.environ["LTC_COMPAT"] = "1"
    os.environ["LTC_DEVICE_NAME"] = settings.device_name


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not root_of(name):
            return None
        if name in SERVED:
            loader: Any = _ServedModule(SERVED[name], name in REPLACEABLE)
        elif name in ABSENT:
            loader = _AbsentModule(ABSENT[name])
        elif _is_imported():
            raise ModuleNotFoundError(
                f"No module named {name!r}: ltc_dist.compat serves {root_of(name)}, but not this part of it",
                name=name,
            )
        else:
            return None
        is_package = any(other.startswith(f"{name}.") for other in (*SERVED, *ABSENT))
        return importlib.machinery.ModuleSpec(name, loader, is_package=is_package)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Make `importlib.metadata.version("torch_xla")` return `torch_xla.__version__`."""
        wanted = None if context is None else context.name
        if wanted is None or wanted.lower().replace("-", "_") == _Installed.name:
            yield _Installed()


def _is_imported() -> bool:
    """Whether the module that the calling finder is asked for is imported; `importlib.util.find_spec` only asks."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
        if frame.f_code.co_name == "_find_and_load_unlocked":
            return True
        frame = frame.f_back
    return False


class _Installed(Distribution):
    name = "torch_xla"

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        version = importlib.import_module(SERVED["torch_xla.version"].module).__version__
        return f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {version}\n"

    def locate_file(self, path: Any) -> Any:
        return os.path.join(os.path.dirname(__file__), path)


class _ServedModule(importlib.abc.Loader):
    """Loader that fills a module with the names of one of ours; if `is_replaceable`, with functions of its own."""

    def __init__(self, served: Served, is_replaceable: bool) -> None:
        self._served, self._is_replaceable = served, is_replaceable

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = partial(_part_of, module.__name__)  # type: ignore[method-assign]
        source = importlib.import_module(self._served.module)
        module.__doc__ = source.__doc__
        if self._is_replaceable:
            assert source.__spec__ is not None and isinstance(
                source.__spec__.loader, importlib.abc.InspectLoader
            )
            exec(source.__spec__.loader.get_code(source.__name__), module.__dict__)  # type: ignore[arg-type]
            return
        for name in self._served.names or getattr(source, "__all__", ()):
            setattr(module, name, getattr(source, name))


def _part_of(package: str, name: str) -> ModuleType:
    """Import a submodule at its first use as an attribute; the old packages import some of theirs themselves."""
    full_name = f"{package}.{name}"
    if full_name in SERVED or full_name in ABSENT:
        return importlib.import_module(full_name)
    raise AttributeError(f"module {package!r} has no attribute {name!r} that ltc_dist.compat knows")


class _AbsentModule(importlib.abc.Loader):
    """Loader of a module whose names can all be imported, but not used."""

    def __init__(self, why: str) -> None:
        self._why = why

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(f"{module.__name__}.{name}", self._why)

        module.__getattr__ = absent  # type: ignore[method-assign]
