"""The compile service where a process matters: its end, its forks, its terminal, and others that ask for the same.

Each has a service of its own. Neither it nor the compiler's process imports PyTorch (bare_package.py), so they start
soon.
"""

import json
import os
import pty
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.core import child
from tests.core.runtime.process_ends import WAIT_S, all_gone, is_gone, pids_in


def left_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name != "work"}


# A process with a service: `submit(key, do, **more)` asks, `seen` holds outcomes, main says what happens.
PRELUDE = f"""
import json, os, sys, time
from pathlib import Path
from tests.core import bare_package
from tests.core.executors.inductor.fake_builder import BUILDER, request
from ltc_core.executors.inductor.compiler import service as module
from ltc_core.executors.inductor.compiler.service import CompileService
module._service = service = CompileService(BUILDER, Path(os.environ["ROOT"]))
seen = {{}}
def submit(key, do="", **more):
    service.submit(key * 8, request(do, **more), lambda outcome: seen.__setitem__(key, outcome))
def wait():
    assert service.wait_idle({WAIT_S})
def until_exists(path):
    while not os.path.exists(path):
        time.sleep(0.02)
STARTED = os.environ["ROOT"] + ".started"
"""


def start(code: str, root: Path, **environment: str) -> "subprocess.Popen[str]":
    environment = {"ROOT": str(root), "LTC_COMPILE_PRIORITY": "normal", **environment}
    return child.start(code, prelude=PRELUDE, **environment)


def run(code: str, root: Path, returncode: int = 0) -> tuple[str, str]:
    environment = {"ROOT": str(root), "LTC_COMPILE_PRIORITY": "normal"}
    return child.run(code, prelude=PRELUDE, returncode=returncode, **environment)


HANGING = "submit('k', 'sleep_with_child', started=STARTED)\nuntil_exists(STARTED)\n"


def test_of_those_that_ask_at_once_one_builds(tmp_path: Path) -> None:
    code = """
    submit("k", "sleep", seconds=0.5, started=STARTED, calls=os.environ["ROOT"] + ".calls")
    wait()
    print(json.dumps([str(seen["k"].path), seen["k"].from_cache, service._process is None]))
    """
    root = tmp_path / "root"
    waiting = [start(code, root) for _ in range(3)]
    answers = []
    for process in waiting:
        out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0 and err == "", err
        answers.append(json.loads(out))
    assert {answer[0] for answer in answers} == {str(root / ("k" * 8))}
    assert len((tmp_path / "root.calls").read_text().split()) == 1
    # Who waited for the other started no compiler.
    assert sorted(answer[1:] for answer in answers) == [
        [False, False],
        [True, True],
        [True, True],
    ]
    assert left_in(root) == {"k" * 8}


