"""xser.load of what is damaged, forged, or of another format."""

import hashlib
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core.serialization as xser
from ltc_core.errors import CheckpointError, CheckpointFormatError, CheckpointIOError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    xser.save(
        {"w": torch.arange(1, 6), "b": torch.zeros(2, dtype=torch.complex64), "lr": 0.1},
        tmp_path / "c",
    )
    return tmp_path / "c"


def test_every_flipped_byte_is_found(checkpoint: Path) -> None:
    for file in sorted(checkpoint.iterdir()):
        whole = file.read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"cannot load the checkpoint .*{file.name}"):
                xser.load(checkpoint)
        file.write_bytes(whole)
    assert xser.load(checkpoint)["lr"] == 0.1


def test_every_truncation_is_found(checkpoint: Path) -> None:
    for file in sorted(checkpoint.iterdir()):
        whole = file.read_bytes()
        for length in range(len(whole)):
            if whole[length:].strip():  # all but the newline at the end of the index
                file.write_bytes(whole[:length])
                with pytest.raises(CheckpointError, match=file.name):
                    xser.load(checkpoint)
        file.write_bytes(whole)


def test_damage_is_told_with_file_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    xser.save([torch.ones(1000)] + [torch.full((i,), 2.0) for i in range(8)], path)
    size = (path / "t_00000.safetensors").stat().st_size
    os.truncate(path / "t_00000.safetensors", 2000)
    with pytest.raises(
        CheckpointError,
        match=rf"/c \(t_00000\.safetensors: 2000 of {size} bytes\)\n.*Next: load an",
    ):
        xser.load(path)
    for i in range(1, 8):
        (path / f"t_{i:05d}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"t_00001\.safetensors: missing.* and 3 more\)"):
        xser.load(path)
    (path / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: missing"):
        xser.load(path)


def test_a_flipped_bit_is_told_with_the_file(checkpoint: Path) -> None:
    file = checkpoint / "t_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x80
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=rf"\({file.name}: its {len(data)} bytes are not what"
    ):
        xser.load(checkpoint)


def test_a_damaged_checkpoint_can_be_replaced(checkpoint: Path) -> None:
    os.truncate(checkpoint / "index.json", 50)
    (checkpoint / "t_00000.safetensors").unlink()
    xser.save("new", checkpoint)
    assert xser.load(checkpoint) == "new"


# ---- forged


def forge(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    """Change the index as one who can also compute its digest."""
    file = checkpoint / "index.json"
    content = json.loads(file.read_text())
    change(content)
    body = json.dumps(content["body"], separators=(",", ":"))
    content["digest"] = hashlib.blake2b(body.encode(), digest_size=32).hexdigest()
    file.write_text(json.dumps(content))


def first(**fields: Any) -> Callable[[Any], Any]:
    return lambda content: content["body"]["tensors"][0].update(fields)


def tree(node: Any) -> Callable[[Any], Any]:
    return lambda content: content["body"].update(tree=node)


def nest(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = [node]
    return node


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (first(file="/etc/passwd"), r"tensor 0 has an illegal file: '/etc/passwd'"),
        (first(file="../c/t_00000.safetensors"), r"illegal file: '\.\./c"),
        (first(file="t_00000.safetensors\n"), r"illegal file"),
        (first(file=7), r"illegal file: 7"),
        (first(dtype="load"), r"illegal dtype: 'load'"),
        (first(dtype=["float32"]), r"illegal dtype"),
        (first(dtype="float32"), r"of more than its|its header is not what"),
        (first(stored_as="bytes"), r"illegal stored_as: 'bytes'"),
        (first(shape=[-5]), r"illegal shape"),
        (first(shape=[5.0]), r"illegal shape"),
        (first(shape=[1 << 62]), r"a shape of more than its \d+ bytes"),
        (first(shape=[0, 1 << 62, 1 << 62]), r"its header is not what the index says"),
        (first(nbytes=True), r"illegal nbytes: True"),
        (first(nbytes=1 << 62), r"t_00000\.safetensors: \d+ of 4611686018427387904 bytes"),
        (first(digest="0" * 64), r"bytes are not what was written"),
        (first(digest="x"), r"illegal digest"),
        (first(parameter=1), r"illegal parameter"),
        (first(requires_grad=True), r"no such tensor of int64"),
        (first(more=1), r"other fields than file, dtype"),
        (lambda c: c["body"].update(tensors=7), r"it has no list of tensors"),
        (lambda c: c.update(body=[1]), r"it has no list of tensors"),
        (lambda c: c.update(version=2), r"format version 2, and this library reads 1"),
        (lambda c: c.update(version=True), r"format version True"),
        (lambda c: c.update(format="zip"), r"not a file of the format ltc-xser"),
        (tree({"tensor": 2}), r"there is no tensor 2"),
        (tree({"tensor": -1}), r"there is no tensor -1"),
        (tree({"tensor": True}), r"there is no tensor True"),
        (tree({"tensor": 0, "dict": {}}), r"makes no sense at data"),
        (tree({"dict": {"a": {"call": "os.system"}}}), r"makes no sense at data\['a'\](.|\n)*call"),
        (tree({}), r"makes no sense at data"),
        (tree({"dict": [1]}), r"makes no sense at data"),
        (tree({"tuple": {"a": 1}}), r"makes no sense at data"),
        (tree({"items": [[1, 2], [1, 3]]}), r"the key 1 twice"),
        (tree({"items": [[[1], 2]]}), r"unhashable"),
        (tree({"items": [[1, 2, 3]]}), r"too many values"),
        (tree({"namedtuple": "P", "fields": [["__class__", 1]]}), r"underscore"),
        (tree({"namedtuple": "P(", "fields": []}), r"valid identifiers"),
        (tree({"namedtuple": "P"}), r"makes no sense"),
        (tree({"bytes": "*"}), r"makes no sense at data(.|\n)*bytes"),
        (tree({"int": "1_0"}), r"not hexadecimal"),
        (tree({"float": "1"}), r"makes no sense at data(.|\n)*float"),
        (tree({"complex": [1]}), r"makes no sense at data(.|\n)*complex"),
        (tree({"dtype": "Tensor"}), r"makes no sense at data(.|\n)*dtype"),
        (tree({"device": "nowhere:0"}), r"makes no sense at data(.|\n)*device"),
        (tree({"size": ["a"]}), r"makes no sense at data(.|\n)*size"),
        (tree(nest(100)), r"more than 64 levels"),
    ],
)
def test_forged_index_is_refused(change: Callable[[Any], Any], text: str, checkpoint: Path) -> None:
    forge(checkpoint, change)
    with pytest.raises(CheckpointError, match=text) as caught:
        xser.load(checkpoint)
    assert "cannot load the checkpoint" in str(caught.value) and "Next:" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"format": NaN}', "NaN is no JSON"),
        ('{"a": 1, "a": 2}', "a key stands twice"),
        ("[" * 100_000, "recursion"),
        ("9" * 10_000, "digits"),
        ("\x00\xff", "it is no JSON"),
        ("[]", "not a file of the format"),
    ],
)
def test_index_that_is_none(text: str, expected: str, checkpoint: Path) -> None:
    (checkpoint / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=expected):
        xser.load(checkpoint)


