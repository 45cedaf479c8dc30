"""Scripts in the styles of the libraries that were written for torch_xla, with the losses of plain PyTorch.

Each runs in one process and in two. What the style is known for is asserted in the script.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.compat.test_scripts import COMPAT, SCRIPTS, check, expected, facts, told
from tests.launching import Job, launcher

__all__ = ["expected"]  # the fixture

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
IMAGENET = os.fspath(SCRIPTS / "imagenet_head.py")

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.mark.parametrize("nprocs", ["1", "2"])
@pytest.mark.parametrize(
    "script",
    [
        "accelerate_wrappers.py",
        "fairseq_trainer.py",
        "ignite_idist.py",
        "lightning_strategy.py",
        "timm_bits.py",
    ],
)
def test_a_style(tmp_path: Path, expected: list[float], script: str, nprocs: str) -> None:
    check(told(tmp_path, COMPAT, script, NPROCS=nprocs), expected)


def check_pretraining(job: Job, nprocs: int) -> None:
    found = facts(job)
    assert (found["world_size"], found["backend"]) == (nprocs, "xla")
    assert len(found["plain"]) == len(found["logged"]) == 4
    for logged, plain in zip(found["logged"], found["plain"], strict=True):
        assert logged == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_pretraining_under_the_launcher(tmp_path: Path, nprocs: int) -> None:
    command = launcher("--nprocs", str(nprocs), "--compat", "--no-prefix")
    script = os.fspath(SCRIPTS / "neuron_torchrun.py")
    check_pretraining(Job([*command, script], tmp_path, LTC_COMPILE="off"), nprocs)


def test_pretraining_under_torchrun(tmp_path: Path) -> None:
    """One line at the top is all that torchrun needs."""
    script = tmp_path / "mine.py"
    path = f"import sys; sys.path.append({os.fspath(SCRIPTS)!r})\n"
    script.write_text(
        f"import ltc_dist.compat\n{path}{(SCRIPTS / 'neuron_torchrun.py').read_text()}"
    )
    command = [*TORCHRUN, "--log-dir", os.fspath(tmp_path / "logs"), os.fspath(script)]
    check_pretraining(Job(command, tmp_path, LTC_COMPILE="off"), 2)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_imagenet_of_today(tmp_path: Path, expected: list[float], nprocs: int) -> None:
    environ = {"LTC_COMPILE": "off", "CPU_NUM_DEVICES": str(nprocs)}
    found = facts(Job([*COMPAT, IMAGENET], tmp_path, **environ))
    check(found, expected)
    assert found["world_size"] == nprocs and 0 <= found["accuracy"] <= 100


def test_imagenet_with_distributed_data_parallel(tmp_path: Path, expected: list[float]) -> None:
    command = launcher("--nprocs", "2", "--compat", "--no-prefix")
    found = facts(Job([*command, IMAGENET, "--ddp"], tmp_path, LTC_COMPILE="off"))
    check(found, expected)
    assert found["world_size"] == 2


def test_imagenet_without_data(tmp_path: Path) -> None:
    command = [*COMPAT, IMAGENET, "--fake_data", "--ddp"]
    found = facts(Job(command, tmp_path, LTC_COMPILE="off"))["losses"]
    assert len(found) == 8 and sorted(found, reverse=True) == found
