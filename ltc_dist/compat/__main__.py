"""Run an old script: `python -m ltc_dist.compat train.py --lr 0.1`, or `-m package.train`.

`ltc-launch --compat` does it in several processes. `--names` prints the tables of what is served.
"""

from __future__ import annotations

import os
import runpy
import sys

from ltc_dist.compat.names import table, variables

_USAGE = "usage: python -m ltc_dist.compat SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS], or --names"


def main(argv: list[str]) -> None:
    if argv[:1] == ["--names"]:
        print(table(), variables(), sep="\n\n")
        return
    is_module = argv[:1] == ["-m"]
    rest = argv[is_module:]
    if not rest or rest[0].startswith("-"):
        sys.exit(_USAGE)
    target = rest[0]
    sys.argv = rest
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(target):
        sys.exit(f"python -m ltc_dist.compat: there is no script {target}")
    sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
