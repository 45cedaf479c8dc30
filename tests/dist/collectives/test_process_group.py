"""How processes wait for each other's collectives, and that each device's are told apart."""

import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from ltc_dist.collectives import process_group
from ltc_dist.collectives.process_group import Group, ProcessTransport

SCRIPT = Path(__file__).parent / "two_devices.py"


class Work:
    """An op of GPUs that is done at the `looks`-th look; a wait with a time before that aborts it, as NCCL does."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.looks, self.error, self.was_waited_for = looks, error, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if timeout is None:  # orders streams, and raises nothing
            return True
        if self.looks > 0:
            self.error = "the communicator was aborted"
        self.was_waited_for = True
        if self.error:
            raise RuntimeError(self.error)
        return True


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of two processes; the other is late."""
    monkeypatch.setattr(process_group, "LOOK_S", 0.005)
    found = object.__new__(ProcessTransport)
    found._group, found._rank = Group("0,1", (0, 1), 0), 0
    found._job_store = torch.distributed.HashStore()
    found._known, found._plan = set(), "all_reduce of x"
    return found


def test_a_late_process_does_not_abort_the_communicator_of_gpus(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_nccl_is_used", lambda: True)
    late = Work(looks=50)
    transport._wait(late)
    assert late.was_waited_for and transport._job_store.get("at/0,1/0") == b"all_reduce of x"
    with pytest.raises(RuntimeError, match="a GPU fell off the bus"):
        transport._wait(Work(looks=3, error="a GPU fell off the bus"))


def test_what_is_done_just_after_the_time_is_up_has_not_failed(transport: Any) -> None:
    class JustDone(Work):
        def wait(self, timeout: datetime.timedelta | None = None) -> bool:
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            self.was_waited_for = True
            return True

    work = JustDone(looks=1)
    transport._wait(work)
    assert work.was_waited_for


@pytest.mark.dist
def test_two_devices_in_each_of_two_processes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    same = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    more = {"LTC_NUM_DEVICES": 2, "OMP_NUM_THREADS": 1, "PYTHONPATH": SCRIPT.parents[2]}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={
                **os.environ,
                **{k: str(v) for k, v in (same | more | {"RANK": r, "LOCAL_RANK": r}).items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], said
