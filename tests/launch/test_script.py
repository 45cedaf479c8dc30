"""Scripts and modules that the launcher runs find what `python script.py` and `python -m module` would give them."""

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests.launching import ROOT, Job, launcher

pytestmark = pytest.mark.dist

# What Python promises to a script, by a script. `prefix` strips what the launcher puts before lines.
SELF = """
import os, pickle, sys

class Own:
    pass

print("file", __file__)
print("argv", sys.argv)
print("path0", sys.path[0])
print("spec", __spec__ and __spec__.name, __package__)
print("main", sys.modules["__main__"].Own is Own, type(pickle.loads(pickle.dumps(Own()))) is Own)
import beside
print("beside", beside.__file__)
"""


def by_python(command: list[str], directory: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def folder(tmp_path: Path, code: str = SELF) -> Path:
    """A package with a script, a link to the script, a zip file of it, and a module beside each."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("train.py", "__main__.py"):
        (package / name).write_text(textwrap.dedent(code))
    for path in (tmp_path, package):
        (path / "beside.py").touch()
    (tmp_path / "link.py").symlink_to("package/train.py")
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as file:
        file.writestr("__main__.py", textwrap.dedent(code))
        file.writestr("beside.py", "")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [["package/train.py", "a"], ["link.py"], ["train.zip"], ["-m", "package.train", "b"], ["-m", "package"]],
    ids=" ".join,
)  # fmt: skip
def test_a_script_finds_what_python_gives_it(command: list[str], tmp_path: Path) -> None:
    folder(tmp_path)
    code, out, err = Job([*launcher("--no-prefix"), *command], tmp_path).end()
    assert code == 0, err
    assert out == by_python(command, tmp_path)


MP_FN = """
    import os, pickle, sys
    from torch.utils.data import DataLoader

    class Numbers:
        def __len__(self): return 4
        def __getitem__(self, k): return float(k)

    os.chdir("/")

    def _mp_fn(index):
        assert type(pickle.loads(pickle.dumps(Numbers()))) is Numbers
        loader = DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="spawn")
        print([batch.tolist() for batch in loader])
"""


@pytest.mark.parametrize("command", [["package/train.py"], ["-m", "package.train"]], ids=" ".join)
def test_a_function_after_the_script_has_its_classes(command: list[str], tmp_path: Path) -> None:
    """The script has changed its directory: its path, and that of the logs, were relative."""
    folder(tmp_path, MP_FN)
    options = launcher("--nprocs", "2", "--log-dir", "logs")
    code, out, err = Job([*options, *command], tmp_path).end()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{k}] [[0.0, 1.0], [2.0, 3.0]]" for k in (0, 1)]


def test_a_failure_after_the_directory_has_changed(tmp_path: Path) -> None:
    folder(tmp_path, "import os; os.chdir('/'); raise LookupError('no such word')")
    options = launcher("--nprocs", "2", "--log-dir", "logs")
    code, out, err = Job([*options, "package/train.py"], tmp_path).end()
    assert code == 1 and err.count("LookupError: no such word") == 1
    assert f'File "{tmp_path}/package/train.py", line 1' in err and "script.py" not in err


def test_files_beside_the_user_do_not_replace_modules(tmp_path: Path) -> None:
    """The script is elsewhere, and is run from a folder that has files of such names."""
    place = folder(tmp_path, "import psutil, selectors, torch, ltc_core; print('done')")
    here = place / "here"
    here.mkdir()
    for name in ("psutil", "selectors", "torch", "ltc_core", "json"):
        (here / f"{name}.py").write_text(f"raise ImportError('{name}.py beside the user')")
    code, out, err = Job(
        [*launcher("--nprocs", "2"), "../package/train.py"], here, is_prepared=False
    ).end()
    assert code == 0 and sorted(out.splitlines()) == ["[0] done", "[1] done"], err


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    code, _, err = Job([*launcher("-m"), "no_such.module"], tmp_path).end()
    assert code == 1 and "No module named 'no_such'" in err
    code, _, err = Job([*launcher("-m"), "no_such"], tmp_path).end()
    assert code == 1 and "there is no module no_such that can be run" in err
