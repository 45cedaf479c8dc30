"""The programs beside eager, each in a process that ends with it: `python -m tests.nets.run_programs --tier compiled`.

Prints what differs, program by program; a program that ends its process is named too.
"""

import argparse
import contextlib
import fnmatch
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence

import ltc_core as ltc
from tests.core.beside_eager import run_beside_eager
from tests.nets.programs import find
from tests.nets.tiers import TIERS, tier
from tests.seed import rotating, seed

__all__ = ["check", "main"]

HANG_S = 400


def check(name: str) -> str:
    """How a program differs from eager, in words; "" if it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run_beside_eager(find()[name])
        except AssertionError as error:
            return str(error)
        except Exception:
            return traceback.format_exc()
        finally:
            with contextlib.suppress(Exception):
                ltc.wait_device_ops()
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.nets.run_programs")
    parser.add_argument("names", nargs="*", default=["*"], help="names or patterns (default: all)")
    parser.add_argument("--tier", choices=TIERS, default="ops")
    parser.add_argument(
        "--share", type=int, default=1, help="only one SHARE-th, another one for each seed"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return _work(args.names, args.tier)
    names = [n for n in find() if any(fnmatch.fnmatch(n, pattern) for pattern in args.names)]
    names = rotating(names, args.share) if args.share > 1 else names
    print(f"{len(names)} programs, {args.tier}, seed {seed()}", flush=True)
    failures = 0
    while names:
        failed, names = _run_child(names, args.tier)
        failures += failed
    print(f"{failures} programs differ" if failures else "all as eager", flush=True)
    return 1 if failures else 0


def _work(names: Sequence[str], chosen: str) -> int:
    with tier(chosen):
        for name in names:
            print(f"@{name}", flush=True)
            what = check(name)
            if what:
                print(f"program {name}: {what}\n", flush=True)
    return 0


def _run_child(names: list[str], chosen: str) -> tuple[int, list[str]]:
    """How many programs of one child process failed, and those that are left after one that ended it."""
    command = [sys.executable, "-m", "tests.nets.run_programs", "--tier", chosen, "--child", *names]
    failures, at, last = 0, names[0], [time.monotonic()]
    environment = {**os.environ, "LTC_COMPILE": "off"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(1.0):
                if time.monotonic() - last[0] > HANG_S:
                    child.kill()

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert child.stdout is not None
        for line in child.stdout:
            last[0] = time.monotonic()
            if line.startswith("@"):
                at = line[1:].strip()
                continue
            failures += line.startswith("program ")
            print(line, end="", flush=True)
        stop.set()
        watcher.join()
    if child.returncode == 0:
        return failures, []
    print(f"program {at} ends its process with {child.returncode}\n", flush=True)
    return failures + 1, names[names.index(at) + 1 :]


if __name__ == "__main__":
    sys.exit(main())
