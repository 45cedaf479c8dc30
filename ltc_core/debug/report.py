"""One place is told of every cut: it prints, saves graphs, and does nothing if nobody asked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from ltc_core import errors, source
from ltc_core.debug.dump import graph_text
from ltc_core.settings import settings

if TYPE_CHECKING:
    from ltc_core.compiler import Compiled

__all__ = ["on_cut"]


def on_cut(device: torch.device, reason: str, compiled: Compiled, elapsed_ns: int) -> None:
    """Report a cut as `settings.debug` and `settings.save_tensors_file` ask.

    Level 1: cuts that built a program; level 2: every cut, with the line that caused it; level 3: the graph.
    """
    if settings.save_tensors_file is not None:
        _save(device, reason, compiled)
    if settings.debug:
        _print(device, reason, compiled, elapsed_ns)


def _print(device: torch.device, reason: str, compiled: Compiled, elapsed_ns: int) -> None:
    is_new = compiled.runs == 1
    if settings.debug == 1 and not is_new:
        return
    graph = compiled.graph
    line = source.user_line() or "(no line of yours)"
    print(
        f"[ltc] {device}: {reason} at {line}: {len(graph.nodes)} ops, {len(graph.inputs)} inputs, "
        f"{len(graph.outputs)} outputs, {'program built' if is_new else f'program reused ({compiled.runs} runs)'}, "
        f"handed over in {elapsed_ns / 1e6:.2f} ms",
        file=sys.stderr,
    )
    if settings.debug >= 3:
        print(graph.text(lines=True), file=sys.stderr)


def _save(device: torch.device, reason: str, compiled: Compiled) -> None:
    path = settings.save_tensors_file
    assert path is not None
    text = graph_text(compiled.graph, settings.save_tensors_fmt, lines=settings.ir_debug)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(
                f"[GraphInfo; device={device}; sync={reason}; run={compiled.runs}]\n{text}\n\n"
            )
    except OSError as error:
        settings.save_tensors_file = None
        raise errors.SettingsError(
            f"the graphs cannot be written to {path}: {error.strerror}",
            where="LTC_SAVE_TENSORS_FILE",
            next="name a file that can be written; this run goes on without",
        ) from None
