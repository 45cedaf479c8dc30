"""How soon Python gives the interpreter to another thread: after 5 ms, and after 0.1 ms while a step is run early.

The worker needs the interpreter at both ends of what it runs. While a step is recorded, the recording thread has it. A
ViT with one thread on two cores and a load of three: 27 ms a step, and 29 ms with the usual interval.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["after_fork_in_child", "shorten"]

_SHORT_S = 0.0001

_num_short = 0  # devices that want it short now
_usual_s = 0.0
_lock = threading.RLock()  # a signal handler may read a value, too


def shorten(more: int) -> None:
    """Have Python switch threads sooner as long as a device asks for it: `more` is 1 to ask, and -1 to end that."""
    global _num_short, _usual_s
    with _lock:
        if not _num_short:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(_SHORT_S)
        _num_short += more
        if not _num_short:
            sys.setswitchinterval(_usual_s)


def after_fork_in_child() -> None:
    """Set Python's interval again: steps that were under way at the fork do not go on here."""
    global _num_short, _lock
    _lock = threading.RLock()
    if _num_short:
        _num_short = 0
        sys.setswitchinterval(_usual_s)