@pytest.mark.parametrize("name", ["t_00000.safetensors", "index.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_files_that_are_no_files_are_refused(name: str, kind: str, checkpoint: Path) -> None:
    file = checkpoint / name
    file.rename(checkpoint.parent / name)
    if kind == "link":
        file.symlink_to(checkpoint.parent / name)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(CheckpointFormatError, match=f"{name}: a link, a directory or a device"):
        xser.load(checkpoint)


def test_no_memory_for_a_tensor(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CheckpointError, match=r"t_00000\.safetensors: no memory for its \d+ bytes"):
        xser.load(checkpoint)


# ---- other formats


def test_plain_file_is_told_apart(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "c")
    with pytest.raises(CheckpointFormatError, match=r"is a file(.|\n)*ltc_core\.load"):
        xser.load(tmp_path / "c")


def peer_save(data: Any, path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write what the xser.save of torch_xla or lazy_tensor_core writes."""
    name = f"{package}.utils.serialization"
    kind = type("TensorReference", (), {"__module__": name})
    folder = Path(f"{path}.tensors")
    folder.mkdir()
    count = 0

    def reference(value: Any) -> Any:
        nonlocal count
        if isinstance(value, dict):
            return {key: reference(item) for key, item in value.items()}
        if isinstance(value, list):
            return [reference(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        torch.save(value, folder / f"tensor_{count}.pt")
        made: Any = kind()
        made.tid = count
        count += 1
        return made

    skeleton = reference(data)
    with monkeypatch.context() as patch:
        modules = [package, f"{package}.utils", name]
        for module in modules:
            patch.setitem(sys.modules, module, types.ModuleType(module))
        sys.modules[name].TensorReference = kind  # type: ignore[attr-defined]
        torch.save(skeleton, path)


@pytest.mark.parametrize("package", ["torch_xla", "lazy_tensor_core"])
def test_checkpoint_of_a_peer(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"model": {"w": torch.arange(3), "b": [torch.ones(1)]}, "epoch": 3}
    path = tmp_path / "c"
    peer_save(data, path, package, monkeypatch)
    with pytest.raises(CheckpointFormatError, match=r"is a pickle(.|\n)*allow_pickle=True"):
        xser.load(path)
    loaded = xser.load(path, allow_pickle=True)
    assert repr(loaded) == repr(data)
    with pytest.raises(CheckpointIOError, match="refusing to replace"):
        xser.save(loaded, path)

    os.truncate(tmp_path / "c.tensors" / "tensor_1.pt", 300)
    with pytest.raises(CheckpointError, match=r"tensor_1\.pt is incomplete or damaged"):
        xser.load(path, allow_pickle=True)
    (tmp_path / "c.tensors" / "tensor_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"tensor_1\.pt: missing"):
        xser.load(path, allow_pickle=True)
    (tmp_path / "c.tensors" / "tensor_1.pt").symlink_to(tmp_path / "c.tensors" / "tensor_0.pt")
    with pytest.raises(CheckpointFormatError, match=r"tensor_1\.pt: a link"):
        xser.load(path, allow_pickle=True)


class Malicious:
    def __reduce__(self) -> Any:
        return (os.system, ("touch ran",))


def test_malicious_checkpoint_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peer_save({"w": torch.ones(1), "x": Malicious()}, tmp_path / "c", "torch_xla", monkeypatch)
    with pytest.raises(CheckpointFormatError, match=r"reading it would run posix\.system"):
        xser.load("c", allow_pickle=True)
    assert not Path("ran").exists()


def test_peer_checkpoint_with_a_path_for_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torch_xla.utils.serialization"
    kind = type("TensorReference", (), {"__module__": name})
    forged: Any = kind()
    forged.tid = "0/../../secret"
    with monkeypatch.context() as patch:
        for module in ("torch_xla", "torch_xla.utils", name):
            patch.setitem(sys.modules, module, types.ModuleType(module))
        sys.modules[name].TensorReference = kind  # type: ignore[attr-defined]
        torch.save([forged], tmp_path / "c")
    (tmp_path / "c.tensors").mkdir()
    with pytest.raises(CheckpointFormatError, match=r"a tensor has the number '0/\.\./"):
        xser.load(tmp_path / "c", allow_pickle=True)
