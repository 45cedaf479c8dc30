"""A program beside eager: `run_beside_eager(program)` runs it once on the CPU and several times on the device.

A program is a function of a device, written as a user writes it, that returns whatever it found. The first round on
the device is recorded by Python, the later ones are followed in C++. Each round must give what eager gives: the same
structure, dtypes, values, strides of what is read back, and exceptions of the same types.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import ltc_core as ltc

__all__ = ["ROUNDS", "Program", "Raised", "attempt", "difference", "run_beside_eager"]

Program = Callable[[torch.device], Any]
ROUNDS = 4
RTOL, ATOL = 1e-4, 1e-5


class Raised:
    """An exception, in the place of a result."""

    def __init__(self, error: BaseException) -> None:
        self.type = type(error)
        self.text = str(error)

    def __repr__(self) -> str:
        return f"{self.type.__name__}: {self.text[:400]}"


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, read back to the CPU; `Raised` if it or the reading raises."""
    try:
        return pytree.tree_map(_on_cpu, call())
    except Exception as error:
        return Raised(error)


def _on_cpu(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    # A copy, which has the strides that a transfer gives, on the CPU as from the device.
    copy = torch.ops.aten._to_copy.default(item.detach(), device="cpu")
    return copy.requires_grad_(item.requires_grad)


def _outcome(program: Program, device: torch.device) -> Any:
    torch.manual_seed(0)
    outcome = attempt(lambda: program(device))
    if device.type != "cpu":
        late = attempt(lambda: ltc.mark_step(wait=True))
        if isinstance(late, Raised) and not isinstance(outcome, Raised):
            return late
    return outcome


def run_beside_eager(
    program: Program,
    rtol: float = RTOL,
    atol: float = ATOL,
    rounds: int = ROUNDS,
    device: torch.device | None = None,
) -> None:
    """Run a program on both devices.

    Raises:
        AssertionError: a round on the device gives something else than eager.
    """
    expected = _outcome(program, torch.device("cpu"))
    for number in range(1, rounds + 1):
        got = _outcome(program, device or ltc.lazy_device())
        found = difference(got, expected, rtol, atol)
        if found:
            raise AssertionError(f"round {number} of {rounds}: {found}")


def difference(got: Any, expected: Any, rtol: float = RTOL, atol: float = ATOL) -> str:
    """In what two outcomes differ, in words; "" if in nothing."""
    if isinstance(got, Raised) or isinstance(expected, Raised):
        return _difference_of_leaves(got, expected, rtol, atol)
    got_leaves, got_spec = pytree.tree_flatten(got)
    leaves, spec = pytree.tree_flatten(expected)
    if got_spec != spec:
        return f"the structure is {got_spec}, eager's {spec}"
    for number, (found, wanted) in enumerate(zip(got_leaves, leaves, strict=True)):
        what = _difference_of_leaves(found, wanted, rtol, atol)
        if what:
            return f"leaf {number} of {len(leaves)}: {what}"
    return ""


def _difference_of_leaves(got: Any, expected: Any, rtol: float, atol: float) -> str:
    if isinstance(expected, Raised):
        is_same = isinstance(got, Raised) and issubclass(got.type, expected.type)
        return "" if is_same else f"eager raises {expected!r}; the device gives {got!r}"
    if isinstance(got, Raised):
        return f"the device raises {got!r}; eager gives {expected!r}"
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        return _difference_of_tensors(got, expected, rtol, atol)
    if isinstance(expected, float) and isinstance(got, float):
        close = torch.isclose(torch.tensor(got), torch.tensor(expected), rtol, atol, equal_nan=True)
        return "" if close else f"{got}, eager gives {expected}"
    return "" if type(got) is type(expected) and got == expected else f"{got!r}, eager {expected!r}"


def _difference_of_tensors(
    got: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float
) -> str:
    for what in ("dtype", "shape", "requires_grad"):
        ours, eagers = getattr(got, what), getattr(expected, what)
        if ours != eagers:
            return f"{what} is {ours}, eager's {eagers}"
    if _strides(got) != _strides(expected):
        return f"strides are {got.stride()}, eager's {expected.stride()}, of {tuple(got.shape)}"
    try:
        torch.testing.assert_close(
            got.detach(), expected.detach(), rtol=rtol, atol=atol, equal_nan=True
        )
    except AssertionError as error:
        more = f"\ngot {got.detach()}\neager {expected.detach()}" if got.numel() <= 16 else ""
        return f"{error}{more}"
    return ""


def _strides(t: torch.Tensor) -> list[int]:
    """Strides of the dims that have any."""
    if t.layout is not torch.strided or t.numel() == 0:
        return []
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
