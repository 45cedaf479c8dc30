"""A wheel with built C++ parts: where it fits nothing is built, elsewhere the parts are built from source.

It is installed in an empty environment that sees this one's PyTorch by a .pth file, on a machine without a compiler.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from ltc_core import build, errors

ROOT = Path(__file__).parents[1]
PURELIB = Path(sysconfig.get_path("purelib"))

TRAIN = """
import threading
import torch
import ltc_core as ltc
from ltc_core import native_extension
from ltc_core.executors.reference import replay
from ltc_core.record import fast_path

device = ltc.lazy_device()
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    ltc.mark_step()
ltc.wait_device_ops()
assert torch.isfinite(loss.cpu())
for thread in threading.enumerate():
    if thread.name == "ltc-build":
        thread.join()
print(native_extension.PREBUILT)
for extension in (fast_path.extension, replay.extension):
    print(extension.loaded.__file__ if extension.loaded else extension.unavailable_reason)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def python(wheel: Path, tmp_path: Path) -> Path:
    """The interpreter of an empty environment with the wheel, and with PyTorch by a .pth file."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site_of(python) / "base.pth").write_text(f"{PURELIB}\n")
    return python


def site_of(python: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return python.parents[1] / "lib" / version / "site-packages"


def train(python: Path, cache: Path, **environ: str) -> tuple[list[str], str]:
    """Train two steps; return the lines of stdout, and stderr."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LTC_", "PYTHON", "CXX"))}
    # -P: without the directory that it runs in.
    done = subprocess.run(
        [python, "-P", "-c", TRAIN],
        cwd=cache.parent,
        env={**kept, "LTC_CACHE_DIR": str(cache), **environ},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], done.stderr


def test_its_name_says_what_it_fits(wheel: Path) -> None:
    version = str(torch.__version__).replace("+", ".")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"ltc-0.1.0+torch{version}-{python}-none-linux_")


def test_where_it_fits_nothing_is_built(python: Path, tmp_path: Path) -> None:
    empty, cache = tmp_path / "bin", tmp_path / "cache"
    empty.mkdir()
    cache.mkdir(mode=0o700)
    (folder, *loaded), err = train(python, cache, PATH=str(empty), LTC_COMPILE_AFTER="1")
    assert folder == str(site_of(python) / "ltc_core" / "_built")
    assert len(loaded) == 2 and all(Path(file).parent == Path(folder) for file in loaded)
    why = "there is no C++ compiler (no g++ on the PATH)"
    assert err == f"[ltc] no graph is compiled, all run op by op: {why}\n"
    assert not list(cache.rglob("*.so"))
    assert {path.name for path in Path(folder).iterdir()} == {
        extension.library_path().name for extension in build.EXTENSIONS
    }


@pytest.mark.parametrize("what", ["another key", "damaged"])
def test_where_it_does_not_fit_the_parts_are_built(what: str, python: Path, tmp_path: Path) -> None:
    """By a compiler that copies built files: to build them takes two minutes of a core."""
    package = site_of(python) / "ltc_core"
    built = sorted((package / "_built").iterdir())
    for file in built:
        if what == "another key":
            file.rename(file.with_name(file.name.replace("-torch", "-torch9.")))
        else:
            file.write_bytes(file.read_bytes()[:-1])
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    copies = "\n".join(
        f'*{extension.name}-*) cp {extension.loaded_path()} "$2" ;;'
        for extension in build.EXTENSIONS
        if extension.load()
    )
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncase "$2" in\n{copies}\nesac\n'
    )
    compiler.chmod(0o755)
    (folder, *loaded), err = train(python, cache, CXX=str(compiler))
    assert len(loaded) == 2 and all(Path(file).parent == cache / "extensions" for file in loaded)
    if what == "another key":  # of a damaged file it is known when it is loaded
        assert err == "[ltc] building C++ parts, once for this user and this torch (some seconds)\n"
    assert len(list(Path(folder).iterdir())) == len(build.EXTENSIONS)


def test_a_wheel_is_made_from_a_source_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "_TREE", tmp_path)
    with pytest.raises(errors.BuildError, match="a wheel is made from a source tree") as raised:
        build.make_wheel(tmp_path)
    assert raised.value.next == "make wheel, in a checkout of ltc"
