"""`spawn`: real processes, their environment, failures told once by the one that failed first, nobody left behind."""

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core.errors import PeerEndedError, RankError, RankTimeoutError
from ltc_dist.processes import spawn as xmp
from ltc_dist.processes.failures import last_line
from ltc_dist.processes.main_guard import is_unguarded
from tests import prepared
from tests.dist import spawned
from tests.launching import Job, launcher

pytestmark = pytest.mark.dist
METHODS = ("spawn", "fork", "forkserver")


def rows(directory: Path) -> list[list[str]]:
    return [p.read_text().split("\n") for p in sorted(directory.iterdir())]


@pytest.mark.parametrize("method", METHODS)
def test_each_process_knows_who_it_is(tmp_path: Path, method: str) -> None:
    xmp.spawn(spawned.tell, (str(tmp_path), "more"), nprocs=3, start_method=method)
    found = rows(tmp_path)
    assert [r[:5] for r in found] == [[str(k), str(k), "3", str(k), "3"] for k in range(3)]
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert {r[5] for r in found} == {"1" if method == "fork" else str(threads)}
    assert len({r[6] for r in found} | {str(os.getpid())}) == 4
    assert {tuple(r[7:]) for r in found} == {("127.0.0.1", str(threads), "1", "more")}
    assert "RANK" not in os.environ


def test_the_users_number_of_threads_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    xmp.spawn(spawned.tell, (str(tmp_path),), nprocs=2)
    assert {r[5] for r in rows(tmp_path)} == {"3"}


def test_one_process_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    xmp.spawn(lambda rank, k: pids.append(os.getpid() + rank + k), (0,), nprocs=1)
    xmp.spawn(lambda rank: pids.append(os.getpid()))  # LTC_NUM_DEVICES says one
    assert pids == [os.getpid()] * 2


@pytest.mark.parametrize("method", METHODS)
def test_lambdas_and_closures(tmp_path: Path, method: str) -> None:
    word = "closed over"
    write = lambda rank: Path(tmp_path, str(rank)).write_text(f"{word} {rank}")  # noqa: E731
    xmp.spawn(write, nprocs=2, start_method=method)
    assert rows(tmp_path) == [["closed over 0"], ["closed over 1"]]


