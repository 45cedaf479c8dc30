"""Check files of torch.save for a known hole of `weights_only=True` in old torch: `check_pickle`.

Before torch 2.10 (CVE-2026-24747) the reader sets items of any object of a pickle, not only of dicts, and trusts the
size that the pickle gives for a storage, not that of its record: a crafted file writes beyond its memory. Here the
opcodes of the pickle are interpreted without running code, and both are refused, as by later versions. Used by `plain`.
"""

from __future__ import annotations

import collections
import pickletools
import re
import zipfile
from typing import Any

import torch

from ltc_core.errors import CheckpointFormatError

__all__ = ["check_pickle", "has_known_hole", "load_weights_only"]

_FIXED_IN = (2, 10)
_NEXT = (
    "install torch 2.10 or later, or ask for the data as a streaming checkpoint or as safetensors."
)
_MAX_PICKLE_BYTES = 1 << 30


def has_known_hole(version: str | None = None) -> bool:
    """Whether `torch.load(weights_only=True)` of a version of torch (this one by default) has the hole."""
    match = re.match(r"(\d+)\.(\d+)(?:\.\d+)?(a|b|rc|\.dev)?", version or str(torch.__version__))
    if match is None:
        return True
    release = int(match[1]), int(match[2])
    return release < _FIXED_IN or (release == _FIXED_IN and match[3] in ("a", ".dev"))


def load_weights_only(file: Any, name: str) -> Any:
    """Load a file of `torch.save` to the CPU; code in it is not run, in any version of torch.

    Args:
        file: open for reading, at its beginning, and seekable.
        name: of the file, for errors.
    Raises:
        CheckpointFormatError: torch has the hole, and the file would use it or cannot be checked for it.
    """
    if has_known_hole():
        start = file.tell()
        check_pickle(file, name)
        file.seek(start)
    return torch.load(file, map_location="cpu", weights_only=True)


def check_pickle(file: Any, name: str) -> None:
    """Refuse a file that would use the hole, or that cannot be checked for it.

    Args:
        file: open for reading, at the beginning.
        name: of the file, for errors.

    Raises:
        CheckpointFormatError: it is such a file.

    Cost: reads the pickle, not the tensors.
    """
    try:
        if file.read(4) != b"PK\x03\x04":
            raise _Refusal("the format of before torch 1.6, which cannot be checked")
        with zipfile.ZipFile(file) as archive:
            _Walk(archive).run()
    except _Refusal as refusal:
        raise CheckpointFormatError(
            f"{name} is refused: the reader of torch {torch.__version__} has a known hole (CVE-2026-24747)",
            got=str(refusal),
            next=_NEXT,
        ) from None


class _Refusal(Exception):
    """Why a file is not read."""


_DICT = object()  # a dict, an OrderedDict or a Counter: items may be set
_OTHER = object()
_DICTS = ("collections.OrderedDict", "collections.Counter")
_STORAGE = re.compile(r"torch\.(?:storage\.)?([A-Za-z0-9]+Storage)")


class _Global(str):
    """The name of a class or a function that a pickle refers to."""


