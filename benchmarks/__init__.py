"""Benchmarks: what a figure costs beside its peers, in one run, as a ratio.

`python -m benchmarks.record`, `benchmarks.memory`, `benchmarks.compiling`, `benchmarks.distributed`,
`benchmarks.peers` and `benchmarks.breadth`, or `make bench` for all. Each measures in processes of
its own (`in_child`), prints a table in Markdown (`table`), or with `--json` what the table is made of.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def in_child(module: str, *arguments: str, **environ: str) -> Any:
    """Run `python -m module arguments` and return the JSON it prints; its errors go to stderr.

    Raises:
        subprocess.CalledProcessError: the child failed.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is left-aligned, the others are right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]

    def row(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([row(lines[0]), f"| {' | '.join(rule)} |", *map(row, lines[1:])])
