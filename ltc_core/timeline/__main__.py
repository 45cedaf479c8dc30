"""`python -m ltc_core.timeline merge run.json` merges run.rank0.json, run.rank1.json and so on into run.json.

A job does so at its end. This is for a job in which a process was killed, and for files of several hosts.
"""

from __future__ import annotations

import argparse
import sys

from ltc_core.errors import ProfilerError
from ltc_core.timeline.merge import files_of_ranks, merge


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ltc_core.timeline", description="Timelines of a job in one file."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    merging = verbs.add_parser("merge", help="merge the files of all ranks")
    merging.add_argument("file", help="the file that LTC_TRACE named")
    path = parser.parse_args().file
    files = files_of_ranks(path)
    try:
        merge(path, files)
    except (ProfilerError, OSError) as error:
        print(f"ltc: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {len(files)} processes; open it in https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
