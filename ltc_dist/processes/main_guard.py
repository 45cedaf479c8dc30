"""Find a call that a script makes at each import: one outside of `if __name__ == "__main__":`.

Spawned processes import the script they belong to. `spawn` calls this before it starts any.
"""

from __future__ import annotations

import ast
from types import FrameType

__all__ = ["is_guard", "is_unguarded"]


def is_unguarded(frame: FrameType | None) -> bool:
    """Whether `frame` was reached from the top of the main script, outside such a guard.

    Scripts that cannot be read (a notebook's cells) are taken for guarded.
    """
    while frame is not None and not _is_top_of_script(frame):
        frame = frame.f_back
    if frame is None:
        return False
    try:
        with open(frame.f_code.co_filename, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return False
    line = frame.f_lineno
    for statement in tree.body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return not is_guard(statement)
    return False


def is_guard(statement: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    return isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test)


def _is_top_of_script(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
