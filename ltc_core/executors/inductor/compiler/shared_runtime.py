"""The part of a library that is the same for every program is compiled once, not with each: half of a compile's time.

PyTorch's compiler writes the C interface of its runtime into the wrapper code of each program, and the wrapper
instantiates the templates of the runtime's base class, among them those of `std::regex`. Here the interface is compiled
to an object of its own, with these templates. The wrapper is compiled without both, and linked with the object. Where
PyTorch's code is not as expected, each program is compiled whole. Used by `build_artifact`, in the compiler's process
only. Seconds for the wrapper of an MLP's step on one core: 7.5 before, 2.6 now, and 5.7 once for the object.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import codecache
from torch._inductor.cpp_builder import CppBuilder, get_compiler_version_info
from torch._inductor.runtime.cache_dir_utils import cache_dir

__all__ = ["shared"]

_INTERFACE = Path(torch.__file__).parent / "_inductor/codegen/aoti_runtime/interface.cpp"
_BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
_WRAPPER = ".wrapper."
_DIRECTORY = "ltc_runtime"
_TORCH = (torch.__version__, str(torch.version.git_version))

_compile: Callable[..., Any] = codecache.AotCodeCompiler.compile.__func__  # type: ignore[attr-defined]


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """A context in which one library is compiled; the object is made when it is first needed."""
    parts = _Parts()
    with (
        mock.patch.object(codecache.AotCodeCompiler, "compile", classmethod(parts.compile)),
        mock.patch.object(codecache, "CppBuilder", parts.builder),
    ):
        yield


class _Parts:
    """The parts of one library: what PyTorch's compiler does with them passes through here."""

    def __init__(self) -> None:
        self._runtime = ""  # the code of the object; empty: the library is compiled whole
        self._object: Path | None = None

    def compile(self, cls: type, graph: Any, wrapper_code: str, *args: Any, **kwargs: Any) -> Any:
        """In place of `AotCodeCompiler.compile`."""
        interface = _INTERFACE.read_text() if _INTERFACE.exists() else ""
        if interface and kwargs.get("device_type") == "cpu" and interface in wrapper_code:
            begin, _, rest = wrapper_code.partition(interface)
            self._runtime = f"{begin}{interface}\n{_BASE}"
            wrapper_code = f"{begin}\nextern {_BASE}{rest}"
        return _compile(cls, graph, wrapper_code, *args, **kwargs)

    def builder(
        self, name: str, sources: str | list[str], BuildOption: Any, output_dir: str = ""
    ) -> CppBuilder:
        """In place of `CppBuilder`: one compiler run."""
        first = sources if isinstance(sources, str) else sources[0]
        if self._runtime and _WRAPPER in first:
            if isinstance(sources, str):
                self._object = self._find_or_build(BuildOption)
            elif self._object is not None:
                sources = [*sources, str(self._object)]
        return CppBuilder(name, sources, BuildOption, output_dir)

    def _find_or_build(self, option: Any) -> Path:
        command = CppBuilder("o", "i", option).get_command_line()
        header = getattr(option, "precompiled_header", None)
        if header:  # makes no difference to the object
            command = command.replace(header, "")
        versions = get_compiler_version_info(option.get_compiler()), *_TORCH
        text = "\0".join((self._runtime, command.replace("-include ", ""), *versions))
        path = Path(cache_dir(), _DIRECTORY, f"{hashlib.sha256(text.encode()).hexdigest()}.o")
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # it is in use: not to be removed now to make room
            return path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=path.parent)
        try:
            Path(scratch, "runtime.cpp").write_text(self._runtime)
            CppBuilder("runtime", f"{scratch}/runtime.cpp", option, scratch).build()
            os.replace(f"{scratch}/runtime.o", path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return path
