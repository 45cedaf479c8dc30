"""One program on two devices: `beside_eager(program)` runs it on the CPU and on the lazy device.

The program takes the device and returns whatever it found, lazy tensors included; both answers
must be the same, to the last bit unless told otherwise. Random numbers start at the same seed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import ltc_core as ltc

__all__ = ["assert_same", "beside_eager"]


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
    program: Callable[[torch.device], Any], rtol: float = 0.0, atol: float = 0.0
) -> None:
    answers = []
    for device in (torch.device("cpu"), ltc.lazy_device()):
        torch.manual_seed(0)
        answers.append(program(device))
    assert_same(answers[1], answers[0], rtol, atol)
