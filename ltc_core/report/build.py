"""The page of a report: what the ranks have recorded becomes one HTML file, which needs nothing beside it.

In: the directory of a run. Out: the page there, which only its owner may read: page/page.html with its style, its
scripts and the data inserted. Called by `recording` at the end of a run, and by `__main__`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ltc_core.report.job import collectives_of, lateness_of
from ltc_core.report.program_table import icicle, lines_of, program_table
from ltc_core.report.run_files import PROGRAMS, TRACE, Rank, read_ranks
from ltc_core.report.sentences import summary_of
from ltc_core.report.steps import PARTS, Step, mean_of, steady, steps_of, worker_ms
from ltc_core.report.waits import fallbacks_of, loader_of, syncs_of, transfers_of
from ltc_core.timeline.trace_file import encode

__all__ = ["PAGE", "PROGRAMS", "TRACE", "build", "data_of"]

PAGE = "report.html"
_MOST_STEPS = 1000  # that are drawn: of longer runs every n-th
_MOST_POINTS = 1000


def build(directory: Path) -> Path:
    """Make the page; returns its path. Cost: about 1 s for 50,000 slices.

    Raises:
        ProfilerError: there is no report in the directory.
        OSError: a file cannot be read or written.
    """
    text = page_of(data_of(read_ranks(directory)))
    target = directory / PAGE
    descriptor, temporary = tempfile.mkstemp(prefix=f".{PAGE}.", dir=directory)
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def page_of(data: dict[str, Any]) -> str:
    """The page with its data. No text in it can end the script that holds it: `<` is written as an escape."""
    files = resources.files("ltc_core.report") / "page"
    page = (files / "page.html").read_text(encoding="utf-8")
    scripts = [files / name for name in ("charts.js", "layers.js", "graph.js", "page.js")]
    parts = {
        "STYLE": (files / "page.css").read_text(encoding="utf-8"),
        "SCRIPTS": "\n".join(script.read_text(encoding="utf-8") for script in scripts),
        "DATA": encode(data).replace("<", "\\u003c").replace("\u2028", "\\u2028"),
    }
    for name, text in parts.items():
        page = page.replace(f"/*{name}*/", text, 1)
    return page


def data_of(ranks: Sequence[Rank]) -> dict[str, Any]:
    """What the page shows."""
    data: dict[str, Any] = {
        "parts": PARTS,
        "ranks": [_of_rank(rank) for rank in ranks],
        "lateness": lateness_of(ranks),
        "trace": TRACE,
    }
    data["summary"] = summary_of(data)
    return data


def _of_rank(rank: Rank) -> dict[str, Any]:
    steps = steps_of(rank)
    later = steady(steps)
    programs = program_table(rank)
    return {
        "number": rank.number,
        "process": rank.process,
        "machine": rank.machine,
        "is_whole": rank.is_whole,
        "num_steps": len(steps),
        "num_steady": len(later),
        "mean": mean_of(later),
        "worker_ms": worker_ms(rank, later),
        "steps": _shown(steps),
        "programs": programs,
        "lines": lines_of(programs, len(steps)),
        "icicle": icicle(programs, len(steps)),
        "syncs": syncs_of(rank, len(steps)),
        "fallbacks": fallbacks_of(rank, len(steps)),
        "transfers": transfers_of(rank, len(steps)),
        "loader": loader_of(rank, later),
        "collectives": collectives_of(rank, len(steps)),
        "curves": {name: _thinned(points) for name, points in rank.curves.items()},
    }


def _shown(steps: Sequence[Step]) -> list[list[Any]]:
    """Number, start and milliseconds of the parts of each step that is drawn."""
    stride = max(1, -(-len(steps) // _MOST_STEPS))
    began = steps[0].start if steps else 0.0
    return [
        [
            step.number,
            round((step.start - began) / 1000, 3),
            [round(step.parts[part] / 1000, 4) for part in PARTS],
        ]
        for step in steps[::stride]
    ]


def _thinned(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    stride = max(1, -(-len(points) // _MOST_POINTS))
    began = points[0][0] if points else 0.0
    return [[round((at - began) / 1000, 3), value] for at, value in points[::stride]]
