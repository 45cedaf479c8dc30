"""`python -m ltc_core.top`: the live view of the watched processes of this host, as `ltc-launch --watch` has it.

Processes are watched that run with LTC_WATCH, or below `ltc-launch --watch`. It reads their files (`live.board`) and
nothing else: the processes do not notice it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ltc_core.live import table
from ltc_core.live.board import Seen, directories, read_states
from ltc_core.live.screen import Screen, fitted
from ltc_core.settings import settings

__all__ = ["main"]

_LOOK_S = 0.2
_WIDEST = 10_000  # columns of a file or a pipe


def main(argv: Sequence[str] | None = None) -> int:
    """Show the view until Ctrl-C; with --once print it.

    Returns:
        The exit code: 1 if --once finds no process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ltc_core.top",
        description="What processes with LTC_WATCH=1 and those of ltc-launch --watch do now.",
    )
    parser.add_argument(
        "pids", nargs="*", type=int, metavar="PID", help="processes; all by default"
    )
    parser.add_argument("--once", action="store_true", help="print the view once, and end")
    parser.add_argument(
        "--directory", default=None, metavar="DIR", help="where they publish; that of LTC_WATCH"
    )
    given = parser.parse_args(argv)
    places = directories(given.directory or settings.watch)
    if given.once or not sys.stdout.isatty():
        return _print_once(places, given.pids)
    none = _none(places, given.pids)

    def text(size: os.terminal_size) -> list[str]:
        return table.lines(_chosen(places, given.pids), size) or [none]

    screen = Screen(sys.stdout, text)
    try:
        screen.refresh()
        while True:
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # pressed again, the terminal is left clean, too
        return 0
    finally:
        screen.end()


def _print_once(places: Sequence[Path], pids: Sequence[int]) -> int:
    found = _chosen(places, pids)
    if not found:
        print(_none(places, pids), file=sys.stderr)
        return 1
    is_terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if is_terminal else _WIDEST
    for line in table.lines(found, os.terminal_size((columns, len(found) + 1000))):
        print(fitted(line, columns) if is_terminal else line)
    return 0


def _chosen(places: Sequence[Path], pids: Sequence[int]) -> list[Seen]:
    found = (seen for place in places for seen in read_states(place))
    return [seen for seen in found if not pids or seen.state.pid in pids]


def _none(places: Sequence[Path], pids: Sequence[int]) -> str:
    which = f"none of the processes {', '.join(map(str, pids))}" if pids else "no process"
    return f"ltc: {which} publishes its state in {places[0]}. Next: start it with LTC_WATCH=1"


if __name__ == "__main__":
    sys.exit(main())
