"""One program on two devices: `beside_eager(program)` runs it on the CPU and on the lazy device.

The program takes the device and returns whatever it found, lazy tensors included. It runs several times on the lazy
device: Python records its ops first, C++ records those that come back. All answers must be the same, to the last bit
unless told otherwise. Random numbers start at the same seed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import ltc_core as ltc

__all__ = ["ROUNDS", "assert_same", "beside_eager"]

ROUNDS = 4


def assert_same(got: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare two structures; tensors by shape, dtype, requires_grad and values."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    leaves, spec = pytree.tree_flatten(expected)
    assert got_spec == spec
    for number, (found, wanted) in enumerate(zip(got_leaves, leaves, strict=True)):
        if not isinstance(wanted, torch.Tensor):
            assert found == wanted, f"leaf {number}: {found!r}, eager gives {wanted!r}"
            continue
        assert ltc.is_lazy_tensor(found) or wanted.device == found.device
        assert found.requires_grad == wanted.requires_grad, f"leaf {number}"
        torch.testing.assert_close(
            found.detach().cpu(),
            wanted.detach(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda text, number=number: f"leaf {number}: {text}",
        )


def beside_eager(
    program: Callable[[torch.device], Any],
    rtol: float = 0.0,
    atol: float = 0.0,
    rounds: int = ROUNDS,
) -> None:
    """Run a program once on the CPU and `rounds` times on the device; a loop that repeats its steps needs one."""
    torch.manual_seed(0)
    expected = program(torch.device("cpu"))
    for _ in range(rounds):
        torch.manual_seed(0)
        assert_same(program(ltc.lazy_device()), expected, rtol, atol)
        ltc.mark_step()
