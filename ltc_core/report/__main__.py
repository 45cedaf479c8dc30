"""`python -m ltc_core.report run/` makes the page of a run anew, also of one that was killed or that goes on.

A run makes it at its end. This is for runs that did not come to it, and for files of several hosts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ltc_core.errors import ProfilerError
from ltc_core.report.build import build


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ltc_core.report",
        description="The report of a run: one HTML file, which needs no server and no network.",
    )
    parser.add_argument("directory", type=Path, help="the directory that LTC_REPORT named")
    directory = parser.parse_args().directory
    try:
        path = build(directory)
    except (ProfilerError, OSError) as error:
        print(f"ltc: {error}", file=sys.stderr)
        return 1
    print(f"{path}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
