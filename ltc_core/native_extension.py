"""Build and load one of our C++ files.

In: the source and the installed torch. Out: the extension module, or None and a sentence that says why.
A wheel of `make wheel` brings built files in `PREBUILT`; others are built and cached per user in `settings.cache_dir`.
The name of a file has the torch version and a hash of sources and flags, so that only one that fits is found. It ends
with its own digest, so that damage is detected before the file is mapped. Processes that start together build it once:
one compiles under a file lock, the others load the result. `build` lists all extensions.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import final

import torch
from filelock import FileLock, Timeout

from ltc_core import progress
from ltc_core.private_directory import private_directory
from ltc_core.settings import settings

__all__ = ["PREBUILT", "Extension", "build_ahead", "compiler_command"]

PREBUILT = Path(__file__).parent / "_built"  # in a wheel only
_DIGEST_BYTES = 32
# A compile takes about four seconds; a process that holds the lock this long hangs.
_LOCK_TIMEOUT_S = 300.0
_LIBRARIES = ("c10", "torch_cpu", "torch_python")


_COMPILER = "install a C++ compiler (g++) or set CXX"


class _Unavailable(LookupError):
    """Why there is no extension, as a sentence without its full stop."""


@final
class Extension:
    """One C++ file, and the Python module it becomes.

    Args:
        name: of the module.
        source: the file; it may include headers in its folder.
        optimize: the compiler's optimization level; -O0 builds fastest, for code that is not hot.

    Attributes:
        loaded: the module, once `load` has found or built it.
        unavailable_reason: why the last `load` returned None, or an empty string.
        remedy: what the user can do about it.
    """

    def __init__(self, name: str, source: Path, optimize: str = "-O0") -> None:
        self.name = name
        self.source = source
        self.optimize = optimize
        self.unavailable_reason = ""
        self.remedy = _COMPILER
        self.loaded: ModuleType | None = None
        self._load_error = ""
        self._lock = threading.Lock()
        _all.append(self)

    def load(self) -> ModuleType | None:
        """Return the module, building it if no usable file is installed or cached.

        Returns:
            The module, or None; then `unavailable_reason` says why.
        Cost:
            Milliseconds when cached, one compiler run (a few seconds) when not.
        """
        with self._lock:  # a module may register with PyTorch only once
            return self._load()

    def _load(self) -> ModuleType | None:
        if self.loaded is not None:
            return self.loaded
        try:
            self.loaded, self.unavailable_reason = self._load_or_build(), ""
        except _Unavailable as why:
            self.unavailable_reason, self.remedy = str(why), _COMPILER
        except OSError as error:
            self.remedy = "set LTC_CACHE_DIR to a directory of yours with 100 MB of room"
            self.unavailable_reason = (
                f"the cache directory {settings.cache_dir} cannot be used ({error})"
            )
        return self.loaded

    def is_built(self) -> bool:
        """Whether the built file exists or is loaded; then `load` compiles only if the file is damaged."""
        path = self.library_path()
        return self.loaded is not None or (PREBUILT / path.name).exists() or path.exists()

    def loaded_path(self) -> Path:
        """Return the file that `load` has loaded: the one that a wheel brought, or the one in the cache."""
        return Path(str(self.loaded.__file__)) if self.loaded else self.library_path()

    def library_path(self) -> Path:
        """Return the path of the built file in the cache, which may not exist yet."""
        version = re.sub(r"[^A-Za-z0-9.]", "_", torch.__version__)
        abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
        key = hashlib.sha256(self.source.read_bytes())
        for header in sorted(self.source.parent.glob("*.h")):
            key.update(header.read_bytes())
        key.update("\0".join(self._flags()).encode())
        directory = Path(settings.cache_dir).expanduser() / "extensions"
        return directory / f"{self.name}-torch{version}-{abi}-{key.hexdigest()[:16]}.so"

    def _load_or_build(self) -> ModuleType:
        path = self.library_path()
        # Whoever may write there may write our Python files, too.
        module = self._load_cached(PREBUILT / path.name)
        if module is not None:
            return module
        private_directory(path.parent)
        module = self._load_cached(path)
        if module is not None:
            return module
        try:
            with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
                module = self._load_cached(path)  # built by another process meanwhile
                if module is None:
                    with _shown():
                        self._compile(path)
                    module = self._load_cached(path)
        except Timeout:
            raise _Unavailable(
                f"another process has held {path}.lock for {_LOCK_TIMEOUT_S:g} s"
            ) from None
        if module is None:
            raise _Unavailable(f"the freshly built {path} cannot be loaded ({self._load_error})")
        return module

    def _load_cached(self, path: Path) -> ModuleType | None:
        """Load the file, or return None if it is missing, damaged or does not fit."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        # Mapping a truncated library kills the process with SIGBUS, so check the digest first (1 ms).
        if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
            self._load_error = "its digest is wrong"
            return None
        loader = importlib.machinery.ExtensionFileLoader(self.name, str(path))
        spec = importlib.util.spec_from_loader(self.name, loader)
        assert spec is not None
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            self._load_error = str(error)
            return None
        return module

    def _compile(self, path: Path) -> None:
        """Compile into a temporary file beside `path`, then rename it: no process sees a partial file."""
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
            output = Path(scratch) / path.name
            command = [
                *compiler_command(),
                *self._flags(),
                *_include_flags(),
                str(self.source),
                "-o",
                str(output),
                f"-L{Path(torch.__file__).parent / 'lib'}",
                *(f"-l{library}" for library in _LIBRARIES),
            ]
            # The messages of the compiler are quoted in a sentence: ask for English.
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                # Its temporary files go with the directory, also if this process is killed meanwhile.
                env={**os.environ, "LC_ALL": "C", "TMPDIR": scratch},
            )
            if run.returncode != 0 or not output.exists():
                raise _Unavailable(
                    f"{command[0]} could not compile {self.source.name} "
                    f"({_first_error(run.stderr)})"
                )
            with output.open("rb+") as file:
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(output, path)

    def _flags(self) -> list[str]:
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        how = ["-s", "-w", "-fPIC", "-shared", "-fvisibility=hidden"]
        return ["-std=c++20", self.optimize, *how, abi]


_all: list[Extension] = []


def after_fork_in_child() -> None:
    """Replace the locks: their owner may be a thread that does not exist in the child."""
    for extension in _all:
        extension._lock = threading.Lock()


def build_ahead(*extensions: Extension) -> None:
    """Load the modules; a thread builds the missing ones in the background, and the process waits for it at exit."""
    missing = []
    for extension in extensions:
        if extension.is_built():
            extension.load()
        else:
            missing.append(extension)
    if not missing or not _has_compiler():
        return
    sentence = "[ltc] building C++ parts, once for this user and this torch (some seconds)"
    print(sentence, file=sys.stderr, flush=True)

    def build() -> None:
        for extension in missing:
            extension.load()

    threading.Thread(target=build, name="ltc-build").start()


def _shown() -> contextlib.AbstractContextManager[None]:
    """A moving line while the main thread waits for the compiler."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    return progress.shown("building C++ parts, once for this user and this torch")


def _has_compiler() -> bool:
    try:
        return bool(compiler_command())
    except _Unavailable:
        return False


def compiler_command() -> list[str]:
    """The command of the C++ compiler.

    Raises:
        LookupError: there is none.
    """
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


def _include_flags() -> list[str]:
    # By hand: importing torch.utils.cpp_extension costs 40 ms.
    include = Path(torch.__file__).parent / "include"
    folders = [
        include,
        include / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_path("include")),
    ]
    return [f"-isystem{folder}" for folder in folders]


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[0][:300]
