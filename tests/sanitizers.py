"""The C++ parts under sanitizers: `make test-sanitize`, or `python -m tests.sanitizers [--kind thread] [TEST ...]`.

Builds the parts with the sanitizer's flags in a cache of its own (the first time takes minutes), runs the tests that
reach them, and fails if a test does or if a sanitizer has reported something, in whichever process. Python and PyTorch
are not instrumented, so a bad access is seen when our own code makes it. Leaks are not looked for: Python keeps what
it likes until the process ends.

`address` is AddressSanitizer and UndefinedBehaviorSanitizer; `thread` is ThreadSanitizer, which starts under an
uninstrumented Python and sees its locks (they are pthread's) but not PyTorch's accesses to memory. Races in which our
code is not one of the two sides are left out of its reports.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kind:
    """How the parts are built, what is loaded before Python, and what runs."""

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    options: dict[str, str]
    tests: tuple[str, ...]


KINDS = {
    "address": Kind(
        ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g1"),
        ("libasan.so", "libubsan.so", "libstdc++.so"),
        {
            # Python and PyTorch are not built for the other checks: what they link twice is no fault of ours.
            "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:log_path={log}",
            "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
        },
        (
            "record/test_recorder.py",
            "record/test_fast_path.py",
            "record/test_view_recorder.py",
            "programs/test_views_autograd.py",
            "programs/test_autograd.py",
            "runtime/test_devices_many.py",
            "runtime/test_two_devices.py",
            "device/test_module.py",
            "executors/test_host_memory.py",
            "executors/inductor/test_launcher.py",
        ),
    ),
    "thread": Kind(
        ("-fsanitize=thread", "-fno-omit-frame-pointer", "-g1"),
        ("libtsan.so",),
        {"TSAN_OPTIONS": "exitcode=0:report_signal_unsafe=0:log_path={log}"},
        (
            "executors/inductor/test_launcher.py",
            "executors/test_host_memory.py",
            "record/test_fast_path.py",
            "runtime/test_two_devices.py",
        ),
    ),
}  # fmt: skip
PARTS = re.compile(r"/_?ltc_(device|launch|memory|record)|ltc_core/(\w+/)*csrc/")
# It runs without the sanitizer, under which bash does not start. What PyTorch's compiler builds is left as it is; our
# parts keep their symbols.
COMPILER = """\
#!/usr/bin/env -S -u LD_PRELOAD bash
case "$*" in
*/_ltc_*)
    for word in "$@"; do [ "$word" = -s ] || words+=("$word"); done
    exec g++ "${{words[@]}}" {flags} ;;
*) exec g++ "$@" ;;
esac
"""
REPORT = re.compile(r"^={10,}$", re.MULTILINE)
# They build with a compiler of their own, or wait for times that a sanitizer makes many times longer.
LEFT_OUT = "without_a_compiler or no_compiler or autoload or old_scripts"


def library(name: str) -> str:
    """The path of a library of the compiler; its name alone if there is none."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
    return os.path.realpath(found.stdout.strip())


def environment(kind: Kind, cache: Path, log: Path) -> dict[str, str]:
    """What the tests and their children find; `cache` gets a compiler that builds our parts with the flags.

    Children of tests start without `LTC_` names, so the cache is named by XDG_CACHE_HOME.
    """
    compiler = cache / "g++"
    compiler.write_text(COMPILER.format(flags=" ".join(kind.flags)))
    compiler.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if name != "LTC_CACHE_DIR"},
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(cache),
        "LD_PRELOAD": " ".join(library(name) for name in kind.libraries),
        **{name: text.format(log=log) for name, text in kind.options.items()},
    }


def reports(directory: Path) -> list[str]:
    """The reports that name one of our parts."""
    texts = [path.read_text(errors="replace") for path in sorted(directory.iterdir())]
    found = [report for text in texts for report in REPORT.split(text)]
    # Of UndefinedBehaviorSanitizer's there is a line for each, without a frame around it.
    return [report for report in found if PARTS.search(report) or "runtime error:" in report]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="address")
    parser.add_argument(
        "tests", nargs="*", help="tests of pytest, or its options (default: a chosen set)"
    )
    args, options = parser.parse_known_args()
    kind = KINDS[args.kind]
    missing = [name for name in kind.libraries if not os.path.isabs(library(name))]
    if shutil.which("g++") is None or missing:
        print(f"sanitizers: g++ with {', '.join(kind.libraries)} is needed", file=sys.stderr)
        return 2
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / f"ltc-{args.kind}"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sanitizers-") as directory:
        environ = environment(kind, cache, Path(directory) / "report")
        build = [sys.executable, "-m", "ltc_core.build"]
        if subprocess.run(build, env=environ, cwd=ROOT).returncode:
            return 1
        tests = args.tests or [f"tests/core/{name}" for name in kind.tests]
        command = [
            "-m",
            "pytest",
            "--timeout=900",
            "-q",
            "-k",
            f"not ({LEFT_OUT})",
            *options,
            *tests,
        ]
        code = subprocess.run([sys.executable, *command], env=environ, cwd=ROOT).returncode
        found = reports(Path(directory))
    for report in found:
        print(report)
    print(
        f"{len(found)} reports of {' and '.join(kind.flags[0].partition('=')[2].split(','))} sanitizers"
    )
    return code or bool(found)


if __name__ == "__main__":
    sys.exit(main())
