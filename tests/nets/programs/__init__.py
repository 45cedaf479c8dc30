"""Small programs as a user writes them, each a function of a device; a file is a family.

`find()` gives them by name, such as "views.a_view_written_under_autograd". Functions with other parameters are the
families' own helpers.
"""

import importlib
import inspect

from tests.core.beside_eager import Program

__all__ = ["find"]

FAMILIES = ("views", "foreach", "indexing", "autograd", "numerics", "layers", "training", "scripts")


def find() -> dict[str, Program]:
    """Every program by name, in the order of the files."""
    found: dict[str, Program] = {}
    for family in FAMILIES:
        module = importlib.import_module(f"{__name__}.{family}")
        for name, item in vars(module).items():
            if inspect.isfunction(item) and item.__module__ == module.__name__:
                if list(inspect.signature(item).parameters) == ["device"]:
                    found[f"{family}.{name}"] = item
    return found
