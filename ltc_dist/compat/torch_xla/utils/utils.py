"""`xu`: `torch_xla.utils.utils`, small helpers of training scripts."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property as LazyProperty
from typing import Any

import torch

from ltc_core.serialization.tree import map_leaves
from ltc_dist.data.batch import to_device

__all__ = [
    "Cleaner",
    "DataWrapper",
    "FnDataGenerator",
    "LazyProperty",
    "SampleGenerator",
    "TimedScope",
    "TmpFolder",
    "as_list",
    "check_env_flag",
    "eprint",
    "flatten_nested_tuple",
    "for_each_instance",
    "for_each_instance_rewrite",
    "get_free_tcp_ports",
    "get_print_fn",
    "getenv_as",
    "list_copy_append",
    "null_print",
    "parallel_work",
    "shape",
    "timed",
]

_TRUE = ("on", "1", "yes", "true", "y")


class SampleGenerator:
    """A loader without data: it yields the same sample again and again.

    Args:
        data: the sample.
        sample_count: how often.
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._sample_count = data, sample_count
        self._count = 0

    def __iter__(self) -> SampleGenerator:
        return SampleGenerator(self._data, self._sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __next__(self) -> Any:
        if self._count >= self._sample_count:
            raise StopIteration
        self._count += 1
        return self._data


class FnDataGenerator:
    """Yields batches of random samples and a function's results for them.

    Args:
        func: called with the batch; returns the labels.
        batch_size: samples.
        gen_tensor: makes a sample batch of a size, such as `torch.randn`.
        dims: those of a sample; [1] by default.
        count: batches.
    """

    def __init__(
        self,
        func: Callable[[torch.Tensor], Any],
        batch_size: int,
        gen_tensor: Callable[..., torch.Tensor],
        dims: Sequence[int] | None = None,
        count: int = 1,
    ) -> None:
        self._func, self._gen_tensor = func, gen_tensor
        self._size = (batch_size, *(dims or (1,)))
        self._count = count
        self._emitted = 0

    def __iter__(self) -> FnDataGenerator:
        again = copy.copy(self)
        again._emitted = 0
        return again

    def __len__(self) -> int:
        return self._count

    def __next__(self) -> tuple[torch.Tensor, Any]:
        if self._emitted >= self._count:
            raise StopIteration
        self._emitted += 1
        data = self._gen_tensor(*self._size)
        return data, self._func(data)


class DataWrapper:
    """Converts a class to tensors (`get_tensors`) and back (`from_tensors`)."""

    def get_tensors(self) -> Any:
        """Return the tensors."""
        raise NotImplementedError

    def from_tensors(self, tensors: Any) -> Any:
        """Make one of tensors."""
        raise NotImplementedError

    def to(self, device: torch.device) -> Any:
        """Make one of the tensors on a device, as a loader does."""
        return self.from_tensors(to_device(self.get_tensors(), device))


class Cleaner:
    """Calls a function when it is dropped.

    Args:
        func: without arguments.
    """

    def __init__(self, func: Callable[[], Any]) -> None:
        self.func = func

    def __del__(self) -> None:
        self.func()


class TmpFolder:
    """A temporary directory, its path in `name`; removed when this is dropped."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp()
        self._cleaner = Cleaner(lambda name=self.name: shutil.rmtree(name, ignore_errors=True))  # type: ignore[misc]


def getenv_as(name: str, type: Callable[[Any], Any], defval: Any = None) -> Any:
    """Value of a variable, converted to a type; 'bool' is read as an integer."""
    text = os.environ.get(name)
    if text is None:
        return defval
    return bool(int(text)) if type is bool else type(text)


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether a variable is on."""
    return os.environ.get(name, default).lower() in _TRUE


def as_list(t: Any) -> list[Any] | tuple[Any, ...]:
    """Return lists and tuples as they are, anything else as a list of one."""
    return t if isinstance(t, tuple | list) else [t]


def shape(inputs: Any) -> tuple[int, ...]:
    """Sizes of nested lists, taken from their first items."""
    found = []
    while isinstance(inputs, list | tuple):
        found.append(len(inputs))
        inputs = inputs[0] if inputs else None
    return tuple(found)


def flatten_nested_tuple(inputs: Any) -> tuple[Any, ...]:
    """Leaves of nested lists and tuples, in order."""
    if not isinstance(inputs, list | tuple):
        return (inputs,)
    return tuple(item for part in inputs for item in flatten_nested_tuple(part))


def list_copy_append(ilist: Sequence[Any], item: Any) -> list[Any]:
    """Return a list with one item more."""
    return [*ilist, item]


def for_each_instance(
    value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]
) -> None:
    """Call a function for each selected value of a structure; once for a value at several places.

    Values are found in lists, tuples, sets, dicts and their keys, in a `DataWrapper` and in what objects have as
    attributes.
    """

    def visit(chosen: Any) -> Any:
        fn(chosen)
        return chosen

    for_each_instance_rewrite(value, select_fn, visit)


def for_each_instance_rewrite(
    value: Any, select_fn: Callable[[Any], bool], fn: Callable[[Any], Any]
) -> Any:
    """A structure in which each selected value is replaced by the result of a function.

    Containers and objects with a changed value are copied. A value at several places is replaced by one result.
    """

    def rewrite(item: Any) -> Any:
        if select_fn(item):
            return fn(item)
        tensors = item.get_tensors()
        found = walk(tensors)
        return item if found is tensors else item.from_tensors(found)

    walk = functools.partial(
        map_leaves,
        lambda item: isinstance(item, DataWrapper) or select_fn(item),
        rewrite,
        objects=sys.maxsize,
        keys=True,
    )
    return walk(value)


def eprint(*args: Any, **kwargs: Any) -> None:
    """Print to stderr."""
    print(*args, file=sys.stderr, **kwargs)


def null_print(*args: Any, **kwargs: Any) -> None:
    """Print nothing."""


def get_print_fn(debug: bool | None = None) -> Callable[..., None]:
    """`eprint` if DEBUG is on, else `null_print`."""
    return eprint if (check_env_flag("DEBUG") if debug is None else debug) else null_print


def timed(fn: Callable[[], Any], msg: str = "", printfn: Callable[..., Any] | None = eprint) -> Any:
    """Call a function and print how long it took, in seconds; nothing without a `printfn`."""
    with TimedScope(msg, printfn):
        return fn()


@contextlib.contextmanager
def TimedScope(msg: str = "", printfn: Callable[..., Any] | None = eprint) -> Iterator[None]:
    """Print how long a block took, in seconds; nothing without a `printfn`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        if printfn is not None:
            printfn(f"{msg}{time.perf_counter() - started:.3f}s")


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def parallel_work(num_workers: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Map a function over lists of arguments, in threads; returns the results in order."""
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(fn, *args))
