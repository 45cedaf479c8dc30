"""What a script does at each import, and what only under `if __name__ == "__main__":`.

Spawned processes import the script they belong to. `spawn` looks for a call outside of such a guard before it starts
any; `sending` for names that exist only under one.
"""

from __future__ import annotations

import ast
from types import FrameType

__all__ = ["guarded_names", "is_guard", "is_unguarded"]


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


def guarded_names(script: ast.Module) -> set[str]:
    """Names that are bound at the top of a script under such a guard only: an import does not make them."""
    under, outside = set[str](), set[str]()
    for statement in script.body:
        (under if is_guard(statement) else outside).update(_bound(statement))
    return under - outside


def _bound(node: ast.AST) -> set[str]:
    """Names that a statement binds at its level; those inside a function or class are not."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).partition(".")[0]}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return set[str]().union(*map(_bound, ast.iter_child_nodes(node)))


def _is_top_of_script(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
