"""The error tree. Every error a user can meet is one of these, and also the builtin they expect.

    LtcError (Exception)
    |- SettingsError (ValueError)               a setting has an illegal value or name
    |- VersionError (ImportError)               a library is too old or too new
    |- BuildError (RuntimeError)                a wheel cannot be made
    |- DeviceError (RuntimeError)               no such device, or it cannot be built
    |  |- DeviceIndexError (IndexError)         the process has fewer devices
    |  `- TpuHostError (OSError)                the facts of a TPU host cannot be read
    |- DeviceMismatchError (RuntimeError)       one op was given tensors of two devices
    |- ShardingError (AssertionError)           a mesh does not fit the devices, or a spec does not fit a tensor
    |  |- MinibatchError (RuntimeError)         a process cannot divide its part of a batch evenly
    |  `- MissingShardingError (KeyError)       a batch has names without a spec
    |- UnsupportedOpError (NotImplementedError) an op has no rule and may not fall back
    |- ExecutionError (RuntimeError)            an op failed while the graph ran
    |- ExecutionForbiddenError (RuntimeError)   recorded ops would run where the script says that they must not
    |- NoValueError (RuntimeError)              a tensor that is read has no memory
    |  |- PlaceholderError (RuntimeError)       it was made without
    |  `- DonatedError (RuntimeError)           the script donated it
    |- OutsideWriteError (AssertionError)       the function of a loop writes to a tensor that it closes over
    |- GraphError (AssertionError)              a graph is not well formed: a fault of ltc
    |- CheckpointError (RuntimeError)
    |  |- CheckpointFormatError (ValueError)    the file is damaged or not one of ours
    |  `- CheckpointIOError (OSError)           the file cannot be read or written
    |- ExportError (ValueError)                 a model cannot be exported, or is called with other inputs
    |- DataFormatError (ValueError)             a data file is truncated or foreign
    |- LoaderError (RuntimeError)               a loader is misused, or delivers nothing
    |- ProfilerError (RuntimeError)             a trace cannot be started, stopped or written
    |- RankError (RuntimeError)                 a process of a job failed, or cannot be started
    |  |- RankEndedError (RuntimeError)         a process that was waited for has ended
    |  `- RankTimeoutError (TimeoutError)       processes did not arrive in time
    `- CollectiveError (RuntimeError)           processes do not run the same collectives
       |- PeerEndedError (RuntimeError)         a process of a collective has ended
       `- CollectiveTimeoutError (TimeoutError) a process did not reach its collective in time

An error has four parts: what failed, what was got, where the user recorded it, what to do next.
`op_error` makes an LtcError that is also the exception type which eager PyTorch raised.
"""

import copy
from collections.abc import Iterable
from typing import Any

_MAX_QUOTED = 5
_OS_FIELDS = ("errno", "strerror", "filename")


