"""The comparison with eager: `beside_eager(program)` runs a program on the CPU and several times on the lazy device.

A program is a function of a device, written as a user writes it, that returns whatever it found, lazy tensors included.
Python records its ops in the first round, C++ records those that come back in later ones. Each round must return what
eager returns. `difference` says in what two outcomes differ; `attempt` makes an outcome of a call that may raise.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

import ltc_core as ltc

__all__ = [
    "ATOL", "ROUNDS", "RTOL", "Program", "Raised", "assert_same", "attempt", "beside_eager", "difference", "on_cpu",
    "run_beside_eager",
]  # fmt: skip

Program = Callable[[torch.device], Any]
# How the class of the device's exception relates to eager's: it may derive from it, or must be the same; the text of
# the device's exception contains eager's.
Errors = Literal["subclass", "class", "text"]
ROUNDS = 4
# What `run_beside_eager` allows: results of kernels that PyTorch's compiler has generated.
RTOL, ATOL = 1e-4, 1e-5


class Raised:
    """An exception, in the place of a result."""

    def __init__(self, error: BaseException) -> None:
        self.type = type(error)
        self.text = str(error)

    def __repr__(self) -> str:
        return f"{self.type.__name__}: {self.text[:400]}"


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, read back to the CPU with its strides; `Raised` if it or the reading raises."""
    try:
        return pytree.tree_map(_read, call(*args))
    except Exception as error:
        return Raised(error)


def _read(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    # A copy, which has the strides that a transfer gives, on the CPU as from the device.
    copy = torch.ops.aten._to_copy.default(item.detach(), device="cpu")
    return copy.requires_grad_(item.requires_grad)


def on_cpu(tree: Any) -> Any:
    """The tree with all its tensors detached and on the CPU."""
    return pytree.tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, tree)


# -- two outcomes ----------------------------------------------------------------------------------


def difference(
    got: Any,
    expected: Any,
    rtol: float | None = 0.0,
    atol: float | None = 0.0,
    *,
    strides: bool = False,
    errors: Errors = "subclass",
    equal_nan: bool = True,
) -> str:
    """In what two outcomes differ, in words; "" if in nothing.

    Structure, and for each tensor dtype, shape, requires_grad and values; floats as tensors, all else by `==`.

    Args:
        rtol, atol: as of torch.testing.assert_close; None for both: those of the dtype.
        strides: compare them too; both outcomes were read back by `attempt`.
        errors: how exceptions are compared, in the place of an outcome or of a leaf.
    """
    compare = _Comparison(rtol, atol, strides, errors, equal_nan)
    if isinstance(got, Raised) or isinstance(expected, Raised):
        return compare.leaves(got, expected)
    got_leaves, got_spec = pytree.tree_flatten(got)
    leaves, spec = pytree.tree_flatten(expected)
    if got_spec != spec:
        return f"the structure is {got_spec}, eager's {spec}"
    for number, (found, wanted) in enumerate(zip(got_leaves, leaves, strict=True)):
        what = compare.leaves(found, wanted)
        if what:
            return f"leaf {number} of {len(leaves)}: {what}"
    return ""


class _Comparison:
    """The options of one comparison, and how leaves are compared under them."""

    def __init__(
        self, rtol: float | None, atol: float | None, strides: bool, errors: Errors, equal_nan: bool
    ) -> None:
        self._close = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
        self._strides = strides
        self._errors = errors

    def leaves(self, got: Any, expected: Any) -> str:
        if isinstance(expected, Raised):
            is_same = isinstance(got, Raised) and self._is_same_error(got, expected)
            return "" if is_same else f"eager raises {expected!r}; the device gives {got!r}"
        if isinstance(got, Raised):
            return f"the device raises {got!r}; eager gives {expected!r}"
        if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
            return self._tensors(got, expected)
        if type(got) is type(expected) and isinstance(expected, float | complex):
            return self._values(got, expected)
        is_same = type(got) is type(expected) and got == expected
        return "" if is_same else f"{got!r}, eager {expected!r}"

    def _is_same_error(self, got: Raised, expected: Raised) -> bool:
        if self._errors == "class":
            return got.type is expected.type
        has_text = self._errors == "subclass" or expected.text in got.text
        return issubclass(got.type, expected.type) and has_text

    def _tensors(self, got: torch.Tensor, expected: torch.Tensor) -> str:
        for what in ("dtype", "shape", "requires_grad"):
            ours, eagers = getattr(got, what), getattr(expected, what)
            if ours != eagers:
                return f"{what} is {ours}, eager's {eagers}"
        if self._strides and _strides(got) != _strides(expected):
            return f"strides are {got.stride()}, eager's {expected.stride()}, of {tuple(got.shape)}"
        if got.device != expected.device:
            if not ltc.is_lazy_tensor(got):
                return f"device is {got.device}, eager's {expected.device}"
            got = got.cpu()
        return self._values(got.detach(), expected.detach())

    def _values(self, got: Any, expected: Any) -> str:
        try:
            torch.testing.assert_close(got, expected, **self._close)  # type: ignore[arg-type]
        except AssertionError as error:
            is_small = not isinstance(got, torch.Tensor) or got.numel() <= 16
            return f"{error}\ngot {got}\neager {expected}" if is_small else str(error)
        return ""


def _strides(t: torch.Tensor) -> list[int]:
    """Strides of the dims that have any."""
    if t.layout is not torch.strided or t.numel() == 0:
        return []
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def assert_same(
    got: Any, expected: Any, rtol: float | None = 0.0, atol: float | None = 0.0, **options: Any
) -> None:
    """Compare two outcomes; the options are those of `difference`."""
    what = difference(got, expected, rtol, atol, **options)
    assert not what, what


# -- a program on two devices ----------------------------------------------------------------------


def beside_eager(
    program: Program, rtol: float = 0.0, atol: float = 0.0, rounds: int = ROUNDS
) -> None:
    """Run a program once on the CPU and `rounds` times on the device; a loop that repeats its steps needs one.

    What it raises is raised: the program is right in eager. Values are compared to the last bit unless told otherwise.
    """
    torch.manual_seed(0)
    expected = program(torch.device("cpu"))
    for number in range(1, rounds + 1):
        torch.manual_seed(0)
        what = difference(program(ltc.lazy_device()), expected, rtol, atol)
        assert not what, f"round {number} of {rounds}: {what}"
        ltc.mark_step()


def run_beside_eager(
    program: Program,
    rtol: float = RTOL,
    atol: float = ATOL,
    rounds: int = ROUNDS,
    device: torch.device | None = None,
    errors: Errors = "subclass",
) -> None:
    """Run a program on both devices; exceptions are outcomes, and strides of what is read back are compared.

    Raises:
        AssertionError: a round on the device gives something else than eager.
    """
    expected = _outcome(program, torch.device("cpu"))
    for number in range(1, rounds + 1):
        got = _outcome(program, device or ltc.lazy_device())
        what = difference(got, expected, rtol, atol, strides=True, errors=errors)
        assert not what, f"round {number} of {rounds}: {what}"


def _outcome(program: Program, device: torch.device) -> Any:
    torch.manual_seed(0)
    outcome = attempt(lambda: program(device))
    if device.type != "cpu":
        late = attempt(lambda: ltc.mark_step(wait=True))
        if isinstance(late, Raised) and not isinstance(outcome, Raised):
            return late
    return outcome
