"""The running trace of one device: a cursor in a trie of all steps that were recorded before.

A training loop repeats itself. If the next op has the signature (op, operands by number, structure) of the step that
followed here last time, the metadata of its results are known: nothing is inferred or hashed. For another signature
`make_node` makes the node of a new step. A cut (`runtime.device_context`) takes the path, the inputs, the scalars and
the alive values. The trace belongs to the device, not to a thread: several threads may record one step of a training
loop.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch

from ltc_core.errors import PlaceholderError
from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.record import dynamic_steps
from ltc_core.record.dynamic_shapes import Call, num_any
from ltc_core.record.step import Step
from ltc_core.tensor.buffer import MemoryCounter
from ltc_core.tensor.handles import Cell, Value, View
from ltc_core.tensor.native_objects import native

__all__ = ["Cut", "Step", "Trace", "epochs"]

# A lock that its owner may take again. C++ takes one of its own kind without a call of Python.
_new_lock: Callable[[], Any] = threading.RLock if native is None else native.Lock
epochs = itertools.count(1)
# Counts of references, as `map` sees them. A weak reference would not tell whether somebody holds a value: the garbage
# collector clears those to all garbage before it calls the first finalizer, and the others may still record ops on it.
_HELD_BY_LIST = next(map(getrefcount, [object()]))
_HELD_BY_ROW = _HELD_BY_LIST + 1  # by a list that is made for the count, and by the row


def _alive(values: list[Value | None]) -> list[tuple[int, Value]]:
    """Index and value of those that somebody beside the list holds."""
    counts = list(map(getrefcount, values))
    return [
        (index, value)
        for index, (value, count) in enumerate(zip(values, counts, strict=True))
        if value is not None and count > _HELD_BY_LIST
    ]


def _held(
    inputs: list[tuple[int, Value, Any, TensorMeta]],
) -> list[tuple[int, Value | None, Any]]:
    """Index, value and buffer of each row; the value is None if only its row holds it."""
    counts = list(map(getrefcount, [value for _, value, _, _ in inputs]))
    return [
        (index, value if count > _HELD_BY_ROW else None, buffer)
        for (index, value, buffer, _), count in zip(inputs, counts, strict=True)
    ]


if native is not None:
    _alive, _held = native.alive, native.held


class Cut:
    """What a cut takes out of a trace.

    Attributes:
        path: the last step.
        inputs: (number, value, buffer); the value is None if nobody else holds it.
        scalars: the Python numbers.
        alive: (number, value) of the results that somebody holds.
        sized: number -> meta, where it is another one than in the path's steps, which are dynamic.
    """

    __slots__ = ("alive", "inputs", "path", "scalars", "sized")

    def __init__(
        self,
        path: Step,
        inputs: list[tuple[int, Value | None, Any]],
        scalars: list[Any],
        alive: list[tuple[int, Value]],
        sized: dict[int, TensorMeta],
    ) -> None:
        self.path = path
        self.inputs = inputs
        self.scalars = scalars
        self.alive = alive
        self.sized = sized


class Trace:
    """The recording of one device. Callers hold `lock`, except for `empty` and `after_fork`.

    Args:
        device: the device whose ops are recorded.
        memory: counts the bytes of its buffers.

    `on_limit` is called before an op is recorded into a trace of `limit` values or more. With `may_be_dynamic`, steps
    that differ in sizes only become one; with `may_compile`, common sizes have steps of their own.
    """

    __slots__ = (
        "at_once", "count", "cursor", "device", "epoch", "first_limit", "give_more", "inputs", "limit", "lock",
        "may_be_dynamic", "may_compile", "memory", "on_limit", "reads", "root", "scalars", "sized", "steps",
        "uploads", "values", "varying",
    )  # fmt: skip

    def __init__(self, device: torch.device, memory: MemoryCounter) -> None:
        self.device = device
        self.memory = memory
        self.may_be_dynamic = self.may_compile = False
        self.varying: tuple[int, Step | None, frozenset[int]] = (0, None, frozenset())
        self.lock = _new_lock()
        self.on_limit: Callable[[], None] | None = None
        self.reads: Any = None  # for C++: numbers that it may read (`runtime.known_reads`)
        self.uploads: Any = None  # for C++: those that it makes (`runtime.known_uploads`)
        self.give_more: Any = None  # for C++: what a step that runs early calls at the limit
        self.at_once: Any = None  # for C++: its ops run where they are called (`runtime.at_once`)
        self.first_limit = 1 << 62
        self.steps = 0
        self.root = Step(None, None, ())
        self._restart()

    epoch: int
    cursor: Step
    count: int
    limit: int
    values: list[Value | None]
    inputs: list[tuple[int, Value, Any, TensorMeta]]
    scalars: list[Any]
    sized: dict[int, TensorMeta]

    def _restart(self) -> None:
        # A cut defers interrupts meanwhile: the inputs of one trace do not belong to the cursor of another.
        # `csrc/known_cut.h` does the same.
        self.epoch = next(epochs)
        self.cursor = self.root
        self.count = 0
        self.limit = self.first_limit
        self.values = []
        self.inputs = []
        self.scalars = []
        self.sized = {}

    def after_fork(self) -> None:
        """Renew the lock: its owner may be a thread that the forked child does not have."""
        self.lock = _new_lock()

    def __bool__(self) -> bool:
        """Whether anything was recorded since the last cut."""
        return self.cursor is not self.root

    # -- operands ------------------------------------------------------------------------------

    def bind(self, value: Value, meta: TensorMeta) -> TensorMeta:
        """Make a value with a buffer an input of the trace. Returns `meta`, which enters the signature of this op.

        Raises:
            LtcError: the op that computes the value failed.
        """
        buffer = value.buffer
        if buffer is not None and type(buffer.error) is not PlaceholderError:
            buffer.check()
        index = self.count
        value.epoch = self.epoch
        value.index = index
        self.count = index + 1
        self.values.append(None)
        self.inputs.append((index, value, buffer, meta))
        return meta

    def rewind(self) -> None:
        """Make the trace agree with its cursor, after an op whose recording failed or was interrupted (Ctrl-C).

        If the cursor has not moved, the inputs bound for the op are unbound. If it has moved, the results and scalars
        that are missing get placeholders: nobody holds these results.
        """
        end = self.cursor.end
        while self.inputs and self.inputs[-1][0] >= end:
            value = self.inputs.pop()[1]
            value.epoch = value.index = -1
        self.values[end:] = []
        self.values += [None] * (end - len(self.values))
        self.count = end
        for index in [index for index in self.sized if index >= end]:
            del self.sized[index]
        missing = self.cursor.num_scalars - len(self.scalars)
        self.scalars[self.cursor.num_scalars :] = []
        self.scalars += [0] * missing

    # -- the trie ------------------------------------------------------------------------------

    def advance(
        self,
        key: tuple[Any, ...],
        grow: Callable[[], Node],
        before: int,
        scalars: list[Any],
        describe: Callable[[], Call],
    ) -> Step:
        """Move the cursor along `key`; `grow` makes the node of a new step.

        `before` is the count of values before this op's inputs were bound. `scalars` are those of the op, which are not
        yet in `self.scalars`; the sizes of a dynamic step are added to them. `describe` says what decides the metas of
        the results.
        """
        cursor = self.cursor
        step = cursor.child(key)
        if step is None:
            default = torch.get_default_dtype()
            step = cursor.child((*key, default))
            if step is not None:
                key = (*key, default)
        # After a dynamic step the setting is too late: what follows is for any size.
        is_open = self.may_be_dynamic or cursor.dynamic is not None
        if is_open and dynamic_steps.may_follow(cursor, step):
            key, step = dynamic_steps.find(
                cursor, key, step, grow, scalars, describe(), self.may_compile
            )
        if step is None:
            key, step = self._new_step(key, grow(), before, scalars, describe)
        cursor.prefer(key, step)
        self.cursor = step
        return step

    def _new_step(
        self,
        key: tuple[Any, ...],
        node: Node,
        before: int,
        scalars: list[Any],
        describe: Callable[[], Call],
    ) -> tuple[tuple[Any, ...], Step]:
        """A new step after the cursor, and its key."""
        cursor = self.cursor
        if node.uses_default_dtype:
            key = (*key, torch.get_default_dtype())
        dynamic = None
        if self.may_be_dynamic or cursor.dynamic is not None:
            first = len(self.scalars) + len(scalars)
            key, node, dynamic, sizes = dynamic_steps.make(
                cursor, key, node, first, describe(), self
            )
            scalars += sizes
        inputs = tuple((index, meta) for index, _, _, meta in self._inputs_since(before))
        step = Step(cursor, node, inputs)
        step.end = node.first + len(node.outs)
        step.num_scalars = cursor.num_scalars + len(scalars)
        step.dynamic = dynamic
        self.steps += 1
        if num_any(key):
            cursor.patterns = [*(cursor.patterns or ()), (key, step)]
        return key, step

    def _inputs_since(self, before: int) -> list[tuple[int, Any, Any, TensorMeta]]:
        found = []
        for item in reversed(self.inputs):
            if item[0] < before:
                break
            found.append(item)
        return found[::-1]

    def note_size(self, meta: TensorMeta, of_step: TensorMeta | None) -> None:
        """Note the meta of the next value where the node of its step, which is dynamic, has another one."""
        if meta is not of_step:
            self.sized[self.count] = meta

    def define(self) -> Value:
        """A new value of the trace with the next number. It is alive at the cut if somebody else still holds it."""
        index = self.count
        value = Value(self.epoch, index)
        self.values.append(value)
        self.count = index + 1
        return value

    def define_view(self) -> Value:
        """A view's new value with the next number. The cut drops it: it can be recorded again from its base."""
        index = self.count
        self.values.append(None)
        self.count = index + 1
        return Value(self.epoch, index)

    def skip(self) -> None:
        """Use up the next number for an undefined result."""
        self.values.append(None)
        self.count += 1

    # -- the cut -------------------------------------------------------------------------------

    @property
    def alive(self) -> list[int]:
        """Numbers of the results that somebody holds."""
        return [index for index, _ in _alive(self.values)]

    def cut(self) -> Cut:
        """End the trace and start the next one at the root of the trie."""
        alive, inputs = _alive(self.values), _held(self.inputs)
        cut = Cut(self.cursor, inputs, self.scalars, alive, self.sizes())
        self._restart()
        return cut

    def sizes(self) -> dict[int, TensorMeta]:
        """Metas of this run where the nodes may have those of another one: number -> meta."""
        if self.cursor.dynamic is None:
            return self.sized
        return self.sized | {index: meta for index, _, _, meta in self.inputs}

    def forget(self) -> None:
        """Drop the trie and the programs that its steps cache; the running trace must be empty.

        The garbage collector does not look at steps that C++ made: the cycles are ended here.
        """
        ways = [self.root]
        while ways:
            step = ways.pop()
            ways += [child for _, child in step.all_children()]
            ways += [child for _, child in step.patterns or ()]
            step.forget()
        self.root = Step(None, None, ())
        self.steps = 0
        self._restart()

    def empty(self, meta: TensorMeta) -> Cell:
        """A cell of memory that nobody has written yet; no op is recorded until it is used."""
        return Cell(self, Value(-1, -1), meta)

    def path(self, end: Step) -> list[Step]:
        """The steps from the root to `end`."""
        steps = []
        step: Step | None = end
        while step is not None and step.node is not None:
            steps.append(step)
            step = step.parent
        return steps[::-1]


def is_stale(handle: Cell | View, epoch: int) -> bool:
    """Whether a handle's value must be recorded (again) before an op can read it."""
    if type(handle) is Cell:
        return handle.value.epoch != epoch and handle.value.buffer is None
    return handle.value.epoch != epoch or handle.version != handle.base.version  # type: ignore[union-attr]
