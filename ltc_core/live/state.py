"""The state of one process at one moment, and its form in a file.

`sampler` makes a `State`, `board` writes and reads it, `table` shows it. A reader trusts no file:
`decoded` returns None for what is no whole state, and `table` escapes the texts.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from typing import Any

__all__ = ["MAX_BYTES", "State", "Wait", "decoded", "encoded"]

MAX_BYTES = 1 << 16
_VERSION = 1
_HEAD = struct.Struct(
    "<4sII"
)  # magic, number of bytes, checksum: a file may be read while it is written
_MAGIC = b"ltcW"
_LONGEST_TEXT = 400
_MOST_WAITS = 16


@dataclasses.dataclass(frozen=True)
class Wait:
    """A thread that waits for other processes.

    Attributes:
        at: line and number of the meeting; equal texts in two processes are one meeting.
        members: ranks that come to it.
        since_ns: on the monotonic clock of the host.
    """

    at: str
    members: tuple[int, ...]
    since_ns: int


@dataclasses.dataclass(frozen=True)
class State:
    """What one process does and has done.

    Attributes:
        where: host, boot and space of process ids; `pid` means a process only there.
        pid: process id. began_s: start of the process, in seconds since the epoch.
        job: equal in all processes of a job; empty outside of one.
        rank: in the job; -1 outside of one. local_rank and local_size: among the processes of the host.
        script: name of the script.
        written_ns: time of this state on the monotonic clock of the host, as all `_ns` that name a moment.
        step: steps that have ended. step_ns: time of the last one, 0 for none.
        steps_per_s: of the last seconds.
        doing: what the thread that cuts does, in words. since_ns: since when.
        waits: threads that wait for other processes.
        queue: programs that wait for the worker, the running one included.
        used_bytes, peak_bytes: memory of the devices.
        programs: that are kept. compiles: programs that were built. fallbacks: calls that ran on the CPU.
        cause: why the last program was built. cause_number: its number. cause_ns: when.
        ran: how the last program ran.
        cpu_share: processor time in the last seconds, in cores. cpu_s: in all. rss_bytes: resident memory.
        batch_share, device_share, compiler_share, others_share: parts of the last seconds spent waiting.
    """

    where: str = ""
    pid: int = 0
    began_s: float = 0.0
    job: str = ""
    rank: int = -1
    local_rank: int = 0
    local_size: int = 1
    script: str = ""
    written_ns: int = 0
    step: int = 0
    step_ns: int = 0
    steps_per_s: float = 0.0
    doing: str = ""
    since_ns: int = 0
    waits: tuple[Wait, ...] = ()
    queue: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    programs: int = 0
    compiles: int = 0
    fallbacks: int = 0
    cause: str = ""
    cause_number: int = 0
    cause_ns: int = 0
    ran: str = ""
    cpu_share: float = 0.0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    batch_share: float = 0.0
    device_share: float = 0.0
    compiler_share: float = 0.0
    others_share: float = 0.0


_DEFAULTS = dataclasses.asdict(State())


def encoded(state: State) -> bytes:
    """The bytes of a file."""
    fields = {name: getattr(state, name) for name in _DEFAULTS}
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = value[:_LONGEST_TEXT]
    waits = state.waits[:_MOST_WAITS]
    fields["waits"] = [(w.at[:_LONGEST_TEXT], w.members, w.since_ns) for w in waits]
    data = json.dumps([_VERSION, fields], separators=(",", ":")).encode()
    if len(data) > MAX_BYTES - _HEAD.size:  # a job of thousands of ranks
        return encoded(dataclasses.replace(state, waits=()))
    return _HEAD.pack(_MAGIC, len(data), zlib.crc32(data)) + data


def decoded(content: bytes) -> State | None:
    """The state in a file; None if it is none, or is half written."""
    if len(content) < _HEAD.size:
        return None
    magic, size, checksum = _HEAD.unpack_from(content)
    data = content[_HEAD.size : _HEAD.size + size]
    if magic != _MAGIC or len(data) != size or zlib.crc32(data) != checksum:
        return None
    try:
        version, fields = json.loads(data)
        if version != _VERSION:
            return None
        return State(**{name: _typed(name, fields[name]) for name in _DEFAULTS})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _typed(name: str, value: Any) -> Any:
    if name == "waits":
        return tuple(Wait(str(at), tuple(map(int, members)), int(ns)) for at, members, ns in value)
    return type(_DEFAULTS[name])(value)
