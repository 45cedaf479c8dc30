"""Run a script or a module as `python script.py` and `python -m module` do, then its function for one rank.

The module `__main__` stays the script's afterwards: that function may pickle its classes, and processes of a
`DataLoader` find them. Paths are made absolute first, for the script may change its directory. Called by `shim`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import zipfile
import zipimport
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any

from ltc_dist.job.ranks import ranks
from ltc_dist.processes.main_guard import is_guard

__all__ = ["run"]


def run(target: str, is_module: bool) -> None:
    """Run it; if it defines `_mp_fn(index)` and has no main guard, call that with the rank.

    Args:
        target: a script's path, or a module's name if `is_module`.
    """
    main = ModuleType("__main__")
    code, has_guard = (_find_module if is_module else _find_script)(target, main)
    # multiprocessing has made the second name for the module that was `__main__` when it was imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(code, vars(main))
    function = vars(main).get("_mp_fn")
    if callable(function) and not has_guard:
        function(ranks().rank)


def _find_script(target: str, main: ModuleType) -> tuple[CodeType, bool]:
    path = os.path.abspath(target)
    if zipfile.is_zipfile(path):
        _put_first(path)
        return _loaded(zipimport.zipimporter(path).find_spec("__main__"), main, target)
    _put_first(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    main.__dict__["__cached__"] = None
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
        main.__loader__ = loader
        code = loader.get_code("__main__")
        assert code is not None
        return code, False
    main.__loader__ = source_loader = SourceFileLoader("__main__", path)
    source = source_loader.get_data(path)  # not `get_code`, which looks for a .pyc and writes one
    return source_loader.source_to_code(source, path), _has_guard(source)


def _find_module(name: str, main: ModuleType) -> tuple[CodeType, bool]:
    _put_first(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    found = _loaded(spec, main, name)
    sys.argv[0] = main.__file__ or name
    return found


def _loaded(spec: ModuleSpec | None, main: ModuleType, target: str) -> tuple[CodeType, bool]:
    loader: Any = None if spec is None else spec.loader
    code = None if loader is None or spec is None else loader.get_code(spec.name)
    if code is None or spec is None:
        raise ImportError(f"there is no module {target} that can be run", name=target)
    main.__spec__, main.__loader__, main.__package__ = spec, loader, spec.parent
    main.__file__ = code.co_filename
    return code, _has_guard(loader.get_source(spec.name))


def _put_first(entry: str) -> None:
    if not os.environ.get("PYTHONSAFEPATH"):  # as Python does
        sys.path.insert(0, entry)


def _has_guard(source: str | bytes | None) -> bool:
    """Whether there is an `if __name__ == "__main__"` block; False without a source."""
    return source is not None and any(map(is_guard, ast.parse(source).body))