class _Walk:
    """Interprets the opcodes with a stack of constants, tuples, dicts, and one object for all others."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        names = [record.filename for record in archive.infolist()]
        # PyTorch's reader ignores case in names of records: of two it may read the one that is not checked here.
        if max(collections.Counter(map(str.lower, names)).values(), default=0) > 1:
            raise _Refusal("two records of one name")
        root = names[0].partition("/")[0] if names else ""
        self._sizes = {record.filename: record.file_size for record in archive.infolist()}
        self._data = f"{root}/data/"
        pickled = f"{root}/data.pkl"
        if self._sizes.get(pickled, _MAX_PICKLE_BYTES) >= _MAX_PICKLE_BYTES:
            raise _Refusal(f"no record {pickled!r}, or a very large one")
        self._pickle = archive.read(pickled)
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> None:
        try:
            for opcode, value, _ in pickletools.genops(self._pickle):
                step = getattr(self, f"_{opcode.name.lower()}", None)
                if opcode.name in _CONSTANTS:
                    self._stack.append(value)
                elif opcode.name in _MADE:
                    self._stack.append(_MADE[opcode.name])
                elif step is not None:
                    step(value)
                else:
                    raise _Refusal(f"the opcode {opcode.name}")
        except (IndexError, KeyError, ValueError) as error:
            raise _Refusal(f"a pickle that makes no sense: {error}") from error

    # -- opcodes, by their names in pickletools -----------------------------------------------------

    def _proto(self, value: Any) -> None:
        pass

    _stop = _proto

    def _global(self, value: str) -> None:
        module, _, name = value.partition(" ")
        if not name or not value.isascii() or len(value.split()) != 2:
            raise _Refusal(f"the name {value!r:.100}")
        self._stack.append(_Global(f"{module}.{name}"))

    def _mark(self, value: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _tuple(self, value: Any) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _take(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise _Refusal("a pickle that makes no sense: too few values")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _tuple1(self, value: Any) -> None:
        self._stack.append(tuple(self._take(1)))

    def _tuple2(self, value: Any) -> None:
        self._stack.append(tuple(self._take(2)))

    def _tuple3(self, value: Any) -> None:
        self._stack.append(tuple(self._take(3)))

    def _empty_tuple(self, value: Any) -> None:
        self._stack.append(())

    def _reduce(self, value: Any) -> None:
        made, _ = self._take(2)
        is_dict = isinstance(made, _Global) and made in _DICTS
        self._stack.append(_DICT if is_dict else _OTHER)

    _newobj = _reduce

    def _build(self, value: Any) -> None:
        self._take(1)
        self._needs_one()

    _append = _build

    def _appends(self, value: Any) -> None:
        self._since_mark()
        self._needs_one()

    def _needs_one(self) -> None:
        if not self._stack:
            raise _Refusal("a pickle that makes no sense: too few values")

    def _setitem(self, value: Any) -> None:
        self._take(2)
        self._only_of_dicts()

    def _setitems(self, value: Any) -> None:
        self._since_mark()
        self._only_of_dicts()

    def _only_of_dicts(self) -> None:
        self._needs_one()
        if self._stack[-1] is not _DICT:
            raise _Refusal("items are set of something that is no dict")

    def _binput(self, value: int) -> None:
        self._memo[value] = self._stack[-1]

    _long_binput = _binput

    def _binget(self, value: int) -> None:
        self._stack.append(self._memo[value])

    _long_binget = _binget

    def _binpersid(self, value: Any) -> None:
        (what,) = self._take(1)
        if not isinstance(what, tuple) or len(what) != 5 or what[0] not in ("storage", b"storage"):
            raise _Refusal("a reference to something that is no storage")
        kind, key, count = what[1], what[2], what[4]
        match = _STORAGE.fullmatch(kind) if isinstance(kind, _Global) else None
        found = getattr(torch, match[1], None) if match is not None else None
        dtype = torch.uint8 if found is torch.UntypedStorage else getattr(found, "_dtype", None)
        if not isinstance(dtype, torch.dtype) or type(key) is not str or type(count) is not int:
            raise _Refusal("a storage of an unknown kind")
        has = self._sizes.get(self._data + key)
        if has != count * dtype.itemsize:
            raise _Refusal(
                f"storage {key!r:.50} of {count * dtype.itemsize} bytes, and its record has {has}"
            )
        self._stack.append(_OTHER)


_CONSTANTS = {
    "BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINSTRING", "LONG1", "BINFLOAT",
}  # fmt: skip
_MADE = {
    "NONE": _OTHER,
    "NEWTRUE": _OTHER,
    "NEWFALSE": _OTHER,
    "EMPTY_LIST": _OTHER,
    "EMPTY_SET": _OTHER,
    "EMPTY_DICT": _DICT,
}
