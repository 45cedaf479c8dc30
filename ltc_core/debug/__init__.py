"""What happens, made visible: each sync in a report, graphs as text and DOT, why each graph was built."""

from __future__ import annotations

from ltc_core.debug import frequent  # noqa: F401
from ltc_core.debug.report import on_cut

__all__ = ["on_cut"]
