"""Ops that do what no op of ATen does: wait, fail, have no meta kernel, write without one, give what they were given.

`gate` and `fail` run where graphs run, so a test decides when a step ends and how. Each call of `gate` needs a
`Gate` of its own.
"""

import itertools
import threading
from collections.abc import Callable

import torch

__all__ = ["Gate", "fail", "kept", "no_meta", "ran_in", "scale_", "whatever"]

_library = torch.library.Library("ltc_probe", "FRAGMENT")
_numbers = itertools.count()
_gates: dict[int, "Gate"] = {}

# What `fail` raises, by number.
_FAILURES: dict[int, Callable[[], BaseException]] = {
    0: lambda: ValueError("this op fails"),
    1: lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    2: lambda: SystemExit(7),
    3: lambda: IndexError("this op fails too"),
}


def _define(
    schema: str, on_cpu: Callable[..., object], on_meta: Callable[..., object] | None
) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, on_cpu, "CPU")
    if on_meta is not None:
        _library.impl(name, on_meta, "Meta")


class Gate:
    """An op that runs no further than to here until the gate is opened; leaving the block opens it.

    A number of its own makes it a program of its own: one that ran before could be run where it is cut.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._open = threading.Event()
        self.reached = threading.Event()

    def __enter__(self) -> "Gate":
        _gates[self._number] = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Give a copy of `x` once the gate is open."""
        result: torch.Tensor = torch.ops.ltc_probe.gate(x, self._number)
        return result

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(30), "nobody opened the gate"


def _gate(x: torch.Tensor, number: int) -> torch.Tensor:
    _gates[number].pass_through()
    return x.clone()


ran_in: list[str] = []  # names of the threads `whatever` ran in


def _whatever(x: torch.Tensor) -> torch.Tensor:
    ran_in.append(threading.current_thread().name)
    return x.clone()


def _fail(x: torch.Tensor, kind: int, number: int) -> torch.Tensor:
    raise _FAILURES[kind]()


def _scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x.mul_(by).sum()


_define("gate(Tensor x, int number) -> Tensor", _gate, lambda x, n: torch.empty_like(x))
_define("fail(Tensor x, int kind, int n) -> Tensor", _fail, lambda x, k, n: torch.empty_like(x))
_define("whatever(Tensor x) -> Tensor", _whatever, torch.empty_like)
_define("no_meta(Tensor x, float by) -> Tensor", lambda x, by: x * by, None)
_define("kept(Tensor x) -> Tensor", lambda x: x, None)
_define("scale_(Tensor(a!) x, float by) -> Tensor", _scale, None)


def fail(x: torch.Tensor, kind: int = 0) -> torch.Tensor:
    """Raise ValueError (0), an allocator's RuntimeError (1), SystemExit (2) or IndexError (3) where the graph runs."""
    result: torch.Tensor = torch.ops.ltc_probe.fail(x, kind, next(_numbers))
    return result


def whatever(x: torch.Tensor) -> torch.Tensor:
    """Copy `x` and note in `ran_in` which thread did it."""
    result: torch.Tensor = torch.ops.ltc_probe.whatever(x)
    return result


def no_meta(x: torch.Tensor, by: float) -> torch.Tensor:
    """Multiply, by an op without a meta kernel."""
    result: torch.Tensor = torch.ops.ltc_probe.no_meta(x, by)
    return result


def kept(x: torch.Tensor) -> torch.Tensor:
    """Give `x` itself, against the op's schema."""
    result: torch.Tensor = torch.ops.ltc_probe.kept(x)
    return result


def scale_(x: torch.Tensor, by: float) -> torch.Tensor:
    """Multiply in place and give the sum, by an op without a meta kernel."""
    result: torch.Tensor = torch.ops.ltc_probe.scale_(x, by)
    return result
