"""What a setting asks to record of a process: begun when its first device is used, ended when the process ends.

A forked child of a process that records does not, unless it has become a rank, with files of its own. Used by `slices`
(LTC_TRACE) and by `report` (LTC_REPORT).
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable

from ltc_core.errors import LtcError, ProfilerError, SettingsError
from ltc_core.settings import rank_in_job
from ltc_core.timeline.trace_file import AlreadyWritten, path_of_rank

__all__ = ["start_as_set", "stop_at_exit"]


def start_as_set(start: Callable[[str], None], path: str, of_parent: str, variable: str) -> None:
    """Start what `variable` asks for.

    Args:
        path: the value of the variable.
        of_parent: the path of the process that forked this one, if that records.

    Raises:
        SettingsError: the path cannot be written.
    """
    if path_of_rank(path, rank_in_job()[0]) == of_parent:
        return
    try:
        start(path)
    except ProfilerError as error:
        if isinstance(error, AlreadyWritten) and multiprocessing.parent_process() is not None:
            return
        raise SettingsError(error.what, got=error.got, where=variable, next=error.next) from None


def stop_at_exit(stop: Callable[[], None]) -> None:
    """Stop, and say on stderr what fails: nobody catches an error at the end of a process."""
    try:
        stop()
    except LtcError as error:
        print(f"ltc: {error}", file=sys.stderr, flush=True)
