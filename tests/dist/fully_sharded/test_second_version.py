"""Parameters sharded by PyTorch's `fully_shard`: the numbers are those of the same script on the processor."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.errors import DeviceError, UnsupportedOpError
from tests.launching import Job, launcher

SCRIPT = str(Path(__file__).with_name("second_version.py"))


def printed(device: str, option: str, directory: Path) -> list[str]:
    place = directory / device
    place.mkdir()
    return told(place, SCRIPT, device, option, str(place / "saved"))


def told(directory: Path, *command: str, nprocs: int = 2) -> list[str]:
    """What rank 0 prints."""
    job = Job([*launcher("--nprocs", str(nprocs)), *command], directory)
    code, out, err = job.end()
    assert code == 0, err
    return [line.removeprefix("[0] ") for line in out.splitlines() if line.startswith("[0] ")]


@pytest.mark.dist
@pytest.mark.parametrize("option", ["plain", "mixed", "accumulated"])
def test_two_processes(option: str, tmp_path: Path) -> None:
    lines = printed("ltc", option, tmp_path)
    assert lines == [*printed("cpu", option, tmp_path)[:-1], "device ltc"]
    assert lines[-3:-1] == ["read True", "share 0.5"]


@pytest.mark.dist
@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_step_is_one_program(nprocs: int, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("one_program.py"))
    eager, lazy = (told(tmp_path, script, kind, nprocs=nprocs) for kind in ("cpu", "ltc"))
    assert lazy[::2] == eager[::2] and len(eager) == 10
    assert lazy[1::2] == ["programs 1"] * 5


def test_memory_that_is_freed_comes_back_when_it_is_written() -> None:
    device = ltc.lazy_device()
    x = torch.arange(6.0).to(device)
    part = x[2:4]
    storage = x.untyped_storage()
    used = ltc.get_memory_info(device)["bytes_used"]
    assert storage.resize_(0) is storage
    assert x.untyped_storage().size() == 0 and storage.nbytes() == 24
    ltc.mark_step(wait=True)
    assert ltc.get_memory_info(device)["bytes_used"] == used - 24
    with pytest.raises(DeviceError, match="whose memory was freed"):
        part.cpu()
    storage.resize_(24)
    assert storage.size() == 24
    x.copy_(torch.ones(6))
    assert part.tolist() == [1, 1]


def test_a_value_that_an_op_has_read_before_it_was_freed() -> None:
    x = torch.ones(3, device=ltc.lazy_device())
    y = x * 2
    x.untyped_storage().resize_(0)
    assert y.tolist() == [2, 2, 2]


def test_memory_is_not_made_larger() -> None:
    x = torch.ones(3, device=ltc.lazy_device())
    with pytest.raises(DeviceError, match=r"resize_\(24\) of 12 bytes"):
        x.untyped_storage().resize_(24)
    assert x.tolist() == [1, 1, 1]


def test_the_first_version_of_fsdp_is_told_the_way_that_works() -> None:
    x: Any = torch.ones(3, device=ltc.lazy_device())
    with pytest.raises(UnsupportedOpError, match=r"torch\.distributed\.fsdp\.fully_shard"):
        x._typed_storage()
