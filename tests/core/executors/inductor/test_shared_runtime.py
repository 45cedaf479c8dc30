"""What is the same in every library is compiled once; a library that is not as expected is compiled whole."""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ltc_core.executors.artifacts import WORK
from tests.compiled_cache import empty_cache
from tests.core import child

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's compiler uses what PyTorch deprecates
    from ltc_core.executors.inductor.compiler import shared_runtime

BEGIN, REST = "#include <torch/csrc/inductor/aoti_include/cpu.h>\n", "\nint program = 1;\n"
INTERFACE = shared_runtime._INTERFACE.read_text()


class Option:
    """The flags of a compiler run."""

    def get_compiler(self) -> str:
        return "g++"


class Compiler:
    """PyTorch's: what it is given, and the sources of each run. Objects that it builds are empty files."""

    def __init__(self) -> None:
        self.wrapper_code = ""
        self.runs: list[str | Sequence[str]] = []

    def compile(self, cls: type, graph: Any, wrapper_code: str, **options: Any) -> None:
        self.wrapper_code = wrapper_code
        for sources in ("header.h", "a.wrapper.cpp", "a.kernel.cpp", ["a.wrapper.o", "a.kernel.o"]):
            builder = shared_runtime.codecache.CppBuilder(
                name="a", sources=sources, BuildOption=Option()
            )
            builder.build()

    def builder(
        self, name: str, sources: str | Sequence[str], option: Any, output_dir: str = ""
    ) -> Any:
        compiler = self

        class Builder:
            def get_command_line(self) -> str:
                return "g++ -O0"

            def build(self) -> None:
                compiler.runs.append(sources)
                if name == "runtime":
                    assert "extern template" not in Path(str(sources)).read_text()
                    Path(output_dir, "runtime.o").touch()

        return Builder()

    def library(self, wrapper_code: str, device_type: str = "cpu") -> None:
        self.runs = []
        with shared_runtime.shared():
            shared_runtime.codecache.AotCodeCompiler.compile(
                None, wrapper_code, device_type=device_type
            )


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(shared_runtime, "_compile", found.compile)
    monkeypatch.setattr(shared_runtime, "CppBuilder", found.builder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return found


def test_the_interface_is_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    compiler.library(BEGIN + INTERFACE + REST)
    header, runtime, wrapper, kernel, linked = compiler.runs
    assert (header, wrapper, kernel) == ("header.h", "a.wrapper.cpp", "a.kernel.cpp")
    (object_,) = (tmp_path / "ltc_runtime").iterdir()
    assert str(runtime).endswith("runtime.cpp")
    assert linked == ["a.wrapper.o", "a.kernel.o", str(object_)]
    assert compiler.wrapper_code.startswith(BEGIN) and compiler.wrapper_code.endswith(REST)
    assert "AOTInductorModelContainerRun" not in compiler.wrapper_code
    assert "extern template class" in compiler.wrapper_code

    compiler.library(BEGIN + INTERFACE + "\nint program = 2;\n")
    assert compiler.runs == ["header.h", wrapper, kernel, linked]


@pytest.mark.parametrize(
    ("wrapper_code", "device_type"), [(BEGIN + REST, "cpu"), (BEGIN + INTERFACE + REST, "cuda")]
)
def test_another_library_is_compiled_whole(
    compiler: Compiler, wrapper_code: str, device_type: str, tmp_path: Path
) -> None:
    compiler.library(wrapper_code, device_type)
    assert compiler.wrapper_code == wrapper_code and len(compiler.runs) == 4
    assert list(tmp_path.iterdir()) == []


def test_pytorch_s_libraries_are_as_expected(tmp_path: Path) -> None:
    began = time.time() - 1
    cache = empty_cache(tmp_path / "compiled")
    out, err = child.run(
        """
        x = torch.arange(6.0, device=device)
        torch.testing.assert_close((x.sin() * 3 + x.cos()).cpu(), x.cpu().sin() * 3 + x.cpu().cos())
        """,
        LTC_COMPILE="sync",
        LTC_COMPILED_CACHE_DIR=cache,
    )
    assert out == err == ""
    objects = Path(cache, WORK, "ltc_runtime").glob("*.o")
    assert any(path.stat().st_mtime > began for path in objects)
