"""Traces as torch_xla writes them: `plugins/profile/<time>/<host>.xplane.pb`, for TensorBoard's Profile tab and xprof.

In: a trace file of PyTorch's profiler. Out: the same slices as a protocol buffer, in a folder beside it. Used by
`torch_xla.debug.profiler`. Source: tsl/profiler/protobuf/xplane.proto; the encoding is protobuf's wire format.
"""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_planes"]

Event = Mapping[str, Any]

_PS_OF_US = 1_000_000
# Numbers of the fields, by message.
_SPACE_PLANES, _SPACE_HOSTNAMES = 1, 4
_PLANE_ID, _PLANE_NAME, _PLANE_LINES, _PLANE_NAMES = 1, 2, 3, 4
_LINE_ID, _LINE_NAME, _LINE_TIMESTAMP_NS, _LINE_EVENTS = 1, 2, 3, 4
_EVENT_NAME, _EVENT_OFFSET_PS, _EVENT_DURATION_PS = 1, 2, 3
_KEY, _VALUE = 1, 2  # of an entry of a map
_NAME_ID, _NAME_TEXT = 1, 2


def write_planes(trace: Path) -> Path:
    """Write a trace of PyTorch's profiler as planes; returns the file."""
    found = json.loads(trace.read_text("utf-8"))
    host = socket.gethostname()
    directory = trace.parent / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{host}.xplane.pb"
    number = 1
    while path.exists():  # traces of one second
        number += 1
        path = directory / f"{host}_{number}.xplane.pb"
    path.write_bytes(_space(found["traceEvents"], found.get("baseTimeNanoseconds", 0), host))
    return path


def _space(events: Sequence[Event], base_ns: int, host: str) -> bytes:
    """A plane for the host and for each GPU, with a line for each thread or stream."""
    planes: dict[str, dict[Any, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.get("ph") == "X" and isinstance(event["tid"], int):
            device = event.get("args", {}).get("device", -1)
            name = "/host:CPU" if device < 0 else f"/device:GPU:{device}"
            planes[name][event["tid"]].append(event)
    made = (_plane(k, name, lines, base_ns) for k, (name, lines) in enumerate(planes.items()))
    return b"".join(_bytes(_SPACE_PLANES, plane) for plane in made) + _bytes(
        _SPACE_HOSTNAMES, host.encode()
    )


def _plane(number: int, name: str, lines: Mapping[Any, Sequence[Event]], base_ns: int) -> bytes:
    ids = _numbered(event["name"] for events in lines.values() for event in events)
    parts = [_int(_PLANE_ID, number), _bytes(_PLANE_NAME, name.encode())]
    parts += [
        _bytes(_PLANE_LINES, _line(tid, events, ids, base_ns)) for tid, events in lines.items()
    ]
    for text, own in ids.items():
        meaning = _int(_NAME_ID, own) + _bytes(_NAME_TEXT, text.encode())
        parts.append(_bytes(_PLANE_NAMES, _int(_KEY, own) + _bytes(_VALUE, meaning)))
    return b"".join(parts)


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    return {text: k for k, text in enumerate(dict.fromkeys(texts), start=1)}


def _line(tid: int, events: Sequence[Event], ids: Mapping[str, int], base_ns: int) -> bytes:
    start_us = min(event["ts"] for event in events)
    parts = [
        _int(_LINE_ID, tid),
        _bytes(_LINE_NAME, str(tid).encode()),
        _int(_LINE_TIMESTAMP_NS, base_ns + int(start_us * 1000)),
    ]
    for event in sorted(events, key=lambda event: event["ts"]):
        slice_ = _int(_EVENT_NAME, ids[event["name"]])
        slice_ += _int(_EVENT_OFFSET_PS, int((event["ts"] - start_us) * _PS_OF_US))
        slice_ += _int(_EVENT_DURATION_PS, int(event.get("dur", 0) * _PS_OF_US))
        parts.append(_bytes(_LINE_EVENTS, slice_))
    return b"".join(parts)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
