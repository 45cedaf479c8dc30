"""What `spawn` sends: arguments of any kind, from a script, a module, `python -` and `python -c`, as the function."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ltc_core.errors import RankError
from ltc_dist.processes import spawn as xmp
from tests import prepared
from tests.dist import spawned

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[3]

# Each process checks what it has got; it is the parent's to fail if one does.
OWN_CLASSES = """
import dataclasses, enum, os, sys
import ltc_dist.multiprocessing as xmp

@dataclasses.dataclass
class Config:
    width: int
    class Inner:
        depth = 3

class Kind(enum.Enum):
    BIG = "big"

def work(rank, config, inner, kind, double, classes, directory):
    assert (config.width, inner().depth, kind) == (7, 3, Kind.BIG), (config, inner, kind)
    assert double(4) == 8 and classes == (Config, Kind) and type(config) is Config
    open(os.path.join(directory, str(rank)), "x").close()

def main(method):
    values = (Config(7), Config.Inner, Kind.BIG, lambda x: 2 * x, (Config, Kind), sys.argv[1])
    xmp.spawn(work, values, nprocs=2, start_method=method)

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        main(method)
        assert sorted(os.listdir(sys.argv[1])) == ["0", "1"]
        for name in ("0", "1"):
            os.unlink(os.path.join(sys.argv[1], name))
"""
# All of it under the guard: a process that imports the script does not have these names.
UNDER_THE_GUARD = "if __name__ == '__main__':" + OWN_CLASSES.replace("\n", "\n    ")


def run(how: str, code: str, tmp_path: Path, is_prepared: bool = True) -> None:
    """Run a program that is given its working directory as its argument; its processes are prepared or start anew."""
    written = tmp_path / "written"
    written.mkdir()
    package = tmp_path / "package"
    package.mkdir()
    for name in ("train.py", "__main__.py"):
        (package / name).write_text(code)
    begin = {
        "script": [str(package / "train.py")],
        "module": ["-m", "package.train"],
        "package": ["-m", "package"],
        "directory": [str(package)],
        "-": ["-"],
        "-c": ["-c", code],
    }[how]
    done = prepared.run(
        [sys.executable, *begin, str(written)],
        starts_processes=is_prepared,
        input=code if how == "-" else "",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["script", "module", "package", "directory", "-", "-c"])
def test_classes_and_lambdas_of_the_program_as_arguments(how: str, tmp_path: Path) -> None:
    run(how, OWN_CLASSES, tmp_path)


@pytest.mark.parametrize("how", ["script", "-c"])
def test_classes_and_functions_that_stand_under_the_main_guard(how: str, tmp_path: Path) -> None:
    run(how, UNDER_THE_GUARD, tmp_path)


RAISES = """
import ltc_dist.multiprocessing as xmp

class Own(Exception):
    pass

def work(rank, kind):
    raise kind("of its own")

if __name__ == "__main__":
    try:
        xmp.spawn(work, (Own,), nprocs=2)
    except Own as error:
        assert error.args == ("of its own",)
"""


@pytest.mark.parametrize("how", ["script", "-", "-c"])
def test_an_exception_of_the_program_comes_back_as_its_own(how: str, tmp_path: Path) -> None:
    run(how, RAISES, tmp_path)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_queues_locks_and_shared_tensors_inside_what_goes_by_value(method: str) -> None:
    context = torch.multiprocessing.get_context(method)
    queue, lock = context.SimpleQueue(), context.Lock()
    shared = torch.zeros(2).share_memory_()

    def work(rank: int, held: dict[str, Any]) -> None:
        with lock:
            held["tensor"][rank] += held["of"](rank)
        queue.put(rank)

    xmp.spawn(work, ({"tensor": shared, "of": lambda r: r + 5},), nprocs=2, start_method=method)
    assert sorted(queue.get() for _ in range(2)) == [0, 1] and shared.tolist() == [5, 6]


def test_what_cannot_be_sent_is_named() -> None:
    for args, words in [
        ((1, threading.Lock()), "argument 1, <unlocked _thread.lock"),
        ((lambda: 1, [iter(open, 0)], (k for k in "")), "argument 2, <generator"),
    ]:
        with pytest.raises(RankError, match=f"{words}.* cannot be sent to another process"):
            xmp.spawn(spawned.tell, args, nprocs=2)


class Spy:
    """Sees the environment of the parent while it is pickled, which is while a process starts."""

    seen: list[dict[str, str]] = []

    def __reduce__(self) -> Any:
        self.seen.append(dict(os.environ))
        return str, ("more",)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_environment_of_the_parent_does_not_change(tmp_path: Path, method: str) -> None:
    before = dict(os.environ)
    Spy.seen.clear()
    xmp.spawn(spawned.tell, (str(tmp_path), Spy()), nprocs=2, start_method=method)
    assert Spy.seen == [before] * 2 and dict(os.environ) == before
    for rank in range(2):
        assert f"{rank}\n{rank}\n2" in (tmp_path / str(rank)).read_text()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_two_threads_at_a_time(tmp_path: Path, method: str) -> None:
    """As for hyperparameter trials. Each waits, while it starts its processes, until the other one does so too."""
    code = f"""
    import os, sys, threading
    import ltc_dist.multiprocessing as xmp
    from tests.dist import spawned

    def trial(name):
        directory = os.path.join(sys.argv[1], name)
        os.mkdir(directory)
        for _ in range(2):
            both.wait()
            xmp.spawn(spawned.tell, (directory,), nprocs=2, start_method={method!r})
            assert sorted(os.listdir(directory)) == ["0", "1"]
            for file in ("0", "1"):
                os.unlink(os.path.join(directory, file))
        ended.append(name)

    if __name__ == "__main__":
        both, ended, before = threading.Barrier(2), [], dict(os.environ)
        threads = [threading.Thread(target=trial, args=(name,)) for name in "ab"]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert sorted(ended) == ["a", "b"] and dict(os.environ) == before
    """
    import textwrap

    run("script", textwrap.dedent(code), tmp_path)


def test_a_file_in_the_working_directory_does_not_replace_a_module(
    tmp_path: Path,
) -> None:
    """Those that start, too, have the path of their parent, which is the folder of the script."""
    (tmp_path / "psutil.py").write_text("raise ImportError('this is not psutil')")
    run("script", OWN_CLASSES, tmp_path, is_prepared=False)
