"""What gets installed: the packages of setup.cfg, under the names that are promised."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ltc_core", "ltc_dist", "launch")
SOURCES = (*PACKAGES, "ltc_autoload.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in: a build leaves files beside its sources."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, tree / name, ignore=ignore)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    return tree


def build(kind: str, source_tree: Path, out: Path) -> Path:
    """Build a wheel in this environment (setuptools is in [dev]) and unpack it."""
    command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=source_tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = out / "site"
    with zipfile.ZipFile(out / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    return site


@pytest.fixture(scope="module")
def wheel_site(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", source_tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def editable_site(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_editable", source_tree, tmp_path_factory.mktemp("editable"))


def run_with_site(site: Path, code: str, **variables: str) -> str:
    """Run code in a Python that has `site` installed and sees neither this tree nor its install."""
    prelude = (
        "import os, site, sys\n"
        f"sys.path[:] = [p for p in sys.path if os.path.realpath(p) != {str(ROOT)!r}]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in repr(f)]\n"
        f"sys.path.insert(0, {str(site)!r})\n"  # so that its metadata is found before another's
        f"site.addsitedir({str(site)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", prelude + code],
        cwd=site.parent,
        env={**os.environ, "LTC_AUTOLOAD": "0", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_of_the_tree_is_listed(setup_cfg: configparser.ConfigParser) -> None:
    in_tree = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in PACKAGES
        for path in (ROOT / top).rglob("__init__.py")
    }
    renamed = {
        "ltc_launch" + name.removeprefix("launch") if name.split(".")[0] == "launch" else name
        for name in in_tree
    }
    assert set(setup_cfg["options"]["packages"].split()) == renamed


def test_every_python_file_is_in_a_package() -> None:
    for top in PACKAGES:
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_wheel_holds_our_packages_only(
    wheel_site: Path, setup_cfg: configparser.ConfigParser
) -> None:
    packages = {name.split(".")[0] for name in setup_cfg["options"]["packages"].split()}
    version = setup_cfg["metadata"]["version"]
    wanted = {*packages, "ltc_autoload.py", f"ltc-{version}.dist-info"}
    assert {path.name for path in wheel_site.iterdir()} == wanted
    assert "launch" not in packages


def test_wheel_holds_what_the_device_is_built_from(wheel_site: Path) -> None:
    sources = {path.name for path in (ROOT / "ltc_core" / "device" / "csrc").iterdir()}
    installed = {path.name for path in (wheel_site / "ltc_core" / "device" / "csrc").iterdir()}
    assert sources and installed == sources
    assert (wheel_site / "ltc_core" / "py.typed").exists()


@pytest.mark.parametrize("kind", ["wheel_site", "editable_site"])
def test_launch_is_importable_as_ltc_launch_only(kind: str, request: pytest.FixtureRequest) -> None:
    site = request.getfixturevalue(kind)
    code = (
        "import importlib.util, ltc_launch\n"
        "print(ltc_launch.__name__)\n"
        "for name in ('launch', 'tests', 'examples', 'benchmarks'):\n"
        "    print(importlib.util.find_spec(name))\n"
    )
    assert run_with_site(site, code).split() == ["ltc_launch", "None", "None", "None", "None"]


def test_installing_alone_changes_nothing(wheel_site: Path) -> None:
    code = (
        "import importlib.metadata as metadata\n"
        "print([entry.value for entry in metadata.entry_points(group='torch.backends')])\n"
        "import torch\n"
        "print(torch._C._get_privateuse1_backend_name(), torch.accelerator.current_accelerator())\n"
    )
    without = run_with_site(wheel_site, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ":load" in without.splitlines()[0]
    assert run_with_site(wheel_site, code, TORCH_DEVICE_BACKEND_AUTOLOAD="1") == without
    assert run_with_site(wheel_site, code, LTC_AUTOLOAD="1") != without
