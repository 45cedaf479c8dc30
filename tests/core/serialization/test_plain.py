"""The plain verbs: torch.save of a CPU copy, structure kept; load, which runs no code."""

import argparse
import dataclasses
import errno
import io
import os
import pickle
import sys
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ltc_core.errors import CheckpointError, CheckpointFormatError, CheckpointIOError
from ltc_core.serialization import cpu_copy
from ltc_core.serialization.plain import load, save
from tests import prepared

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["cpu", "lazy"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    import ltc_core

    return ltc_core.lazy_device()


@dataclasses.dataclass
class State:
    weight: Any
    step: int = 0


def test_save_keeps_parameters_requires_grad_and_sharing(
    device: torch.device, tmp_path: Path
) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    leaf = torch.ones(2, device=device, requires_grad=True)
    save([parameter, parameter, leaf, leaf.detach(), parameter.detach()], tmp_path / "c.pt")
    first, again, leaf_, detached, alias = load(tmp_path / "c.pt")
    assert first is again and type(first) is nn.Parameter and first.requires_grad
    assert leaf_.requires_grad and not detached.requires_grad
    assert alias.data_ptr() == first.data_ptr()
    assert [t.device.type for t in (first, leaf_, detached)] == ["cpu"] * 3


def test_save_of_tied_weights_is_stored_once(device: torch.device, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.to(device)
    save(model.state_dict(), tmp_path / "c.pt")
    loaded = load(tmp_path / "c.pt")
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        assert len([name for name in archive.namelist() if "/data/" in name]) == 1
    assert loaded._metadata == model.state_dict()._metadata


def test_save_of_a_module_and_of_objects_around_tensors(
    device: torch.device, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2).to(device)
    holder = argparse.Namespace(weight=model.weight, module=model)
    save({"model": model, "holder": holder, "weight": model.weight}, tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=False)
    assert {p.device.type for p in loaded["model"].parameters()} == {"cpu"}
    assert loaded["holder"].module is loaded["model"]
    assert loaded["weight"].data_ptr() == loaded["model"].weight.data_ptr()
    assert loaded["weight"].equal(model.weight.cpu())
    assert model.weight.device == device  # the one that was saved is left alone


def test_what_memory_key_tells_apart(device: torch.device) -> None:
    tensor = torch.ones(4, device=device)
    key = cpu_copy.memory_key(tensor)
    assert cpu_copy.memory_key(tensor.detach()) == key
    for other in (tensor.clone(), tensor[:2], tensor.reshape(2, 2)):
        assert cpu_copy.memory_key(other) != key


class RawFile:
    """A file that takes seven bytes at a time and has no flush."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.data += data[:7]
        return len(data[:7])


def test_save_to_file_objects(device: torch.device, tmp_path: Path) -> None:
    tensor = torch.arange(3.0, device=device)
    buffer, raw = io.BytesIO(), RawFile()
    save(tensor, buffer)
    save(tensor, raw)  # type: ignore[arg-type]
    with open(tmp_path / "c.pt", "wb") as file:
        save(tensor, file)
    buffer.seek(0)
    assert load(buffer).equal(torch.arange(3.0))
    assert load(io.BytesIO(raw.data)).equal(torch.arange(3.0))
    assert load(tmp_path / "c.pt").equal(torch.arange(3.0))


def test_save_follows_links_and_keeps_the_mode(tmp_path: Path) -> None:
    save(1, tmp_path / "c.pt")
    os.chmod(tmp_path / "c.pt", 0o640)
    (tmp_path / "latest.pt").symlink_to("c.pt")
    save(2, str(tmp_path / "latest.pt"))
    assert (tmp_path / "latest.pt").is_symlink() and load(tmp_path / "c.pt") == 2
    assert (tmp_path / "c.pt").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["c.pt", "latest.pt"]


def test_save_to_a_pipe_does_not_replace_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    save(torch.ones(2), tmp_path / "pipe")
    reader.join()
    assert (tmp_path / "pipe").is_fifo()
    assert load(io.BytesIO(received[0])).equal(torch.ones(2))


def test_full_device() -> None:
    with pytest.raises(
        CheckpointIOError,
        match=r"^No space left on device while writing /dev/full \(need 4 MB, free \d.* MB\)\n",
    ) as caught:
        save(torch.ones(1_000_000), "/dev/full")
    assert caught.value.errno == errno.ENOSPC
    with (
        open("/dev/full", "wb", buffering=0) as file,
        pytest.raises(
            CheckpointIOError,
            match="No space left on device while writing the file object /dev/full",
        ),
    ):
        save(torch.ones(1_000_000), file)


FULL_DISK = """
import errno, os, resource, sys
import torch
from ltc_core.errors import CheckpointIOError
from ltc_core.serialization.plain import load, save
path = sys.argv[1]
save({"w": torch.ones(10)}, path)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for size in (25_001, 1_000_000):
    try:
        save({"w": torch.zeros(size)}, path)
    except CheckpointIOError as error:
        assert error.errno == errno.EFBIG, error.errno
        print(str(error).splitlines()[0])
assert load(path)["w"].equal(torch.ones(10))
save({"w": torch.full((10,), 2.0)}, path)  # the process goes on
assert load(path)["w"].equal(torch.full((10,), 2.0))
assert os.listdir(os.path.dirname(path)) == ["c.pt"], os.listdir(os.path.dirname(path))
"""


def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    done = prepared.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "c.pt")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    small, large = done.stdout.splitlines()
    assert small.startswith(f"File too large while writing {tmp_path}/c.pt (need 0.1 MB, free ")
    assert large.startswith(f"File too large while writing {tmp_path}/c.pt (need 4 MB, free ")


@pytest.mark.parametrize("step", ["fsync", "replace", "fchmod"])
def test_a_failing_step_leaves_the_old_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("old", tmp_path / "c.pt")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(CheckpointIOError, match="a checkpoint that was there still is"):
            save("new", tmp_path / "c.pt")
    assert os.listdir(tmp_path) == ["c.pt"] and load(tmp_path / "c.pt") == "old"


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("old", tmp_path / "c.pt")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save("new", tmp_path / "c.pt")
    assert os.listdir(tmp_path) == ["c.pt"] and load(tmp_path / "c.pt") == "old"


def test_what_a_killed_save_left_is_removed_and_a_living_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".c.pt.ltc-new-00000000").write_text("left by a process that was killed")
    inner_names = []

    class Inner:
        """Saves to the same path while the outer save is under way."""

        def __reduce__(self) -> Any:
            inner_names.extend(os.listdir(tmp_path))
            save("inner", tmp_path / "c.pt")
            inner_names.extend(os.listdir(tmp_path))
            return (OrderedDict, ((("outer", 1),),))

    save(Inner(), tmp_path / "c.pt")
    assert len(inner_names) == 3 and ".c.pt.ltc-new-00000000" not in inner_names
    assert os.listdir(tmp_path) == ["c.pt"] and load(tmp_path / "c.pt") == {"outer": 1}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing/c.pt", "No such file or directory while writing .*/missing/c.pt"),
        ("file/c.pt", "Not a directory while writing .*/file/c.pt"),
        ("directory", "Is a directory while writing .*/directory"),
        ("n" * 250, "File name too long while writing"),
    ],
)
def test_paths_that_cannot_be_written(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    with pytest.raises(CheckpointIOError, match=text):
        save(1, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


def deep() -> Any:
    tree: Any = 1
    for _ in range(100_000):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: {"f": lambda: 1}, r"Can't pickle|Can't get local object"),
        (threading.Lock, r"cannot pickle '_thread\.lock' object"),
        (deep, "RecursionError"),
    ],
)
def test_what_cannot_be_pickled(make: Any, text: str, tmp_path: Path) -> None:
    save("old", tmp_path / "c.pt")
    with pytest.raises(
        CheckpointFormatError, match=f"it cannot be pickled(.|\n)*({text})"
    ) as caught:
        save(make(), tmp_path / "c.pt")
    assert "Next: leave out" in str(caught.value)
    assert os.listdir(tmp_path) == ["c.pt"] and load(tmp_path / "c.pt") == "old"


class Malicious:
    def __reduce__(self) -> Any:
        return (os.system, ("touch ran",))


def test_malicious_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "x": Malicious()}, "c.pt")
    with pytest.raises(
        CheckpointFormatError,
        match=r"c\.pt is refused: reading it would run posix\.system(.|\n)*"
        r"ask for the same data as a state_dict",
    ):
        load("c.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Malicious(), protocol=2))
    with pytest.raises(CheckpointFormatError, match=r"raw\.pt is (refused|not a file)"):
        load("raw.pt")
    assert not (tmp_path / "ran").exists()


def test_the_advice_for_a_harmless_class_works(tmp_path: Path) -> None:
    save(State(torch.ones(2)), tmp_path / "c.pt")
    with pytest.raises(CheckpointFormatError, match=r"safe_globals\(\[\S*State\]\)"):
        load(tmp_path / "c.pt")
    with torch.serialization.safe_globals([State]):
        assert load(tmp_path / "c.pt").weight.equal(torch.ones(2))


def test_every_damaged_byte_is_found_or_harmless(tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    save({"w": torch.arange(5), "lr": 0.5}, file)
    whole = file.read_bytes()
    found = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        try:
            loaded = load(file)
        except CheckpointError:
            found += 1
        else:
            assert loaded["w"].equal(torch.arange(5)) and loaded["lr"] == 0.5
    assert found > len(whole) // 4  # the rest is padding and names for people


@pytest.mark.parametrize("keep", [1, 3, 100, -1])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    save({"w": torch.arange(500)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="load an older checkpoint"):
        load(file)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    for content, text in [
        (b"", r"is empty \(0 bytes\)"),
        (b"hello, world\n", "is damaged, or not a file of save or torch.save"),
        (b"\x80\x02}q\x00.", "is damaged, or not a file"),
    ]:
        (tmp_path / "c.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=text):
            load(tmp_path / "c.pt")
    with pytest.raises(CheckpointFormatError, match=r"is a directory(.|\n)*serialization\.load"):
        load(tmp_path)
    with pytest.raises(
        CheckpointIOError, match="No such file or directory while reading"
    ) as caught:
        load(tmp_path / "other.pt")
    assert caught.value.errno == errno.ENOENT


def test_files_of_torch_save_of_all_kinds(tmp_path: Path) -> None:
    data = {"w": torch.arange(3)}
    old_style, without_checksums = tmp_path / "old.pt", tmp_path / "fast.pt"
    torch.save(data, old_style, _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(data, without_checksums)
    finally:
        torch.serialization.set_crc32_options(True)
    for file in (old_style, without_checksums):
        assert load(file)["w"].equal(torch.arange(3))
    with open(without_checksums, "rb") as opened:
        assert load(opened)["w"].equal(torch.arange(3))