def test_a_builder_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with start(HANGING + "print('begun', flush=True)\ntime.sleep(1000)", root) as first:
        assert first.stdout is not None and first.stdout.readline() == "begun\n"
        with start("submit('k')\nwait()\nprint(seen['k'].from_cache)", root) as second:
            first.kill()
            out, err = second.communicate(timeout=WAIT_S)
    assert (out, err) == ("False\n", "")
    all_gone(pids_in(tmp_path / "root.started"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_parent_that_is_killed_leaves_no_process(tmp_path: Path, number: int) -> None:
    root = tmp_path / "root"
    with start(HANGING + "print('begun', flush=True)\ntime.sleep(1000)", root) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "begun\n"
        pids = pids_in(tmp_path / "root.started")
        parent.send_signal(number)
        assert parent.wait() == -number
    all_gone(pids)
    # What it was building is swept away by whoever builds next.
    assert any(name.endswith(".scratch") for name in left_in(root))
    run("submit('other')\nwait()", root)
    assert left_in(root) == {"other" * 8}


def test_a_parent_that_is_killed_while_the_compiler_starts(tmp_path: Path) -> None:
    code = """
    submit("k", "sleep", seconds=1000, started=STARTED)
    while service._process is None or service._process._process is None:
        time.sleep(0.001)
    print(service._process._process.pid, flush=True)
    time.sleep(1000)
    """
    with start(code, tmp_path / "root") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    all_gone([pid])


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise ValueError('mine')", "os._exit(4)"])
def test_an_end_while_it_compiles(tmp_path: Path, ending: str) -> None:
    """The exit does not wait for it, says nothing of it, and leaves nothing behind."""
    returncode = {"s": 3, "r": 1, "o": 4}[ending[0]]
    out, err = run(HANGING + "submit('later')\n" + ending, tmp_path / "root", returncode)
    assert out == "" and ("ValueError: mine" in err if ending[0] == "r" else err == "")
    all_gone(pids_in(tmp_path / "root.started"))
    if ending != "os._exit(4)":
        assert left_in(tmp_path / "root") == set()


def test_a_temporary_root_ends_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out, err = run("submit('k')\nwait()\nprint(seen['k'].path)", tmp_path / "file" / "root")
    assert "cannot be kept in" in err and not Path(out.strip()).parent.exists()


def test_forks_while_it_compiles(tmp_path: Path) -> None:
    """The parent's request goes on; the child's service is its own, and ends nothing of the parent's."""
    out, err = run(
        """
        submit("k", "sleep", seconds=1, started=STARTED)
        submit("next")
        until_exists(STARTED)
        pid = os.fork()
        if pid == 0:
            seen.clear()
            idle = service.wait_idle(0)
            submit("own")
            wait()
            print("child", idle, seen["own"].problem or seen["own"].path.name, list(seen), flush=True)
            service.shutdown()
            os._exit(5)
        print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        wait()
        print(*(seen[key].path.name for key in ("k", "next")))
        """,
        tmp_path / "root",
    )
    own, k, following = "own" * 8, "k" * 8, "next" * 8
    assert out.splitlines() == [f"child True {own} ['own']", "parent 5", f"{k} {following}"]
    assert err == ""


FORKS = {
    "before": "pid = fork()\nask()",
    "while it compiles": "ask()\npid = fork()",
    # As a library may do it: Python does not hear of it, and closes nothing.
    "from C": "import ctypes\nask()\npid = ctypes.CDLL(None).fork()\nif pid == 0: time.sleep(1000)",
}


@pytest.mark.parametrize("how", FORKS)
def test_a_forked_child_does_not_keep_the_compiler_alive(tmp_path: Path, how: str) -> None:
    """It has copies of the parent's descriptors; neither they nor it hold anything up."""
    code = """
    def fork():
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        return pid
    def ask():
        submit("k", "sleep_with_child", started=STARTED)
        until_exists(STARTED)
    """
    code = textwrap.dedent(code) + FORKS[how] + "\nprint(pid, flush=True)\ntime.sleep(1000)"
    root = tmp_path / "root"
    with start(code, root) as parent:
        assert parent.stdout is not None
        forked = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        all_gone(pids_in(tmp_path / "root.started"))
        assert not is_gone(forked)
        if how != "from C":  # there it holds the lock, too
            with start("submit('k')\nwait()\nprint(seen['k'].problem)", root) as later:
                assert later.communicate(timeout=WAIT_S) == ("\n", "")
        os.kill(forked, signal.SIGKILL)


def test_ctrl_c_in_a_terminal_does_not_reach_the_compiler(tmp_path: Path) -> None:
    terminal, inner = pty.openpty()
    code = """
    import fcntl, signal, termios
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    os.setsid()
    terminal = os.open(os.environ["TERMINAL"], os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    submit("k", "sleep", seconds=1, started=STARTED)
    until_exists(STARTED)
    try:
        print("ready", flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        wait()
        print(seen["k"].problem or seen["k"].path.name, flush=True)
    """
    with start(code, tmp_path / "root", TERMINAL=os.ttyname(inner)) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        os.write(terminal, b"\x03")
        out, err = parent.communicate(timeout=WAIT_S)
    os.close(terminal)
    os.close(inner)
    assert (out, err) == ("k" * 8 + "\n", "")
