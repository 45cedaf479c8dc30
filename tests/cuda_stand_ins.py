"""Import a CUDA build of PyTorch without CUDA: `python -m tests.cuda_stand_ins .venv-torch-2.15.0`.

The registry has no CPU build of most versions, and what a CUDA build links with takes 4 GB. `make test-torch` uses the
CPU alone: it installs PyTorch without these libraries, and this command puts one of no content beside PyTorch's own in
the place of each. Each function in it returns cudaErrorNoDevice, so `torch.cuda.is_available()` is False.
`torch.version.cuda` becomes None, as in a CPU build: else PyTorch warns that triton is not there.
"""

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["main", "put_stand_ins"]

_NAME = re.compile(r"lib(?:cu|nccl|nv)\w*\.so\.\d+")
_VERSION = re.compile(r"File: (\S+)  Cnt: 1\n.*Name: (\S+)")  # each of these files has one
_OURS = re.compile(r"_*(?:cu|nccl|nv)\w+").fullmatch  # symbols of CUDA that have no version
_NO_DEVICE = 100


def put_stand_ins(libraries: Path) -> list[str]:
    """Make what the libraries in `torch/lib` link with and do not find there. Return the names."""
    files = sorted(file for file in libraries.glob("*.so*") if not _NAME.fullmatch(file.name))
    needed = {name for file in files for name in _NAME.findall(_said("readelf", "-d", file))}
    missing = sorted(name for name in needed if not (libraries / name).exists())
    versions = {pair for file in files for pair in _VERSION.findall(_said("readelf", "-V", file))}
    undefined = {
        symbol
        for file in files
        for symbol in _said("nm", "-D", "--undefined-only", "--with-symbol-versions", file).split()
    }
    for name in missing:
        version = next((version for file, version in versions if file == name), "")
        wanted = {symbol.split("@")[0] for symbol in undefined if symbol.endswith(f"@{version}")}
        _make(libraries / name, wanted if version else set(filter(_OURS, undefined)), version)
    return missing


def _said(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _make(library: Path, symbols: set[str], version: str) -> None:
    # Functions that return a text are called to report an error.
    text = "".join(
        f"const char* {symbol}() {{ return {library.name!r}; }}\n".replace("'", '"')
        if symbol.endswith(("ErrorString", "ErrorName"))
        else f"long {symbol}() {{ return {_NO_DEVICE}; }}\n"
        for symbol in sorted(symbols)
    )
    script = library.with_suffix(".version")
    # glibc prints a warning about each library in which a version is missing.
    script.write_text(f"{version} {{ global: *; }};\n")
    command = ["g++", "-shared", "-fPIC", "-w", "-x", "c++", "-", "-o", str(library)]
    linker = f"-Wl,-soname,{library.name},--version-script,{script}"
    subprocess.run([*command, linker], input=f'extern "C" {{\n{text}}}', text=True, check=True)
    script.unlink()


def main() -> int:
    """Put them in the environment that is named."""
    (libraries,) = Path(sys.argv[1]).glob("lib/python*/site-packages/torch/lib")
    if made := put_stand_ins(libraries):
        version = libraries.parent / "version.py"
        version.write_text(re.sub(r"(?m)^cuda\b.*", "cuda = None", version.read_text()))
        print(f"a CUDA build, with stand-ins for {', '.join(made)}: for the CPU alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
