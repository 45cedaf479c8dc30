"""Run an old script: `python -m ltc_dist.compat train.py --lr 0.1`, or `-m package.train`.

`ltc-launch --compat` does it in several processes.
"""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = "usage: python -m ltc_dist.compat SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS]"


def main(argv: list[str]) -> None:
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
