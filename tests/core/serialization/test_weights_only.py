"""Files of torch.save where torch's own reader has a hole: what uses it is refused, all else is read."""

import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ltc_core.errors import CheckpointFormatError
from ltc_core.serialization.plain import load
from ltc_core.serialization.weights_only import check_pickle, has_known_hole


@pytest.fixture
def _old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.9.1+cpu", True),
        ("2.6.0", True),
        ("1.13.1", True),
        ("2.10.0a0+git1234567", True),
        ("2.10.0.dev20251120", True),
        ("unknown", True),
        ("2.10.0rc1", False),
        ("2.10.0", False),
        ("2.13.0+cpu", False),
        ("3.0.0", False),
    ],
)
def test_which_versions_have_the_hole(version: str, expected: bool) -> None:
    assert has_known_hole(version) == expected


def test_this_version() -> None:
    assert has_known_hole() == (tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))


def saved(data: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(data, file, **options)
    file.seek(0)
    return file


def rewritten(data: Any, change: Callable[[str, bytes], bytes], *more: str) -> io.BytesIO:
    """A file of torch.save with other records; those of `more` stand in it twice."""
    made = io.BytesIO()
    with zipfile.ZipFile(saved(data)) as archive, zipfile.ZipFile(made, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, change(name, archive.read(name)))
        for name in more:
            changed.writestr(name.upper(), b"")
    made.seek(0)
    return made


def trained() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


DTYPES = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]
GOOD: list[Any] = [
    trained(),
    [torch.ones(3, dtype=dtype) for dtype in DTYPES],
    OrderedDict(a=Counter("abba"), b=(1, 2.5, None, True, "text", -(1 << 70), [1], {2})),
    nn.Parameter(torch.ones(2)),
    [torch.arange(6)[2:4], torch.empty(0), torch.tensor(3.0), torch.ones(2).untyped_storage()],
    torch.eye(3).to_sparse(),
    {"dtype": torch.float16, "size": torch.Size([1, 2]), "device": torch.device("cpu")},
    [torch.ones(1)] * 300,  # more than the short opcodes of the memo reach
    {k: torch.ones(1) for k in range(300)},
]


@pytest.mark.usefixtures("_old_torch")
@pytest.mark.parametrize("data", GOOD)
def test_ordinary_files_are_read(data: Any) -> None:
    check_pickle(saved(data), "a file")
    found = load(saved(data))
    assert type(found) is type(data)


def setting_items_of_a_tensor(name: str, content: bytes) -> bytes:
    """The pickle is a tensor; item 0 of it becomes 1 while it is read."""
    return content.removesuffix(b".") + b"K\x00K\x01s." if name.endswith("data.pkl") else content


def setting_many(name: str, content: bytes) -> bytes:
    return content.removesuffix(b".") + b"(K\x00K\x01u." if name.endswith("data.pkl") else content


def with_a_short_record(name: str, content: bytes) -> bytes:
    return content[:8] if name.endswith("data/0") else content


def with_another_opcode(name: str, content: bytes) -> bytes:
    return content.removesuffix(b".") + b"\x94." if name.endswith("data.pkl") else content


def with_nothing_to_take(name: str, content: bytes) -> bytes:
    return b"\x80\x02\x86." if name.endswith("data.pkl") else content


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (rewritten(torch.ones(4), setting_items_of_a_tensor), "of something that is no dict"),
        (rewritten(torch.ones(4), setting_many), "of something that is no dict"),
        (
            rewritten(torch.ones(4), with_a_short_record),
            "storage '0' of 16 bytes, and its record has 8",
        ),
        (rewritten(torch.ones(4), with_another_opcode), "the opcode MEMOIZE"),
        (rewritten(torch.ones(4), with_nothing_to_take), "makes no sense"),
        (rewritten(torch.ones(4), lambda n, c: c, "archive/data/0"), "two records of one name"),
        (saved(torch.ones(4), _use_new_zipfile_serialization=False), "of before torch 1.6"),
    ],
)
@pytest.mark.usefixtures("_old_torch")
def test_what_uses_the_hole_is_refused(file: io.BytesIO, words: str) -> None:
    expected = rf"known hole \(CVE-2026-24747\)\n  got: .*{words}.*\n  Next: install torch 2.10 or"
    with pytest.raises(CheckpointFormatError, match=expected):
        load(file)


@pytest.mark.skipif(has_known_hole(), reason="this torch has the hole")
def test_a_torch_without_the_hole_reads_the_old_format() -> None:
    file = saved(torch.ones(4), _use_new_zipfile_serialization=False)
    assert load(file).tolist() == [1, 1, 1, 1]