class LtcError(Exception):
    """Base of all errors; renders its four parts, leaving out those that are empty.

    Args:
        what: what failed; may have several lines, the first is shown first.
        got: what was found, against what was expected.
        where: the user's location, such as 'train.py:41 in loss_fn'.
        next: what to do about it.
    """

    where_words = "recorded at"
    seen = False  # whether the error was raised to the user
    _op_base: type[Exception] | None = None

    what: str
    got: str
    where: str
    next: str

    def __init__(self, what: str, *, got: str = "", where: str = "", next: str = "") -> None:
        # Not super(): the builtin bases (OSError, UnicodeDecodeError) parse their arguments.
        BaseException.__init__(self, what)
        self.what = what
        self.got = got
        self.where = where
        self.next = next

    def __str__(self) -> str:
        first, *rest = self.what.split("\n")
        if self.where:
            first = f"{first} ({self.where_words} {self.where})"
        lines = [first, *rest]
        if self.got:
            lines.append(f"  got: {self.got}")
        if self.next:
            lines.append(f"  Next: {self.next}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        os_fields: dict[str, Any] = {}
        if isinstance(self, OSError):
            os_fields = {name: getattr(self, name) for name in _OS_FIELDS}
        kind = self._op_base or type(self)
        return _rebuild, (kind, self._op_base is not None, dict(self.__dict__), os_fields)


class SettingsError(LtcError, ValueError):
    """A setting has an illegal value, or there is no setting of that name."""

    where_words = "set in"


class VersionError(LtcError, ImportError):
    """A library has a version that this package does not work with."""


class BuildError(LtcError, RuntimeError):
    """A wheel of this package cannot be made."""


class DeviceError(LtcError, RuntimeError):
    """There is no such device, or it cannot be built or used."""


class DeviceIndexError(DeviceError, IndexError):
    """The process has no device of that index."""


class TpuHostError(DeviceError, OSError):
    """The facts of a TPU host cannot be read: no metadata server answers, or a fact is missing or malformed."""


class DeviceMismatchError(LtcError, RuntimeError):
    """One op was given tensors of two devices."""


class ShardingError(LtcError, AssertionError, ValueError):
    """A mesh does not fit the devices, or a partition spec does not fit a mesh or a tensor.

    torch_xla raises AssertionError for some of these faults and ValueError for others.
    """

    where_words = "called at"


class MinibatchError(ShardingError, RuntimeError):
    """The devices of a process cannot have equal parts of its part of a batch."""


class MissingShardingError(ShardingError, KeyError):
    """A batch has names for which there is no spec."""


class UnsupportedOpError(LtcError, NotImplementedError):
    """An op has no rule on the device and may not run elsewhere."""


class ExecutionError(LtcError, RuntimeError):
    """An op failed while its graph ran in the background."""


class ExecutionForbiddenError(LtcError, RuntimeError):
    """Recorded ops would run within a block that the script says is one graph."""


class NoValueError(LtcError, RuntimeError):
    """A tensor that is read has no memory."""


class PlaceholderError(NoValueError):
    """A tensor that is read was made without memory. Ops may be recorded with it, but not run."""


class DonatedError(NoValueError):
    """The buffer of a tensor that is read was donated by the script."""


class OutsideWriteError(LtcError, AssertionError):
    """The function of a loop writes to a tensor that it closes over."""


class GraphError(LtcError, AssertionError):
    """A graph is not well formed; only a fault of ltc makes one."""


class CheckpointError(LtcError, RuntimeError):
    """A checkpoint cannot be saved or loaded."""


class CheckpointFormatError(CheckpointError, ValueError):
    """A checkpoint is damaged, refused, or not one of ours."""


class CheckpointIOError(CheckpointError, OSError):
    """A checkpoint's file cannot be read or written; `errno` says why, when it is known."""

    def __init__(
        self,
        what: str,
        *,
        got: str = "",
        where: str = "",
        next: str = "",
        errno: int | None = None,
    ) -> None:
        super().__init__(what, got=got, where=where, next=next)
        self.errno = errno


class ExportError(LtcError, ValueError):
    """A model cannot be exported, or an exported one was given other inputs than those it was exported for."""


class DataFormatError(LtcError, ValueError):
    """A data file is truncated, damaged or of another format."""


class LoaderError(LtcError, RuntimeError):
    """A loader is misused, or has delivered nothing for too long."""


class ProfilerError(LtcError, RuntimeError):
    """A trace cannot be started, stopped or written."""


class RankError(LtcError, RuntimeError):
    """A process of a job failed, or cannot be started; `exitcode` is that of the process, if it has ended."""

    exitcode: int | None = None


class RankEndedError(RankError):
    """A process that was waited for has ended."""


class RankTimeoutError(RankError, TimeoutError):
    """Processes did not arrive in time; `exitcode` is None."""


class CollectiveError(LtcError, RuntimeError):
    """Processes cannot be connected, or do not run the same collectives."""


class PeerEndedError(CollectiveError):
    """A process that a collective waits for has ended."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A process did not reach its collective in time."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type, if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def listed(items: Iterable[object], limit: int = _MAX_QUOTED) -> str:
    """Quote at most `limit` items and count the rest: 'a, b, c and 7 more'."""
    texts = [str(item) for item in items]
    if len(texts) <= limit:
        return ", ".join(texts)
    return f"{', '.join(texts[:limit])} and {len(texts) - limit} more"


def op_error(
    original: BaseException, *, what: str, got: str = "", where: str = "", next: str = ""
) -> LtcError:
    """Return an LtcError that is also of the type of `original`, whose message it keeps.

    A type that is neither Python's nor PyTorch's is replaced by its nearest base that is, so
    that the error can be rebuilt in another process. An interrupt becomes an ExecutionError.
    `original` is the `__cause__` of the returned error. If `original` is an LtcError, its parts and its own cause are
    used instead.
    """
    cause: BaseException | None = original
    message = str(original)
    if isinstance(original, LtcError):  # its own `got` and `next` are more precise
        message, got, next = original.what, original.got or got, original.next or next
        cause = original.__cause__
    if message and message not in what:
        what = f"{what}: {message}" if what else message
    error = _class_for(original)(what, got=got, where=where, next=next)
    if isinstance(error, OSError) and isinstance(original, OSError):
        for name in _OS_FIELDS:
            setattr(error, name, getattr(original, name))
    # Without the traceback, whose frames would keep the op's operands alive.
    error.__cause__ = cause.with_traceback(None) if cause is not None else None
    return error


def with_notes(error: LtcError) -> LtcError:
    """The same error with its first part as its text. The other parts are notes: only tracebacks show them."""
    parts = {error.where_words: error.where, "got:": error.got, "Next:": error.next}
    error.where = error.got = error.next = ""
    for name, part in parts.items():
        if part:
            error.add_note(f"  {name} {part}")
    return error


def to_raise(kept: BaseException) -> BaseException:
    """A copy of a stored LtcError, to be raised; marks the stored error as seen. Other errors are returned as they are.

    The traceback of a raised error refers to the frames it passes through, and so to their tensors. If the stored error
    itself were raised, it would keep them alive.
    """
    if not isinstance(kept, LtcError):
        return kept
    kept.seen = True
    error = copy.copy(kept)
    error.__cause__ = kept.__cause__
    return error


_op_classes: dict[type[Exception], type[LtcError]] = {}


def _class_for(original: BaseException) -> type[LtcError]:
    if isinstance(original, LtcError):
        return type(original)
    if not isinstance(original, Exception):
        return ExecutionError
    for base in type(original).__mro__:
        if not issubclass(base, Exception) or issubclass(base, BaseExceptionGroup):
            continue  # an exception group cannot be made from a message alone
        if base.__module__ == "builtins" or base.__module__.partition(".")[0] == "torch":
            return _op_class(base)
    return ExecutionError


def _op_class(base: type[Exception]) -> type[LtcError]:
    made = _op_classes.get(base)
    if made is None:
        if base is Exception:
            made = LtcError
        else:
            names = {"__module__": __name__, "__doc__": base.__doc__, "_op_base": base}
            made = type(f"Op{base.__name__}", (LtcError, base), names)
        made = _op_classes.setdefault(base, made)
    return made


def _rebuild(
    kind: type[Exception], made: bool, state: dict[str, Any], os_fields: dict[str, Any]
) -> LtcError:
    """Unpickle: call the class with `what` alone, then restore the attributes."""
    cls: Any = _op_class(kind) if made else kind
    error: LtcError = cls(state["what"])
    error.__dict__.update(state)
    for name, value in os_fields.items():
        setattr(error, name, value)
    return error
