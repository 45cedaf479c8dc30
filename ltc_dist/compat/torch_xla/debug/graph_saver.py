"""`torch_xla.debug.graph_saver`: pending graphs in files."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence

import torch

import ltc_core as ltc
from ltc_core.errors import SettingsError

__all__ = ["save_tensors_graph"]

_FORMATS = {"text": "text", "dot": "dot", "hlo": "text"}

_lock = threading.Lock()
_saved: Counter[tuple[int, str]] = Counter()


def save_tensors_graph(
    save_dir: str | os.PathLike[str], name: str, tensors: Sequence[torch.Tensor]
) -> None:
    """Write the graph that tensors come from to '<name>-<thread>-<number>.<format>'; nothing is run.

    The format is that of the variable SAVE_GRAPH_FMT: text (the default), dot, or hlo, which is read as text.

    Raises:
        SettingsError: there is no such format.
    """
    fmt = os.environ.get("SAVE_GRAPH_FMT") or "text"
    if fmt not in _FORMATS:
        raise SettingsError(
            f"Invalid save graph format: {fmt}",
            got=f"SAVE_GRAPH_FMT={fmt}, expected one of {', '.join(_FORMATS)}",
        )
    graph = ltc.dump_ir(tensors, _FORMATS[fmt])
    thread = threading.get_ident()
    with _lock:
        number = _saved[thread, name]
        _saved[thread, name] += 1
    path = os.path.join(save_dir, f"{name}-{thread}-{number}.{fmt}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(graph)
