"""Processes of a job are forks of one that has imported PyTorch, and cannot be told from processes that are not."""

import os
import signal
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from ltc_core.settings import settings
from ltc_dist.processes import kept_zygote, zygote
from ltc_dist.processes import spawn as xmp
from tests.launching import Job, launcher

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[3]

# What a process finds when its function begins.
FOUND = """
import json, os, random, signal, sys, threading
import numpy, torch
import ltc_dist as ltd

def found(rank):
    print(json.dumps({
        "rank": rank,
        "dynamo": "torch._dynamo" in sys.modules,
        "variables": sorted(os.environ.keys() - {"LTC_ZYGOTE"}),
        "numbers": [torch.rand(2).tolist(), numpy.random.rand(), random.random(), torch.rand(2, device="ltc").tolist()],
        "parent": os.getppid(),
        "own": [os.getpgrp() == os.getpid(), threading.active_count()],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)],
        "argv": sys.argv, "path": sys.path, "main": sys.modules["__main__"].__name__,
        "threads": torch.get_num_threads(),
    }), flush=True)
"""
SPAWNED = (
    FOUND
    + "\nif __name__ == '__main__':\n    print(os.getpid(), flush=True)\n    ltd.spawn(found, nprocs=2)\n"
)
LAUNCHED = FOUND + "\nfound(ltd.get_ordinal())\n"


def finds(directory: Path, script: str, is_launched: bool, **environ: str) -> list[dict[str, Any]]:
    import json

    (directory / "train.py").write_text(script)
    command = launcher("--nprocs", "2", "--no-prefix") if is_launched else [sys.executable]
    job = Job([*command, "train.py"], directory, is_prepared=False, **environ)
    code, out, err = job.end()
    assert (code, err) == (0, ""), err
    lines = [json.loads(line) for line in out.splitlines()]
    found = sorted(
        (line for line in lines if isinstance(line, dict)), key=lambda line: line["rank"]
    )
    assert len(found) == 2
    for line in found:
        assert line.pop("parent") == job.process.pid
    return found


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_fork_finds_what_a_new_process_finds(tmp_path: Path, is_launched: bool) -> None:
    script = LAUNCHED if is_launched else SPAWNED
    forked = finds(tmp_path, script, is_launched)
    new = finds(tmp_path, script, is_launched, LTC_ZYGOTE="0")
    assert [line.pop("dynamo") for line in forked + new] == [True, True, False, False]
    drawn = [str(number) for line in forked + new for number in line.pop("numbers")]
    assert (
        len(set(drawn)) >= 12
    )  # no process draws what another does; the device draws from PyTorch's generator
    assert forked == new


def test_any_number_of_tensors_is_sent(tmp_path: Path) -> None:
    """Each is a descriptor, of which a message takes some hundred."""
    xmp.spawn(
        save_sums, ([torch.full((2,), float(k)) for k in range(400)], str(tmp_path)), nprocs=2
    )
    assert [torch.load(tmp_path / str(rank)) for rank in range(2)] == [2.0 * sum(range(400))] * 2


def save_sums(rank: int, tensors: list[torch.Tensor], directory: str) -> None:
    torch.save(sum(float(tensor.sum()) for tensor in tensors), Path(directory) / str(rank))


def started(**environ: str) -> zygote.Zygote:
    return zygote.Zygote.start({**os.environ, **environ}, "json")


def test_it_says_how_the_process_ended_and_ends_itself() -> None:
    one = started()
    try:
        pid = one.fork(zygote.Call("os", "_exit", (7,)), {})
        assert pid is not None and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert os.getpgid(one.pid) == one.pid != os.getpgrp()
    finally:
        one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


def test_streams_variables_and_signal_mask_are_those_of_the_request() -> None:
    code = "import os, signal; print(os.environ['OF_THE_REQUEST'], signal.pthread_sigmask(0, []), flush=True)"
    one = started()
    read, write = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        pid = one.fork(
            zygote.Call("builtins", "exec", (code,)),
            {**os.environ, "OF_THE_REQUEST": "5"},
            streams={1: write},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        os.close(write)
        one.close()
    assert pid is not None and os.waitpid(pid, 0)[1] == 0
    with open(read) as file:
        assert file.read() == f"5 {{{signal.SIGUSR2!r}}}\n"


def test_it_survives_what_ends_a_job() -> None:
    one = started()
    try:
        assert one.is_ready()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(one.pid, number)
        pid = one.fork(zygote.Call("os", "_exit", (0,)), {})
        assert pid is not None and os.waitpid(pid, 0)[1] == 0
    finally:
        one.close()


def test_it_ends_when_a_request_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer would be taken for that to the next request."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    one = started()
    try:
        assert one.is_ready()
        monkeypatch.setattr(zygote, "_send_descriptors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.fork(zygote.Call("os", "_exit", (0,)), os.environ)
        assert one.has_ended()
        assert one.fork(zygote.Call("os", "_exit", (0,)), os.environ) is None
    finally:
        one.close()


@pytest.mark.parametrize("when", ["imports", "waits"])
def test_without_it_processes_start_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    start = zygote.Zygote.start.__func__  # type: ignore[attr-defined]

    def killed(cls: Any, *args: Any) -> zygote.Zygote:
        made: zygote.Zygote = start(cls, *args)
        assert when == "imports" or made.is_ready()
        os.kill(made.pid, signal.SIGKILL)
        return made

    kept_zygote.close()
    monkeypatch.setattr(zygote.Zygote, "start", classmethod(killed))
    xmp.spawn(save_sums, ([torch.ones(2)], str(tmp_path)), nprocs=2)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "code",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import sys, types; sys.modules['coverage'] = types.ModuleType('coverage')",
    ],
    ids=["a thread", "coverage"],
)
def test_what_was_started_with_python_forbids_it(tmp_path: Path, code: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    one = started(PYTHONPATH=path)
    try:
        assert not one.is_ready()
        assert one.fork(zygote.Call("os", "_exit", (0,)), {}) is None
    finally:
        one.close()


def test_an_import_that_fails_is_told_by_the_processes(tmp_path: Path) -> None:
    one = zygote.Zygote.start(os.environ, "a_module_that_is_not_there")
    try:
        assert not one.is_ready()
    finally:
        one.close()


def test_where_forks_are_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zygote.can_fork()
    for name, value in {"zygote": False, "device": "tpu"}.items():
        with monkeypatch.context() as patch:
            patch.setitem(vars(settings), name, value)
            assert not zygote.can_fork()
    other = EntryPoint("npu", "torch_npu:_autoload", "torch.backends")
    monkeypatch.setattr(zygote, "entry_points", lambda group: [other])
    assert not zygote.can_fork()


def test_the_launcher_is_found_by_the_name_of_its_script(tmp_path: Path) -> None:
    """`pkill -f train.py` and `ps` see each process under the command that the user has typed."""
    (tmp_path / "train.py").write_text(
        "print(open('/proc/self/cmdline').read().split(chr(0))[:-1])"
    )
    code, out, err = Job(
        launcher("--nprocs", "2", "--no-prefix", "train.py", "--lr", "1"),
        tmp_path,
        is_prepared=False,
    ).end()
    assert (code, err) == (0, "")
    assert {line.partition("'-P', ")[2] for line in out.splitlines()} == {
        "'-m', 'ltc_launch', '--nprocs', '2', '--no-prefix', 'train.py', '--lr', '1']"
    }