@pytest.mark.parametrize("method", METHODS)
def test_the_device_may_be_used_in_the_parent_before(tmp_path: Path, method: str) -> None:
    """A parent of its own: PyTorch refuses backward in a process forked from one that has run a backward."""
    code = f"""
    import torch
    import ltc_core as ltc
    from ltc_dist import multiprocessing as xmp
    from tests.dist import spawned

    if __name__ == "__main__":
        assert float((torch.ones(4, device=ltc.lazy_device()) * 2).sum()) == 8
        xmp.spawn(spawned.train, ({str(tmp_path)!r},), nprocs=2, start_method={method!r})
    """
    parent = start(tmp_path, code)
    _, err = parent.communicate(timeout=50)
    assert parent.returncode == 0, err
    first, second = (torch.load(tmp_path / f"{k}.pt") for k in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_without_waiting(tmp_path: Path) -> None:
    context = xmp.spawn(
        spawned.wait_for_ever, (str(tmp_path),), nprocs=2, join=False, start_method="forkserver"
    )
    assert context is not None and not context.join(timeout=0.1)
    for pid in context.pids():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        context.join()


TUTORIAL = """
import os, sys, socket
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import ltc_core as ltc, ltc_dist as ltd
from ltc_dist.processes import spawn as xmp

def demo(rank, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    ours = torch.nn.Linear(1, 1).to(ltc.lazy_device())
    ours(torch.full((1, 1), rank + 1.0, device=ltc.lazy_device())).sum().backward()
    ltd.reduce_gradients(torch.optim.SGD(ours.parameters(), 0.1))  # meets at the job's own store
    dist.destroy_process_group()
    print(model.module.weight.grad.tolist(), ours.weight.grad.tolist(), flush=True)

if __name__ == "__main__":
    if len(sys.argv) == 1:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        xmp.spawn(demo, args=(port,), nprocs=2)
    else:
        demo(int(os.environ["RANK"]), int(sys.argv[1]))
"""


@pytest.mark.parametrize("method", METHODS)
def test_no_process_outlives_a_killed_parent(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent(f"""
            import os, signal, time
            from pathlib import Path
            import ltc_dist as ltd

            def wait(rank):
                Path(f"{{os.getpid()}}.rank").touch()
                time.sleep(600)

            if __name__ == "__main__":
                context = ltd.spawn(wait, nprocs=2, join=False, start_method={method!r})
                while len(list(Path().glob("*.rank"))) < 2:
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = prepared.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, timeout=100, starts_processes=True
    )
    assert done.returncode == -signal.SIGKILL
    ranks = [int(path.stem) for path in tmp_path.glob("*.rank")]
    assert len(ranks) == 2
    for _ in range(400):
        if not any(map(psutil.pid_exists, ranks)):
            return
        time.sleep(0.05)
    pytest.fail(f"{ranks} are still there")


@pytest.mark.parametrize("how", ["spawn", "launcher"])
def test_a_script_may_set_its_own_master_port(tmp_path: Path, how: str) -> None:
    """As PyTorch's DDP tutorial does."""
    (tmp_path / "script.py").write_text(TUTORIAL)
    if how == "spawn":
        command = [sys.executable, "script.py"]
    else:
        with socket.create_server(("localhost", 0)) as probe:
            port = probe.getsockname()[1]
        command = [*launcher("--nprocs", "2"), "script.py", str(port)]
    code, out, err = Job(command, tmp_path).end(within_s=60)
    lines = [line[-len("[[1.5, 1.5]] [[1.5]]") :] for line in out.splitlines()]  # past "[0] "
    assert (code, lines) == (0, ["[[1.5, 1.5]] [[1.5]]"] * 2), err


AFTER_SIGTERM = """
import signal, sys, time
from ltc_dist.processes import spawn as xmp

def goes_on(rank):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("runs", flush=True)
    time.sleep(100)

def fails(rank):
    def end(number, frame):
        raise OSError(f"rank {rank} cannot save its work")
    if rank == 1:
        signal.signal(signal.SIGTERM, end)
    print("runs", flush=True)
    time.sleep(100)

if __name__ == "__main__":
    if sys.argv[1] == "fails":
        xmp.spawn(fails, nprocs=2)
    xmp._SIGTERM_GRACE_S = 1.0
    xmp.spawn(goes_on, nprocs=2)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fails", "OSError: rank 1 cannot save its work\nltc: rank 1 (pid"),
        ("goes on", "ltc: rank 0 still ran 1 s after SIGTERM, and was killed\nltc: rank 1 still"),
    ],
)
def test_what_processes_do_after_sigterm_is_told(tmp_path: Path, how: str, said: str) -> None:
    (tmp_path / "script.py").write_text(AFTER_SIGTERM)
    job = Job([sys.executable, "script.py", how], tmp_path)
    job.wait_for("runs", times=2)
    job.process.terminate()
    code, _, err = job.end(within_s=30)
    assert code == -signal.SIGTERM and said in err, err


def test_one_that_has_failed_before_it_is_waited_for(tmp_path: Path) -> None:
    context = xmp.spawn(
        spawned.wait_for_ever, (str(tmp_path),), nprocs=2, join=False, start_method="forkserver"
    )
    assert context is not None
    os.kill(context.pids()[1], signal.SIGKILL)
    context.processes[1].join()
    with pytest.raises(RankError, match="rank 1 (?s:.*)was killed by SIGKILL"):
        context.join(timeout=20)
    assert all(p.exitcode is not None for p in context.processes)


class TestFailures:
    def test_the_exception_is_raised_here(self) -> None:
        error = KeyError("no such thing")
        with pytest.raises(KeyError, match="no such thing") as caught:
            xmp.spawn(spawned.fail, (1, error), nprocs=3)
        note = "\n".join(caught.value.__notes__)
        assert "raised by rank 1 (pid " in note and "spawned.py" in note and "raise error" in note

    def test_one_that_cannot_be_sent_arrives_as_text(self) -> None:
        fails = lambda rank: spawned.fail(rank, 0, spawned.Odd("strange"))  # noqa: E731
        with pytest.raises(RankError, match="Odd: strange") as caught:
            xmp.spawn(fails, nprocs=2, start_method="forkserver")
        assert "raised by rank 0" in caught.value.__notes__[0]

    @pytest.mark.parametrize("method", ["spawn", "fork"])
    def test_one_that_is_larger_than_a_pipe(self, method: str) -> None:
        error = ValueError("x" * 200_000)
        error.add_note("n" * 300_000)
        with pytest.raises(ValueError) as caught:
            xmp.spawn(spawned.fail, (1, error), nprocs=2, start_method=method)
        assert str(caught.value) == "x" * 200_000
        first, second = caught.value.__notes__
        assert first == "n" * 300_000 and "raised by rank 1 (pid " in second

    def test_one_that_nobody_waits_for_yet(self) -> None:
        error = ValueError("x" * 200_000)
        context = xmp.spawn(spawned.fail, (1, error), nprocs=2, join=False, start_method="fork")
        assert context is not None
        context.processes[1].join(30)
        assert context.processes[1].exitcode == 1
        with pytest.raises(ValueError, match="^xxx"):
            context.join()

    @pytest.mark.parametrize(
        ("kind", "text"), [("Mute", "Mute: "), ("Changed", "Changed: odd"), ("Odd", "Odd: odd")]
    )
    def test_one_of_an_odd_kind(self, kind: str, text: str) -> None:
        def fails(rank: int) -> None:
            spawned.fail(rank, 1, getattr(spawned, kind)("odd"))

        with pytest.raises((RankError, spawned.Mute)) as caught:
            xmp.spawn(fails, nprocs=2, start_method="fork")
        assert text in last_line(caught.value)
        assert "raised by rank 1 (pid " in caught.value.__notes__[-1]

    @pytest.mark.parametrize(
        "first",
        [
            1,
            "handled",
            PeerEndedError("rank 1 has ended while rank 0 waits for it"),
            RankTimeoutError("rendezvous 'a' was not complete after 5 s"),
        ],
        ids=["exit", "handled", "lost", "timeout"],
    )
    def test_the_cause_comes_after_its_consequence(self, first: Any) -> None:
        with pytest.raises(LookupError, match="the cause") as caught:
            xmp.spawn(spawned.fail_late, (first,), nprocs=2, start_method="fork")
        assert "raised by rank 1 (pid " in caught.value.__notes__[-1]

    @pytest.mark.parametrize(
        ("how", "text", "code"),
        [
            ("exit", "ended with exit code 7", 7),
            ("SIGKILL", "was killed by SIGKILL; (?s:.*)out of memory", -9),
            ("SIGSEGV", "was killed by SIGSEGV", -11),
        ],
    )
    def test_other_ends(self, how: str, text: str, code: int) -> None:
        started = time.monotonic()
        with pytest.raises(RankError, match=rf"rank 1 \(pid \d+\) {text}") as caught:
            xmp.spawn(spawned.end, (how,), nprocs=2, start_method="forkserver")
        assert caught.value.exitcode == code and time.monotonic() - started < 30

    def test_what_cannot_be_started(self) -> None:
        with pytest.raises(RankError, match="nprocs must be a whole number(?s:.*)got: 0"):
            xmp.spawn(spawned.tell, nprocs=0)
        with pytest.raises(RankError, match="no start method 'thread'"):
            xmp.spawn(spawned.tell, nprocs=2, start_method="thread")
        with pytest.raises(RankError, match="spawn needs a function"):
            xmp.spawn("tell", nprocs=2)  # type: ignore[arg-type]
        with pytest.raises(
            RankError, match=r"args of spawn is the sequence(?s:.*)pass args=\(5,\)"
        ):
            xmp.spawn(spawned.tell, args=5, nprocs=2)  # type: ignore[arg-type]
        lock = __import__("threading").Lock()
        with pytest.raises(RankError, match="cannot be sent to another process"):
            xmp.spawn(lambda rank: lock, nprocs=2)

    def test_a_job_in_a_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RankError, match=r"spawn\(nprocs=3\) was called(?s:.*)rank 1 of 2"):
            xmp.spawn(spawned.tell, nprocs=3)
        called: list[int] = []
        xmp.spawn(called.append)
        xmp.spawn(called.append, nprocs=2)
        assert called == [1, 1]


def test_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0")
    xmp.spawn(spawned.serial, (str(file),), nprocs=3, start_method="forkserver")
    assert file.read_text() == "9"


def test_a_wrapped_model(tmp_path: Path) -> None:
    wrapped = ltd.MpModelWrapper(torch.nn.Linear(2, 2))
    assert wrapped.to(ltc.lazy_device()).weight.device == ltc.lazy_device()


# -- scripts ---------------------------------------------------------------------------------------


def start(tmp_path: Path, code: str, *command: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    return prepared.start(  # type: ignore[no-any-return]
        [*command, sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        start_new_session=True,
        **({} if command else {"starts_processes": True}),
    )


WAITING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
import ltc_dist.multiprocessing as xmp

def wait(rank):
    print("here", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    xmp.spawn(wait, nprocs=2)
"""


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The children, once both have said that they are there."""
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("command", [(), ("nohup",)])
def test_no_process_outlives_its_parent(tmp_path: Path, command: tuple[str, ...]) -> None:
    parent = start(tmp_path, WAITING, *command)
    children = children_of(parent)
    assert len(children) >= 2
    parent.kill()
    parent.communicate(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


@pytest.mark.parametrize("whole_group", [True, False])
def test_ctrl_c_ends_all(tmp_path: Path, whole_group: bool) -> None:
    parent = start(tmp_path, WAITING)
    children = children_of(parent)
    (os.killpg if whole_group else os.kill)(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode == -signal.SIGINT and err.count("Traceback") == 1
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_without_the_guard(tmp_path: Path) -> None:
    code = """
    import ltc_dist.multiprocessing as xmp
    def work(rank): print("never")
    xmp.spawn(work, nprocs=2)
    """
    out, err = start(tmp_path, code).communicate(timeout=50)
    assert out == "" and "put it under if __name__ == '__main__'" in err
    assert err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("check()", True),
        ("if __name__ == '__main__':\n    check()", False),
        ("def main():\n    check()\n\nmain()", True),
        ("def main():\n    check()\n\nif __name__ == '__main__':\n    main()", False),
        ("for _ in range(1):\n    check()", True),
    ],
)
def test_the_guard_is_looked_for(tmp_path: Path, code: str, expected: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    answers: list[bool] = []
    names: dict[str, Any] = {
        "__name__": "__main__",
        "check": lambda: answers.append(is_unguarded(sys._getframe(1))),
    }
    exec(compile(code, str(script), "exec"), names)
    assert answers == [expected]


@pytest.mark.dist
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_tensors_of_the_device_as_arguments(tmp_path: Path, start_method: str) -> None:
    tensor = torch.arange(3.0, device=ltc.lazy_device()) + 1
    weight = torch.nn.Linear(2, 2).to(ltc.lazy_device()).weight
    xmp.spawn(spawned.take, (tensor, weight, str(tmp_path)), nprocs=2, start_method=start_method)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found[0].tolist() == [1, 2, 3] and torch.equal(found[1], weight.detach().cpu())


@pytest.mark.dist
def test_processes_keep_their_store_when_nobody_keeps_their_context(tmp_path: Path) -> None:
    xmp.spawn(
        spawned.meet_and_tell, (str(tmp_path),), nprocs=2, join=False, start_method="forkserver"
    )
    gc.collect()
    while len(list(tmp_path.glob("begun*"))) < 2:
        time.sleep(0.01)
    (context,) = xmp._running
    (tmp_path / "go").touch()
    context.join()
    assert len(list(tmp_path.glob("met*"))) == 2 and not xmp._running


def test_a_process_forked_while_a_thread_starts_others_may_start_its_own() -> None:
    with xmp._starting:
        pid = os.fork()
        if pid == 0:
            os._exit(int(xmp._starting.locked()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
