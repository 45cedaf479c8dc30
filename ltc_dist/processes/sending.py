"""What `spawn` sends to a process: the function with its arguments, and what the process does first of all.

`Call` and `Name` are pickled by multiprocessing when a process starts, for the start methods 'spawn' and 'forkserver'.
A class or function goes by name if the process can import it, else by value: those of a notebook, of `python -c`, and
those made in a function. Tensors, queues and locks go by the rules of multiprocessing. Used by `spawn`.
"""

from __future__ import annotations

import ast
import io
import multiprocessing.process
import operator
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle

from ltc_core.errors import RankError
from ltc_dist.processes.main_guard import guarded_names

__all__ = ["Call", "Name", "import_path"]


class Call:
    """A function and its arguments, which are called with the rank before them."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._fn = fn
        self._args = args

    def __call__(self, rank: int) -> Any:
        return self._fn(rank, *self._args)

    def __reduce__(self) -> Any:
        try:
            return _received, (_pickled((self._fn, self._args)),)
        except Exception as error:
            what = _culprit(self._fn, self._args)
            raise RankError(
                f"{what} cannot be sent to another process: {error}",
                got=type(error).__name__,
                next="define it at the top of a module, make what it holds in the process itself, or use "
                "start_method='fork'",
            ) from error


def _received(payload: bytes) -> Call:
    return Call(*pickle.loads(payload))


def _culprit(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Which of the two cannot be pickled, in words."""
    for name, found in [("", fn), *((f"argument {k}, ", arg) for k, arg in enumerate(args))]:
        try:
            _pickled(found)
        except Exception:
            return f"{name}{found!r}"
    return f"{fn!r} with its arguments"


def _pickled(what: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, _main_names()).dump(what)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no stubs
    """Pickles as multiprocessing does, and by value what cannot be imported.

    cloudpickle alone sends all classes of a script by value: `isinstance` would fail between two of them, and each
    would have class attributes of its own.
    """

    # A view: PyTorch registers its tensors in the first.
    dispatch_table = ChainMap(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]  # the stubs lack it
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(self, file: io.BytesIO, main_names: set[str]) -> None:
        super().__init__(file)
        self._main_names = main_names

    def reducer_override(self, found: Any) -> Any:
        is_named = isinstance(found, (type, FunctionType))
        if is_named and found.__module__ == "__main__" and self._is_importable(found):
            return NotImplemented  # by name
        return super().reducer_override(found)

    def _is_importable(self, found: Any) -> bool:
        """Whether a class or function of the script has the same name there after an import."""
        if found.__qualname__.partition(".")[0] not in self._main_names:
            return False
        try:
            return operator.attrgetter(found.__qualname__)(sys.modules["__main__"]) is found
        except AttributeError:
            return False


def _main_names() -> set[str]:
    """Names of the script that a process has after it has imported it; none if it cannot."""
    main = sys.modules["__main__"]
    if not _main_is_imported():
        return set()
    try:
        with open(_main_path(), "rb") as file:
            return vars(main).keys() - guarded_names(ast.parse(file.read()))
    except (OSError, SyntaxError, ValueError):  # without its source
        return set(vars(main))


def _first_directory() -> str:
    """Where Python was started, from which relative paths count, as for multiprocessing."""
    return getattr(multiprocessing.process, "ORIGINAL_DIR", None) or ""


def import_path() -> list[str]:
    """`sys.path`, as another process has to have it."""
    return [entry or _first_directory() for entry in sys.path]


def _main_path() -> str:
    """Path of the script; empty if it has none, as in a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.normpath(os.path.join(_first_directory(), path)) if path else ""


def _main_is_imported() -> bool:
    """Whether multiprocessing imports the script in a process that it starts."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:  # `python -m`; it does not import the `__main__` of a package
        return str(spec.name).rpartition(".")[2] != "__main__"
    path = _main_path()
    return os.path.exists(path) and os.path.splitext(os.path.basename(path))[0] != "ipython"


class Name(str):
    """Name of a process. The process unpickles it first, which is used to set it up before it imports PyTorch.

    The variables are set, because PyTorch reads some of them while it is imported. The parent never has them, because
    another thread may call `spawn` meanwhile. `sys.path` becomes the parent's: Python starts the process with the
    working directory in front of it, where a file may have the name of a module that PyTorch imports. `ltc_dist` is
    imported before the script: it serves the modules that an old script imports, and imports PyTorch quickly (see
    `ltc_core/__init__`).
    """

    variables: dict[str, str]

    @classmethod
    def of(cls, text: str, variables: dict[str, str]) -> Name:
        made = cls(text)
        made.variables = variables
        return made

    def __reduce__(self) -> Any:
        return operator.itemgetter(1), ((_SetUp(self.variables), str(self)),)


# The name is unpickled again, with the process that has it, after the script has been imported.
_SET_UP = """
import multiprocessing.process, os, sys
if multiprocessing.process.current_process().name == "MainProcess":
    os.environ.update(variables)
    sys.path[:] = path
    if main:
        sys.modules["__main__"].__file__ = main
    import ltc_dist.processes.spawn
"""


class _SetUp:
    """Unpickled, it runs `_SET_UP`: built-in names alone, since a module of ours would import PyTorch."""

    def __init__(self, variables: dict[str, str]) -> None:
        # multiprocessing runs the file of the script, unless it has this path. `python -` has the file '<stdin>'.
        main = "" if _main_is_imported() else _main_path()
        self._names = {"variables": variables, "path": import_path(), "main": main}

    def __reduce__(self) -> Any:
        return exec, (_SET_UP, self._names)
