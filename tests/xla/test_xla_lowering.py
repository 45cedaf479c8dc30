"""What torch_xla lowers wrongly, or not, gives eager's numbers all the same; what is refused is only what has to be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting

LARGE = torch.tensor([10**9 + 7, 2**53 + 1, 2**62 + 3, -(2**53) - 1, 2**63 - 2, -7, 7])
DIVISORS = torch.tensor([3, 7, 2**40 + 1, 3, 5, -2, -2])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x // y,
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: x // 3,
        lambda x, y: x.clone().floor_divide_(y),
        lambda x, y: x.int() // 7,
        lambda x, y: (x % 100).to(torch.int8) // 3,
        lambda x, y: x >> 3,
        lambda x, y: torch.tensor([-1, 1, 2, 0], device=x.device).pow(y[:4].neg().sign() * 3),
    ],
    ids=["floor", "trunc", "number", "in place", "int32", "int8", "shift", "negative power"],
)
def test_whole_numbers_are_exact(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    device = ltc.lazy_device()
    assert_same(call(LARGE.to(device), DIVISORS.to(device)), call(LARGE, DIVISORS))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.diagonal(),
        lambda t: t[:, 1:].diagonal(1, 1, 2),
        lambda t: t.diagonal(-2, 0, 2),
        lambda t: t[:, 1:].unfold(1, 2, 2),
        lambda t: t[1:].contiguous().as_strided((2, 3), (4, 1), 1),
        lambda t: t.transpose(0, 1).contiguous().as_strided((2, 3), (1, 4)),
    ],
    ids=["diagonal", "of a slice", "far off", "unfold", "strided", "strided of transposed"],
)
def test_views_are_read_written_and_differentiated(view: Callable[[Tensor], Tensor]) -> None:
    eager = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    lazy = eager.detach().to(ltc.lazy_device()).requires_grad_()
    wholes = []
    for leaf in (eager, lazy):
        whole = leaf * 1
        view(whole).mul_(3)
        (view(whole) * 2).sum().backward()
        wholes.append(whole)
    assert_same(wholes[1], wholes[0])
    assert_same(lazy.grad, eager.grad)


def test_results_of_two_inputs_are_not_mixed_up() -> None:
    x, y = torch.arange(3.0), torch.arange(3.0) + 5
    for call in (lambda x, y: (x * y, -x, y + 1), lambda x, y: (x * y, -y, x + 1)):
        found = call(x.to(ltc.lazy_device()), y.to(ltc.lazy_device()))
        ltc.mark_step()
        for got, expected in zip(found, call(x, y), strict=True):
            assert_same(got, expected)


def test_a_filled_tensor_beside_a_computed_one() -> None:
    x = torch.ones(3).to(ltc.lazy_device())
    for _ in range(2):
        filled, computed = torch.full((), 8.0, device=x.device), x * 2
        ltc.mark_step()
        assert float(filled) == 8.0 and computed.tolist() == [2.0] * 3
        filled.add_(1)  # it is nobody else's
        assert float(filled) == 9.0


POOLS: dict[str, list[tuple[dict[str, int], int]]] = {
    # The one has a rule, the other is learned.
    "avg_pool2d": [({"divisor_override": 2}, 1), ({}, 0), ({"padding": 1}, 0)],
    "max_pool2d": [({"dilation": 2}, 1), ({}, 0), ({"padding": 1}, 0), ({"dilation": 2}, 1)],
}


@pytest.mark.parametrize("name", POOLS)
def test_one_call_that_is_refused_leaves_the_others_of_its_op_on_the_device(name: str) -> None:
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    pool = getattr(torch.nn.functional, name)
    for options, fallbacks in POOLS[name]:
        with Counting() as counted:
            found = pool(x.to(ltc.lazy_device()), 3, **options).cpu()
        torch.testing.assert_close(found, pool(x, 3, **options))
        assert sum(counted.fallbacks.values()) == fallbacks


def test_a_mask_writes_on_the_device() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    lazy = x.to(ltc.lazy_device())
    with Counting() as counted:
        for t in (x, lazy):
            t[t > 2] = -1.0
        assert_same(lazy, x)
    assert not counted.fallbacks


def test_what_is_not_lowered_in_one_shape_runs_on_the_host() -> None:
    """XLA refuses the singular values of an empty matrix when the program is lowered, not when it is traced."""
    for shape in ((0, 0), (3, 3)):
        x = torch.eye(*shape)
        assert_same(torch.linalg.svdvals(x.to(ltc.lazy_device())), torch.linalg.svdvals(x))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers() -> None:
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        x = torch.tensor([1 + 2j, 3 - 4j]).to(dtype)
        lazy = x.to(ltc.lazy_device())
        wide = x.to(torch.complex64)
        assert lazy.cpu().dtype is dtype and torch.equal(lazy.cpu().to(torch.complex64), wide)
        assert_same(
            torch.view_as_real(lazy.to(torch.complex64).conj() * 2),
            torch.view_as_real(wide.conj() * 2).contiguous(),
        )
