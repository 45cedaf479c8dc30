"""Tables of what is served: `python -m ltc_dist.compat --names` prints them, docs/migrating.md has them."""

from __future__ import annotations

import importlib
from collections import defaultdict

from ltc_core.settings import SETTINGS
from ltc_dist.compat.absent import Absent
from ltc_dist.compat.table import ABSENT, SERVED

__all__ = ["table", "variables"]


def table() -> str:
    """Markdown table of the old modules, their names, and the names that are absent."""
    old_paths = defaultdict(list)
    for old, served in SERVED.items():
        old_paths[served].append(old)
    rows = ["| module | names | names that say why they are not here |", "|---|---|---|"]
    for served, paths in old_paths.items():
        module = importlib.import_module(served.module)
        names = served.names or getattr(module, "__all__", ())
        absent = [n for n in names if isinstance(getattr(module, n), Absent)]
        here = [n for n in names if n not in absent]
        if names:
            rows.append(f"| {_coded(paths)} | {_coded(here)} | {_coded(absent)} |")
    of_reason = defaultdict(list)
    for old, why in ABSENT.items():
        of_reason[why].append(old)
    rows += [f"| {_coded(modules)} | | all: {why} |" for why, modules in of_reason.items()]
    return "\n".join(row.replace("|  |", "| |") for row in rows)


def _coded(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def variables() -> str:
    """Markdown table of the old environment variables, ours, and what they do."""
    rows = ["| variable | here | meaning |", "|---|---|---|"]
    for row in SETTINGS:
        if row.aliases:
            rows.append(f"| {_coded(list(row.aliases))} | `{row.env}` | {row.doc} |")
    return "\n".join(rows)
