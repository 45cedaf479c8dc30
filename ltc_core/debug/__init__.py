"""Debugging: reports of syncs, graphs as text and DOT, and why each graph was compiled."""

from __future__ import annotations

from ltc_core.debug import frequent  # noqa: F401
from ltc_core.debug.report import on_cut

__all__ = ["on_cut"]
