"""Worker processes outlive SIGTERM to their group, however they are started; a checkpoint is made."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ltc_dist as ltd
from ltc_dist.data import workers
from tests import prepared
from tests.core import child
from tests.launching import Job

ROOT = Path(__file__).parents[3]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "lifetime", "moment"),
    [
        ("ours", "once", "begun"),
        ("ours", "persistent", "read"),
        ("plain", "persistent", "begun"),
        ("plain", "once", "read"),
    ],
)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_sigterm_to_the_group_becomes_a_checkpoint(
    tmp_path: Path, method: str, kind: str, lifetime: str, moment: str
) -> None:
    program = [sys.executable, "-m", "tests.dist.data.interrupted_loading"]
    found = prepared.run(
        [*program, str(tmp_path), method, kind, lifetime, moment],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
        starts_processes=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 143, found.stderr
    expected = [f"after {7 if moment == 'read' else 8}"]
    if lifetime == "persistent":
        expected += ["again 8", "alive True"]
    assert found.stdout.splitlines() == expected
    assert (tmp_path / "step_000000001").is_dir()


class SignalMask(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.parametrize("was_blocked", [False, True])
def test_the_signal_mask_is_that_of_before(was_blocked: bool) -> None:
    """In the training thread, and in the workers once they have begun."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK if was_blocked else signal.SIG_UNBLOCK, [signal.SIGTERM]
    )
    try:
        batches = workers.begin(DataLoader(SignalMask(), 2, num_workers=1))
        assert [b.tolist() for b in batches] == [[was_blocked] * 2] * 2
        assert (signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])) == was_blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_worker_that_is_killed_leaves_no_temporary_directory(tmp_path: Path) -> None:
    """It sends its batches through a socket there."""
    script = """
import os, signal, torch
from torch.utils.data import DataLoader
from ltc_dist.data import workers

if __name__ == "__main__":
    batches = workers.begin(DataLoader(torch.arange(2.0), 2, num_workers=1))  # idle after one batch
    print(next(batches).tolist())
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    batches._workers[0].join()
"""
    (tmp_path / "script.py").write_text(script)
    code, out, err = Job([sys.executable, "script.py"], tmp_path).end()
    assert (code, out) == (0, "[0.0, 1.0]\n"), err


def test_other_processes_have_the_usual_fork_server() -> None:
    from multiprocessing import forkserver

    before = forkserver.connect_to_new_process
    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = DataLoader(data, 2, num_workers=1, multiprocessing_context="forkserver")
    wrapped = ltd.MpDeviceLoader(loader, ltd.lazy_device())
    assert [b[0].tolist() for b in wrapped] == [[0, 1], [2, 3]]
    assert forkserver.connect_to_new_process is before
    assert workers._server._forkserver_pid != forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def test_a_worker_whose_connection_ends_before_it_does_is_named() -> None:
    """In a process of its own: PyTorch's handler raises in the main thread, wherever that is."""
    out, _ = child.run("""
        import os, signal
        from torch.utils.data import DataLoader
        from ltc_dist.data import workers

        batches = workers.begin(DataLoader(list(range(4)), batch_size=1, num_workers=1))
        (worker,) = batches._workers
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a thread that reads ahead has no handler

        def get(timeout):
            os.kill(worker.pid, signal.SIGKILL)
            raise EOFError

        batches._data_queue.get = get
        worker.is_alive = lambda: True
        try:
            next(batches)
        except RuntimeError as error:
            print(f"(pid {worker.pid}) is killed by signal: Killed" in str(error), flush=True)
        os._exit(0)
    """)
    assert out == "True\n"
