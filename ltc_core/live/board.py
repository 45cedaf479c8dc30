"""The directory of states: each watched process has one file in it, which it writes in place.

`StateFile` is the writer's side. `read_states` is the readers': it says which processes have ended,
and removes the files of those that nobody needs to see any more. A file is of one process, known by
its id and its start. Used by `publisher` and `table`'s callers.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from ltc_core.errors import ProfilerError
from ltc_core.live.sampler import where
from ltc_core.live.state import MAX_BYTES, State, decoded, encoded
from ltc_core.private_directory import refuse_shared

__all__ = ["Seen", "StateFile", "directories", "directory_of", "is_off", "read_states"]

_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")
_NAME = re.compile(r"state-(\d+)")
_OF_LAUNCHERS = "ltc-launch-*/beats"  # in TMPDIR, with --watch
_NEAR_S = 2.0  # the clock of a host may be set between two looks at when a process began
_READS = 3  # of a file that is being written


@dataclass(frozen=True)
class Seen:
    """A state that a reader has found.

    Attributes:
        is_ended: the process has ended, and has not said so: it was killed, or left by os._exit.
        is_stopped: a signal has stopped the process.
    """

    state: State
    is_ended: bool = False
    is_stopped: bool = False


def is_off(setting: str | None) -> bool:
    """Whether a value of LTC_WATCH says that nothing is published."""
    return setting is None or setting.lower() in _OFF


def _named(setting: str | None) -> Path | None:
    """The directory that a value of LTC_WATCH names; None if it names none."""
    if setting is None or is_off(setting) or setting.lower() in _ON:
        return None
    return Path(setting)


def directory_of(setting: str | None) -> Path:
    """The directory that a value of LTC_WATCH names; without one, that of this user in TMPDIR."""
    return _named(setting) or Path(tempfile.gettempdir()) / f"ltc-watch-{os.geteuid()}"


def directories(setting: str | None) -> list[Path]:
    """Where processes of this user publish: where LTC_WATCH says, else in TMPDIR, also below `ltc-launch --watch`."""
    if _named(setting) is not None:
        return [directory_of(setting)]
    of_launchers = sorted(Path(tempfile.gettempdir()).glob(_OF_LAUNCHERS))
    return [directory_of(setting), *filter(_is_ours, of_launchers)]


def _is_ours(directory: Path) -> bool:
    try:
        return directory.stat().st_uid == os.geteuid()
    except OSError:  # its job has ended meanwhile
        return False


class StateFile:
    """The file of this process, for this user alone.

    Raises:
        ProfilerError: the directory cannot be made or written to, or other users may write to it.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"state-{os.getpid()}"
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            refuse_shared(directory)
            if directory.stat().st_uid != os.geteuid():
                raise PermissionError(f"{directory} belongs to another user")
            # A new file: one that is there is of a process that has ended, and had the same id.
            self.path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise ProfilerError(
                f"the state of this process cannot be published in {directory}",
                got=error.strerror or str(error),
                next="let LTC_WATCH name a directory that only you can write to, or unset it",
            ) from None

    def write(self, state: State) -> None:
        """Replace the state. Cost: 0.1 ms."""
        os.pwrite(self._descriptor, encoded(state), 0)

    def remove(self) -> None:
        """Close and remove the file: the process ends by itself."""
        self.drop()
        self.path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Close the descriptor; the file stays: in a forked child, for the parent."""
        os.close(self._descriptor)


def read_states(directory: Path) -> list[Seen]:
    """The states in a directory, in the order of jobs and ranks.

    A process that was killed is in the list, as ended, as long as another process of its job runs. Otherwise its file
    is removed. Files of other hosts and containers are left alone, and are not in the list.
    """
    found, here = [], where()
    for path in _files(directory):
        state = _read(path)
        if state is not None and state.where == here:
            found.append((path, Seen(state, *_process(state))))
    running = {seen.state.job for _, seen in found if not seen.is_ended and seen.state.job}
    kept = []
    for path, seen in found:
        if seen.is_ended and seen.state.job not in running:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            kept.append(seen)
    return sorted(_newest(kept), key=lambda s: (s.state.job, s.state.rank, s.state.pid))


def _files(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []


def _read(path: Path) -> State | None:
    for _ in range(_READS):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # it is gone, or another user's
            return None
        try:
            content = os.pread(descriptor, MAX_BYTES, 0)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        state = decoded(content)
        if state is not None:
            return state
    return None


def _process(state: State) -> tuple[bool, bool]:
    """Whether the process has ended, and whether a signal has stopped it."""
    try:
        process = psutil.Process(state.pid)
        if abs(process.create_time() - state.began_s) > _NEAR_S:
            return True, False
        status = process.status()
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return True, False
    except psutil.AccessDenied:
        return False, False
    return status == psutil.STATUS_ZOMBIE, status == psutil.STATUS_STOPPED


def _newest(found: list[Seen]) -> list[Seen]:
    """Without the ended process of a rank that was started again."""
    running = {(s.state.job, s.state.rank) for s in found if not s.is_ended and s.state.rank >= 0}
    last: dict[tuple[str, int, int], Seen] = {}
    for seen in sorted(found, key=lambda s: s.state.began_s):
        state = seen.state
        if seen.is_ended and (state.job, state.rank) in running:
            continue
        last[state.job, state.rank, state.pid if state.rank < 0 or not seen.is_ended else 0] = seen
    return list(last.values())
