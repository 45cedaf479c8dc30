"""Build and load the one C++ file of the device, `csrc/ltc_device.cpp`.

In: the source and the installed torch. Out: the extension module, or None and a sentence why not.
The built file is kept per user in `settings.cache_dir`, named after everything that went into it,
and ends with its own digest, so that a damaged file is seen before it is mapped. Processes that
start at once build it once: one compiles under a file lock, the others find the result.
`register` is the caller.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock, Timeout

from ltc_core.settings import settings

_MODULE = "_ltc_device"
_SOURCE = Path(__file__).parent / "csrc" / "ltc_device.cpp"
_DIGEST_BYTES = 32
# A compile takes about four seconds; who waits this long waits for a process that hangs.
_LOCK_TIMEOUT_S = 300.0

_loaded: ModuleType | None = None
_reason = ""


class _Unavailable(Exception):
    """Why there is no extension, as a sentence without its full stop."""


def load() -> ModuleType | None:
    """Return the extension module, building it if no usable file is cached.

    Returns:
        The module, or None; then `unavailable_reason` says why.
    Cost:
        Milliseconds when cached, one compiler run (a few seconds) when not.
    """
    global _loaded, _reason
    if _loaded is not None:
        return _loaded
    try:
        _loaded, _reason = _load_or_build(), ""
    except _Unavailable as why:
        _reason = str(why)
    except OSError as error:
        _reason = f"the cache directory {settings.cache_dir} cannot be used ({error})"
    return _loaded


def unavailable_reason() -> str:
    """Return why the last `load` returned None, or an empty string."""
    return _reason


def library_path() -> Path:
    """Return where the built file lies, or would lie."""
    version = re.sub(r"[^A-Za-z0-9.]", "_", torch.__version__)
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    key = hashlib.sha256(_SOURCE.read_bytes())
    key.update("\0".join(_flags()).encode())
    directory = Path(settings.cache_dir).expanduser() / "device"
    return directory / f"{_MODULE}-torch{version}-{abi}-{key.hexdigest()[:16]}.so"


def _load_or_build() -> ModuleType:
    path = library_path()
    _private_directory(path.parent)
    module = _load_cached(path)
    if module is not None:
        return module
    try:
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            module = _load_cached(path)  # built by another process meanwhile
            if module is None:
                _compile(path)
                module = _load_cached(path)
    except Timeout:
        raise _Unavailable(
            f"another process has held {path}.lock for {_LOCK_TIMEOUT_S:g} s"
        ) from None
    if module is None:
        raise _Unavailable(f"the freshly built {path} cannot be loaded ({_load_error})")
    return module


def _private_directory(directory: Path) -> None:
    """Make the directory; refuse one where somebody else could put code for us to load."""
    for part in (directory.parent, directory):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Unavailable(
            f"the cache directory {directory} can be written by other users; "
            "LTC_CACHE_DIR names another one"
        )


_load_error = ""


def _load_cached(path: Path) -> ModuleType | None:
    """Load the file, or return None if it is missing, damaged or does not fit."""
    global _load_error
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    # Mapping a truncated library kills the process with SIGBUS, so look first (1 ms).
    if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
        _load_error = "its digest is wrong"
        return None
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        _load_error = str(error)
        return None
    return module


def _compile(path: Path) -> None:
    """Compile into a temporary file beside `path`, then rename: nobody ever sees half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        output = Path(scratch) / path.name
        command = [
            *_compiler(),
            *_flags(),
            *_include_flags(),
            str(_SOURCE),
            "-o",
            str(output),
            *_link_flags(),
        ]
        # The messages of the compiler are quoted in a sentence: ask for English.
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
        if run.returncode != 0 or not output.exists():
            raise _Unavailable(
                f"{command[0]} could not compile {_SOURCE.name} ({_first_error(run.stderr)})"
            )
        with output.open("rb+") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(output, path)


def _compiler() -> list[str]:
    # CXX is the compiler's own convention, not one of our settings.
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    looked = (
        f"CXX names {wanted[0]}, which is not there"
        if wanted
        else "no g++, c++ or clang++ on the PATH"
    )
    raise _Unavailable(f"there is no C++ compiler ({looked})")


def _flags() -> list[str]:
    # No optimisation: nothing here runs hot, and -O1 builds half a second longer.
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return ["-std=c++20", "-O0", "-s", "-w", "-fPIC", "-shared", "-fvisibility=hidden", abi]


def _include_flags() -> list[str]:
    # By hand: importing torch.utils.cpp_extension costs 40 ms.
    include = Path(torch.__file__).parent / "include"
    folders = [
        include,
        include / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_path("include")),
    ]
    return [f"-isystem{folder}" for folder in folders]


def _link_flags() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[0][:300]


def main() -> int:
    """Build ahead of time; for launchers and images."""
    if load() is None:
        print(f"The device extension cannot be built: {unavailable_reason()}.", file=sys.stderr)
        return 1
    print(library_path())
    return 0


if __name__ == "__main__":
    sys.exit(main())
