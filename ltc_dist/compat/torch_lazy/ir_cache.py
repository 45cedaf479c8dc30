"""`torch._lazy.ir_cache`: the trie of everything that was recorded."""

from __future__ import annotations

from pathlib import Path

import ltc_core as ltc
from ltc_core.debug.dump import trie_text
from ltc_core.runtime.devices import contexts

__all__ = ["dump", "reset"]


def dump(dot_file_name: str) -> None:
    """Write it to a file, for Graphviz."""
    Path(dot_file_name).write_text(trie_text(ctx.trace.root for ctx in contexts()))


def reset() -> None:
    """Forget it, and the programs with it. Cost: hands what is pending to the device."""
    ltc.mark_step()
    for ctx in contexts():
        with ctx.trace.lock:
            ctx.trace.forget()
            ctx.compiler.forget()
