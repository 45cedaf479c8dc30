"""Build all C++ parts ahead of time: `python -m ltc_core.build`, for launchers and images.

Otherwise each part is built on first use: a few seconds, once for each user and torch version. With `--wheel DIR`
(`make wheel`) a wheel is made that has them. Where it is installed, nothing is built if Python and torch are those that
it was made with; else the parts are built on first use, as without it.
"""

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from ltc_core.device import build as device
from ltc_core.errors import BuildError
from ltc_core.executors import host_memory
from ltc_core.executors.inductor import launcher
from ltc_core.executors.reference import replay
from ltc_core.native_extension import PREBUILT
from ltc_core.record import fast_path
from ltc_core.tensor import native_objects

__all__ = ["main", "make_wheel"]

EXTENSIONS = (
    device.extension,
    native_objects.extension,
    fast_path.extension,
    replay.extension,
    launcher.extension,
    host_memory.extension,
)
_TREE = Path(__file__).parents[1]
_SOURCES = ("ltc_core", "ltc_dist", "launch")
_FILES = ("ltc_autoload.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def main(arguments: list[str] | None = None) -> int:
    """Build the missing parts; return the number of parts that cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m ltc_core.build", description=__doc__)
    parser.add_argument("--wheel", type=Path, metavar="DIR", help="make a wheel with them in DIR")
    wheel_directory = parser.parse_args(arguments).wheel
    missing = [extension for extension in EXTENSIONS if extension.load() is None]
    for extension in EXTENSIONS:
        if extension in missing:
            reason = extension.unavailable_reason
            print(f"{extension.name} cannot be built: {reason}.", file=sys.stderr)
        elif wheel_directory is None:
            print(extension.loaded_path())
    if wheel_directory is not None and not missing:
        print(make_wheel(wheel_directory))
    return len(missing)


def make_wheel(directory: Path) -> Path:
    """Make a wheel of this source tree and its built C++ parts.

    Raises:
        BuildError: this is no source tree, a part cannot be built, or pip fails.
    """
    if not (_TREE / "setup.cfg").exists():
        raise BuildError(
            "a wheel is made from a source tree",
            got=f"no setup.cfg in {_TREE}",
            next="make wheel, in a checkout of ltc",
        )
    with tempfile.TemporaryDirectory(prefix="ltc-wheel-") as scratch:
        tree, made = Path(scratch) / "tree", Path(scratch) / "made"
        _copy_sources(tree)
        _add_prebuilt(tree / "ltc_core" / PREBUILT.name)
        _say_what_fits(tree / "setup.cfg")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        done = subprocess.run([*command, "-w", made, tree], capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(
                "pip cannot make the wheel",
                got=(done.stderr.strip().splitlines() or ["no message"])[-1],
                next="make setup, which installs pip and setuptools, then make wheel",
            )
        (wheel,) = made.glob("*.whl")
        directory.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, directory))


def _copy_sources(tree: Path) -> None:
    """Copy them: setuptools leaves files beside what it builds from."""
    tree.mkdir()
    for name in _SOURCES:
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(_TREE / name, tree / name, ignore=ignore)
    for name in _FILES:
        shutil.copy(_TREE / name, tree)


def _add_prebuilt(folder: Path) -> None:
    folder.mkdir()
    for extension in EXTENSIONS:
        if extension.load() is None:
            raise BuildError(
                f"{extension.name} cannot be built",
                got=extension.unavailable_reason,
                next="install g++ (Debian: apt install g++), or name a compiler in CXX",
            )
        shutil.copy(extension.loaded_path(), folder)


def _say_what_fits(setup_cfg: Path) -> None:
    """Put the version of torch into the wheel's version, Python and machine into its tags."""
    torch_version = re.sub(r"[^A-Za-z0-9]+", ".", str(torch.__version__))
    platform = re.sub(r"[^A-Za-z0-9]+", "_", sysconfig.get_platform())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    with setup_cfg.open("a") as file:
        file.write(
            f"\n[egg_info]\ntag_build = +torch{torch_version}\n"
            f"\n[bdist_wheel]\npython_tag = {python}\nplat_name = {platform}\n"
        )


if __name__ == "__main__":
    sys.exit(main())
