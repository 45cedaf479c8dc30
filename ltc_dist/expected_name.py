"""Which name old scripts expect the device to have, found out before it is registered.

The device gets its name when `ltc_core` is imported, and `import ltc_dist.compat` imports that first of all. So
`ltc_dist` asks here whether it is imported for `compat`; then the name is the one that the main script's imports go
with. LTC_DEVICE_NAME wins. Importing this file does it; it imports nothing that registers the device.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

__all__ = ["COMPAT", "NAMES", "expected_by", "name_the_device", "root_of"]

COMPAT = "ltc_dist.compat"
NAMES = {  # an old package -> what its device is called
    "torch_xla": "xla",
    "torch_xla_py": "xla",
    "lazy_tensor_core": "lazy",
    "torch._lazy": "lazy",
}
_DEFAULT = "xla"
_OWN = "ltc"
_TRUE = ("1", "true", "yes", "on")


def name_the_device() -> None:
    """Set LTC_DEVICE_NAME if this import is for `compat` and nobody has chosen a name."""
    if "LTC_DEVICE_NAME" not in os.environ and _is_for_compat():
        os.environ["LTC_DEVICE_NAME"] = expected_by(_main_script())


def expected_by(script: str) -> str:
    """Return the device name that belongs to what a script imports; 'xla' by default.

    With the executor that runs on torch_xla it is 'ltc': 'xla' is that library's own device there.

    Args:
        script: its path; a file that cannot be read says nothing.
    """
    if _runs_on_torch_xla():
        return _OWN
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return _DEFAULT
    roots = (root_of(module) for module in _imported(tree))
    return next((NAMES[root] for root in roots if root), _DEFAULT)


def _runs_on_torch_xla() -> bool:
    """Predict `settings.device` before the settings are read."""
    asked = os.environ.get("LTC_DEVICE") or os.environ.get("PJRT_DEVICE") or ""
    return asked.strip().lower() in (("tpu", "xla") if os.environ.get("LTC_DEVICE") else ("tpu",))


def _imported(tree: ast.AST) -> list[str]:
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return modules


def root_of(module: str) -> str:
    """Return the old package that a module belongs to; '' if to none."""
    return next((root for root in NAMES if f"{module}.".startswith(f"{root}.")), "")


def _is_for_compat() -> bool:
    asked = os.environ.get("LTC_COMPAT", "").strip().lower() in _TRUE
    return asked or COMPAT in _run_as_module() or _is_imported(COMPAT)


def _run_as_module() -> list[str]:
    """Return the command line from `-m` on, without it, if Python was started so."""
    given = sys.orig_argv
    return given[given.index("-m") + 1 :][:1] if "-m" in given else []


def _is_imported(name: str) -> bool:
    """Whether the import that is under way is of `name`: its package comes before it."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and frame.f_locals.get("name") == name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _main_script() -> str:
    if COMPAT in _run_as_module():
        given = sys.orig_argv[sys.orig_argv.index(COMPAT) + 1 :]
        return next((word for word in given if not word.startswith("-")), "")
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return main or (sys.argv[0] if sys.argv else "")


name_the_device()
