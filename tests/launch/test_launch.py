"""`ltc-launch`: what processes find, how their ends are told, that nobody is left behind."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.launching import names_in

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]


class Launch:
    """One run of the launcher on a script."""

    def __init__(self, directory: Path, code: str, *options: str, **environ: str) -> None:
        (directory / "train.py").write_text(textwrap.dedent(code))
        kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ltc_launch",
                *options,
                str(directory / "train.py"),
                "one",
                "two",
            ],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**kept, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), **environ},
            start_new_session=True,
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=55)
        return self.process.returncode, out, err

    def children(self, count: int) -> list[psutil.Process]:
        """The processes, once so many have written a line."""
        assert self.process.stdout is not None
        for _ in range(count):
            assert self.process.stdout.readline()
        return psutil.Process(self.process.pid).children(recursive=True)


TELL = """
import os, sys
import torch
import ltc_dist as ltd
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MORE"]
print([os.environ.get(n) for n in names], torch.get_num_threads(), __name__, sys.argv[1:])
print(ltd.mesh_reduce("ranks", ltd.get_ordinal(), list))
x = ltd.all_reduce("sum", torch.ones(2, device=ltd.lazy_device()))
print(x.tolist())
"""


def test_a_step_that_fails_at_the_end_is_a_failure(tmp_path: Path) -> None:
    """Nobody reads its values, and eager would have raised."""
    code, _, err = Launch(
        tmp_path,
        """
        import torch
        import ltc_core as ltc
        x = torch.ones(3, device=ltc.lazy_device())
        y = x[torch.tensor([9], device=x.device)]
        ltc.mark_step()
        """,
    ).end()
    assert code == 1 and "index 9 is out of bounds" in err and "rank 0" in err.splitlines()[-1]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_that_are_closed_go_nowhere(closed: str, tmp_path: Path) -> None:
    """As a daemon's. What the processes print does not go into a file of another kind that has got the number."""
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "print('out', flush=True)\n"
        "print('err', file=sys.stderr, flush=True)\n"
        "open('seen-' + os.environ['RANK'], 'w').write('here')\n"
    )
    command = shlex.join([sys.executable, "-m", "ltc_launch", "--nprocs", "2", "train.py"])
    subprocess.run(
        ["bash", "-c", f"{command} {closed}"],
        cwd=tmp_path,
        check=True,
        timeout=55,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert {"seen-0", "seen-1"} <= set(names_in(tmp_path))


def test_what_a_process_finds(tmp_path: Path) -> None:
    code, out, err = Launch(tmp_path, TELL, "--nprocs", "2", "--env", "MORE=given").end()
    assert code == 0 and err == ""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert [line[4:] for line in out.splitlines() if line.startswith(f"[{rank}] ")] == [
            f"['{rank}', '2', '{rank}', '2', '127.0.0.1', 'given'] {threads} __main__ ['one', 'two']",
            "[0, 1]",
            "[2.0, 2.0]",
        ]
    assert names_in(tmp_path) == ["train.py"]


def test_one_process_without_a_prefix(tmp_path: Path) -> None:
    code, out, err = Launch(tmp_path, TELL).end()
    assert code == 0 and out.splitlines()[1:] == ["[0]", "[1.0, 1.0]"]


def test_a_script_of_functions_and_one_that_spawns(tmp_path: Path) -> None:
    only = "def _mp_fn(index): print('function', index)"
    spawns = """
    import ltc_dist.multiprocessing as xmp
    def _mp_fn(index, word): print(word, index)
    if __name__ == "__main__":
        xmp.spawn(_mp_fn, args=("function",))
    """
    for script in (only, spawns):
        code, out, _ = Launch(tmp_path, script, "--nprocs", "2").end()
        assert code == 0 and sorted(out.splitlines()) == ["[0] function 0", "[1] function 1"]


WAIT = """
import time
print("here")  # read while the process runs, though a pipe is not a terminal
while True:
    time.sleep(0.1)
"""


def test_the_launcher_is_stopped(tmp_path: Path) -> None:
    launch = Launch(tmp_path, WAIT, "--nprocs", "2")
    children = launch.children(2)
    launch.process.send_signal(signal.SIGTERM)
    code, _, err = launch.end()
    assert code == 143 and err == "ltc-launch: stopped by SIGTERM\n"
    assert not psutil.wait_procs(children, timeout=5)[1]


def test_everybody_listens_on_this_host_only(tmp_path: Path) -> None:
    script = """
    import time
    import torch, ltc_dist as ltd
    ltd.all_reduce("sum", torch.ones(2, device=ltd.lazy_device())).cpu()
    print("here", flush=True)
    time.sleep(600)
    """
    launch = Launch(tmp_path, script, "--nprocs", "2")
    processes = [psutil.Process(launch.process.pid), *launch.children(2)]
    listening = [c for p in processes for c in p.net_connections() if c.status == "LISTEN"]
    assert listening and {c.laddr.ip for c in listening} == {"127.0.0.1"}
    launch.process.terminate()
    assert launch.end()[0] == 143


def test_a_dry_run(tmp_path: Path) -> None:
    code, out, err = Launch(
        tmp_path, "1/0", "--nprocs", "2", "--dry-run", "--env", "API_TOKEN=x y", "--env", "A=x y"
    ).end()
    assert code == 0 and err == ""
    command, *rows = out.splitlines()
    assert command.endswith(f" {tmp_path}/train.py one two") and "-m ltc_launch.shim" in command
    assert [row.split(":")[0] for row in rows] == ["rank 0", "rank 1"]
    assert "API_TOKEN=(hidden) A='x y'" in rows[1] and "RANK=1 WORLD_SIZE=2" in rows[1]


def test_several_hosts(tmp_path: Path) -> None:
    """Two launchers on one host, each with one process."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    dirs = [tmp_path / "a", tmp_path / "b"]
    for d in dirs:
        d.mkdir()
    hosts = [Launch(d, TELL, *options, "--node-rank", str(k)) for k, d in enumerate(dirs)]
    for rank, (code, out, err) in enumerate([h.end() for h in hosts]):
        assert code == 0, err
        assert f"['{rank}', '2', '0', '1', '127.0.0.1'" in out and "[2.0, 2.0]" in out


LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as found:
    fcntl.ioctl(found, 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_no_network_is_needed(tmp_path: Path) -> None:
    """In a namespace that has a loopback interface and nothing else."""
    alone = ["unshare", "-rn", sys.executable, "-c", LOOPBACK_UP]
    if not shutil.which("unshare") or subprocess.run([*alone, "-c", "pass"]).returncode:
        pytest.skip("no network namespaces can be made here")
    (tmp_path / "train.py").write_text(TELL)
    done = subprocess.run(
        [*alone, "-m", "ltc_launch", "--nprocs", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2.0, 2.0]") == 2
