"""Building a C++ file, the device's: once for all processes, never half a file, or a sentence why not.

The files are built where the tests import ltc_core (`make setup`). Here a compiler that copies a built file, and keeps
a log of its calls, stands in for the real one. Each child sees `ltc_core` as a bare package (bare_package.py).
"""

import hashlib
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ltc_core.build import EXTENSIONS
from tests import prepared

ROOT = Path(__file__).parents[2]

PRELUDE = f"""
import sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, {str(ROOT)!r})
from tests.core import bare_package
from ltc_core import native_extension as extension
from ltc_core.device import build
device = build.extension
"""


def start(code: str, **env: str) -> "subprocess.Popen[str]":
    return prepared.start(  # type: ignore[no-any-return]
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def finish(child: "subprocess.Popen[str]", timeout_s: float = 55) -> str:
    out, err = child.communicate(timeout=timeout_s)
    assert child.returncode == 0 and not err, f"rc {child.returncode}\n{out}\n{err}"
    return out.strip()


def run(code: str, **env: str) -> str:
    return finish(start(code, **env))


LOAD = """
module = device.load()
assert module is not None, device.unavailable_reason
assert device.unavailable_reason == "" and device.load() is module
assert module.device_count() == 0 and module.__file__ == str(device.library_path())
"""


@pytest.fixture(scope="session")
def built() -> Path:
    """A built library, in the user's own cache, where importing ltc_core puts it too."""
    return Path(run(LOAD + "print(device.library_path())"))


def make_compiler(directory: Path, libraries: dict[str, Path], seconds: float = 0) -> Path:
    """A command that behaves as a compiler and logs each call to calls.log beside it."""
    script = directory / "compiler"
    copies = "\n".join(f'*{name}*) cp {path} "$2" ;;' for name, path in libraries.items())
    script.write_text(
        f"#!/bin/sh\necho call >> {directory}/calls.log\nsleep {seconds}\n"
        f'while [ "$1" != -o ]; do shift; done\ncase "$2" in\n{copies}\nesac\n'
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def compiler(built: Path, tmp_path: Path) -> Path:
    return make_compiler(tmp_path, {"": built})


def calls(compiler: Path) -> int:
    log = compiler.with_name("calls.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_eight_processes_at_once_build_once(built: Path, tmp_path: Path) -> None:
    script = make_compiler(tmp_path, {"": built}, seconds=3)
    cache = tmp_path / "cache"
    env = {"CXX": str(script), "LTC_CACHE_DIR": str(cache)}
    for child in [start(LOAD, **env) for _ in range(8)]:
        finish(child)
    assert calls(script) == 1
    run(LOAD, **env)
    assert calls(script) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / "extensions").stat().st_mode) == 0o700
    left = {path.suffix for path in (cache / "extensions").iterdir()}
    assert left <= {".so", ".lock"} and ".so" in left, left


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not a library"])
def test_a_damaged_file_is_rebuilt_once(
    compiler: Path, built: Path, tmp_path: Path, damage: str
) -> None:
    cache = tmp_path / "cache" / "extensions"
    cache.mkdir(parents=True, mode=0o700)
    data = bytearray(built.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    elif damage == "empty":
        data.clear()
    else:  # the digest is right, the loader refuses
        data = bytearray(b"text" + hashlib.sha256(b"text").digest())
    (cache / built.name).write_bytes(data)
    env = {"CXX": str(compiler), "LTC_CACHE_DIR": str(cache.parent)}
    run(LOAD, **env)
    assert calls(compiler) == 1
    run(LOAD, **env)
    assert calls(compiler) == 1


REASON = "assert device.load() is None and device.load() is None\nprint(device.unavailable_reason)"


def test_no_compiler_is_a_reason(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    env = {"LTC_CACHE_DIR": str(tmp_path / "cache")}
    assert run(REASON, CXX="", PATH=str(empty), **env) == (
        "there is no C++ compiler (no g++, c++ or clang++ on the PATH)"
    )
    assert run(REASON, CXX="/nonexistent/g++ -m64", **env) == (
        "there is no C++ compiler (CXX names /nonexistent/g++, which is not there)"
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "echo 'In file x:' >&2; echo 'x.cpp:1: error: no such thing' >&2; exit 1",
            "x.cpp:1: error: no such thing",
        ),
        ("exit 1", "it said nothing"),
        ("exit 0", "it said nothing"),
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, body: str, reason: str) -> None:
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    cache = tmp_path / "cache"
    said = run(REASON, CXX=str(script), LTC_CACHE_DIR=str(cache))
    assert reason in said and "\n" not in said
    assert not [path for path in (cache / "extensions").iterdir() if path.name.startswith("build-")]


def test_a_cache_that_cannot_be_used_is_a_reason(compiler: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    said = run(REASON, CXX=str(compiler), LTC_CACHE_DIR=str(blocked / "cache"))
    assert said.startswith(f"the cache directory {blocked}/cache cannot be used")

    shared = tmp_path / "shared" / "extensions"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    said = run(REASON, CXX=str(compiler), LTC_CACHE_DIR=str(shared.parent))
    assert "can be written by other users" in said and "LTC_CACHE_DIR" in said
    assert calls(compiler) == 0


def test_a_lock_held_for_ever_is_a_reason(compiler: Path, tmp_path: Path) -> None:
    said = run(
        """
        from filelock import FileLock
        extension._LOCK_TIMEOUT_S = 0.05
        path = device.library_path()
        path.parent.mkdir(parents=True, mode=0o700)
        with FileLock(f"{path}.lock"):
            assert device.load() is None
        print(device.unavailable_reason)
        assert device.load() is not None and device.unavailable_reason == ""
        """,
        CXX=str(compiler),
        LTC_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert "another process has held" in said


def test_the_name_changes_with_what_goes_in(tmp_path: Path) -> None:
    run(
        """
        import torch
        from pathlib import Path
        first = device.library_path()
        assert first.name.startswith("_ltc_device-torch" + torch.__version__.split("+")[0])
        assert extension.Extension("other", device.source).library_path().name.startswith("other-")
        others = [
            extension.Extension(device.name, device.source, "-O2"),
            extension.Extension(device.name, Path(build.__file__)),
        ]
        assert len({first, *(other.library_path() for other in others)}) == 3
        assert extension.Extension(device.name, device.source).library_path() == first
        torch.__version__ = "9.9.9"
        assert "torch9.9.9" in device.library_path().name
        """
    )


def test_the_command_builds_all_parts_ahead_of_time(tmp_path: Path) -> None:
    code = "from ltc_core.build import main; sys.exit(main())"
    assert all(e.load() is not None for e in EXTENSIONS)
    script = make_compiler(tmp_path, {e.name: e.library_path() for e in EXTENSIONS})
    child = start(code, CXX=str(script), LTC_CACHE_DIR=str(tmp_path / "cache"))
    printed = finish(child).split()
    assert len(printed) == len(set(printed)) == len(EXTENSIONS)
    assert all(Path(p).is_file() and Path(p).is_relative_to(tmp_path) for p in printed)
    child = start(code, CXX="/nonexistent", LTC_CACHE_DIR=str(tmp_path / "other"))
    _, said = child.communicate(timeout=55)
    assert child.returncode == len(EXTENSIONS)
    why = "there is no C++ compiler (CXX names /nonexistent, which is not there)"
    assert said.splitlines() == [f"{e.name} cannot be built: {why}." for e in EXTENSIONS]
