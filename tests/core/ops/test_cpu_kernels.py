"""Ops that eager runs as one kernel on the CPU are recorded as one op, and have eager's values to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ltc_core as ltc
from ltc_core.ops.cpu_kernels import WHOLE
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def test_no_such_op_of_this_torch_is_missing() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    found = [
        n for n in names if has_kernel(n, "CompositeImplicitAutograd") and has_kernel(n, "CPU")
    ]
    assert sorted(n.removeprefix("aten::") for n in found) == sorted(WHOLE)


@pytest.mark.parametrize("op", [F.silu, F.mish, lambda x: F.channel_shuffle(x, 2)])
def test_first_and_second_derivatives(op: Callable[..., Any]) -> None:
    def program(device: torch.device) -> Any:
        x = torch.randn(2, 4, 3, 3).to(device).requires_grad_()
        weight = torch.randn(2, 4, 3, 3).to(device)
        (once,) = torch.autograd.grad((op(x) * weight).square().sum(), x)
        (first,) = torch.autograd.grad((op(x) * weight).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return once, first.detach(), second

    beside_eager(program)


@pytest.mark.parametrize("name", WHOLE)
def test_it_is_one_op(name: str) -> None:
    x = torch.ones(2, 4, 3, 3, device=ltc.lazy_device())
    args = (x, 2) if name == "native_channel_shuffle" else (x, x)
    with Counting() as counts:
        result = getattr(torch.ops.aten, name)(*args)
        ltc.mark_step()
    assert counts.ops[name] == 1 and result.numel() == x.numel()
