"""DTensor as scripts for GPUs use it: tensor parallel training has the losses of one process, and parts draw alike."""

import sys
from pathlib import Path

import pytest

from tests.launching import Job, launcher

SCRIPT = str(Path(__file__).with_name("divided_tensors.py"))


def end(job: Job) -> None:
    code, out, err = job.end()
    assert code == 0, err
    assert "rank 0 is done" in out and "rank 1 is done" in out


@pytest.mark.dist
def test_one_device_a_process(tmp_path: Path) -> None:
    end(Job([*launcher("--nprocs", "2"), SCRIPT, "ltc"], tmp_path))


@pytest.mark.dist
def test_each_process_sees_all_devices_and_takes_that_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTC_NUM_DEVICES", "2")
    options = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs")]
    end(Job([sys.executable, "-m", "torch.distributed.run", *options, SCRIPT, "ltc"], tmp_path))
