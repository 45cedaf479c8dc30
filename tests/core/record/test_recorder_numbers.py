"""Numbers are inputs of a graph, sizes and dims are its structure: what makes a new step and what must not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ltc_core as ltc
from tests.core.beside_eager import assert_same
from tests.core.programs.new_steps import NoNewSteps, trace_steps


@pytest.fixture(scope="module", autouse=True)
def _random_state() -> None:
    """Made on first use and kept: no leak of the test that draws first."""
    ltc.get_rng_state()


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


@pytest.fixture
def x(device: torch.device) -> Iterator[Tensor]:
    yield torch.arange(1.0, 7.0).view(2, 3).to(device)
    ltc.mark_step()


# -- numbers ---------------------------------------------------------------------------------------

Call = Callable[[Tensor, float], Tensor]


def _written(t: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    t = t.clone()
    write(t)
    return t


NUMBER_CALLS: dict[str, Call] = {
    "add": lambda t, s: t + s,
    "add alpha": lambda t, s: t.add(t, alpha=s),
    "add in place": lambda t, s: _written(t, lambda w: w.add_(s)),
    "rsub": lambda t, s: s - t,
    "div": lambda t, s: t / s,
    "floor_divide": lambda t, s: t // s,
    "remainder": lambda t, s: t % s,
    "pow": lambda t, s: t**s,
    "rpow": lambda t, s: s**t,
    "compare": lambda t, s: t > s,
    "clamp": lambda t, s: t.clamp(0.1, s),
    "clamp max": lambda t, s: t.clamp(max=s),
    "lerp": lambda t, s: t.lerp(t * 2, s),
    "addcmul": lambda t, s: torch.addcmul(t, t, t, value=s),
    "addmm": lambda t, s: torch.addmm(t @ t.t(), t, t.t(), beta=s, alpha=2 * s),
    "full": lambda t, s: torch.full((2,), s, device=t.device),
    "full_like": lambda t, s: torch.full_like(t, s),
    "fill": lambda t, s: _written(t, lambda w: w.fill_(s)),
    "where": lambda t, s: torch.where(t > 2, t, s),
    "masked_fill": lambda t, s: t.masked_fill(t > 2, s),
    "assign an element": lambda t, s: _written(t, lambda w: w.__setitem__((0, 1), s)),
    "assign a row": lambda t, s: _written(t, lambda w: w.__setitem__(1, s)),
    "assign by a mask": lambda t, s: _written(t, lambda w: w.__setitem__(w > 2, s)),
    "linspace": lambda t, s: torch.linspace(0, s, 3, device=t.device),
    "0-dim tensor": lambda t, s: t * torch.tensor(s),
    "0-dim tensor of the device": lambda t, s: t * torch.tensor(s, device=t.device),
    "scalar_tensor": lambda t, s: t * torch.scalar_tensor(s, device=t.device),
    "leaky_relu": lambda t, s: F.leaky_relu(t, s),
    "elu": lambda t, s: F.elu(t, s),
    "softplus": lambda t, s: F.softplus(t, beta=s),
    "pad": lambda t, s: F.pad(t, (1, 1), value=s),
    "layer_norm eps": lambda t, s: F.layer_norm(t, (3,), eps=s),
    "batch_norm momentum": lambda t, s: F.batch_norm(t, None, None, training=True, momentum=s),
    "dropout": lambda t, s: F.dropout(t, s / 10),
    "uniform": lambda t, s: torch.empty_like(t).uniform_(0, s),
    "normal": lambda t, s: torch.empty_like(t).normal_(s, s),
    "bernoulli": lambda t, s: torch.empty_like(t).bernoulli_(s / 10),
    "foreach": lambda t, s: torch._foreach_mul([t, t], s)[1],
    "foreach list": lambda t, s: torch._foreach_mul([t, t], [s, 2 * s])[1],
    "smooth_l1": lambda t, s: F.smooth_l1_loss(t, t * 2, beta=s),
    "vector_norm": lambda t, s: torch.linalg.vector_norm(t, s),
    "nan_to_num": lambda t, s: torch.nan_to_num(t, s),
    "quantile": lambda t, s: torch.quantile(t, s / 10),
    "attention scale": lambda t, s: F.scaled_dot_product_attention(t[None], t[None], t[None], scale=s),
    "cross_entropy": lambda t, s: F.cross_entropy(t, t.softmax(1), label_smoothing=s / 10),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBER_CALLS)
def test_another_number_makes_no_new_step_and_is_the_one_used(x: Tensor, name: str) -> None:
    call = NUMBER_CALLS[name]
    for number in (1.25, 1.5):
        found = call(x, number)
        ltc.mark_step()
    del found
    torch.manual_seed(1)
    with NoNewSteps():
        found = call(x, 0.5)
        ltc.mark_step()
    eager = x.cpu()
    torch.manual_seed(1)
    assert_same(found, call(eager, 0.5))


def test_numbers_keep_their_places(x: Tensor) -> None:
    """Several numbers in one step, in one op and in many; each run has its own."""

    def step(a: float, b: float, c: float) -> Tensor:
        return torch.addmm(x @ x.t() * a, x, x.t(), beta=b, alpha=c) + a - b

    first = step(1.0, 2.0, 3.0)
    ltc.mark_step()
    del first
    with NoNewSteps():
        first = step(0.5, 3.0, 0.25)
        ltc.mark_step()
    eager = x.cpu()
    gram = eager @ eager.t()
    assert torch.equal(
        first.cpu(), torch.addmm(gram * 0.5, eager, eager.t(), beta=3.0, alpha=0.25) + 0.5 - 3.0
    )


def test_steps_in_flight_each_have_their_numbers(x: Tensor) -> None:
    results = []
    for k in range(20):
        results.append(x * float(k))
        ltc.mark_step()
    for k, result in enumerate(results):
        assert torch.equal(result.cpu(), x.cpu() * k)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float16])
def test_the_type_of_a_number_counts(device: torch.device, dtype: torch.dtype) -> None:
    """1, 1.0, True and 1j are equal, and give tensors of different types."""
    host = torch.ones(3, dtype=dtype)
    t = host.to(device)
    numbers = (1, 1.0, True, 1 + 0j, 1, True, 1.0)
    for number in (*numbers, *reversed(numbers)):
        got = t * number
        assert got.dtype == (host * number).dtype, repr(number)
        ltc.mark_step()
        assert_same(got, host * number)


def test_numbers_that_make_a_shape_keep_their_type(device: torch.device) -> None:
    for end in (6, 6.0, 6, True, 1, 1.0):
        assert_same(torch.arange(end, device=device), torch.arange(end))


# -- structure -------------------------------------------------------------------------------------

STRUCTURE_CALLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "dim": lambda t, n: t.sum(n),
    "index": lambda t, n: t.select(1, n) + 1,
    "slice": lambda t, n: t[:, n:] + 1,
    "size": lambda t, n: t.repeat(n + 1, 1),
    "new size": lambda t, n: torch.ones(n + 1, device=t.device),
    "keepdim": lambda t, n: t.sum(1, keepdim=bool(n)),
    "dtype": lambda t, n: t.to((torch.int32, torch.float16)[n]),
    "approximation": lambda t, n: F.gelu(t, approximate=("none", "tanh")[n]),
    "rounding": lambda t, n: torch.div(t, 2, rounding_mode=("floor", "trunc")[n]),
    "reduction": lambda t, n: F.mse_loss(t, t + 1, reduction=("sum", "mean")[n]),
    "lens": lambda t, n: _written(t, lambda w: w[n].zero_()),
    "positions": lambda t, n: torch.cat([(t, t + 1)[n], t]),
    "end": lambda t, n: torch.arange(n + 2, device=t.device),
}


@pytest.mark.parametrize("name", STRUCTURE_CALLS)
def test_other_structure_makes_a_new_step_and_the_right_answer(x: Tensor, name: str) -> None:
    call = STRUCTURE_CALLS[name]
    eager = x.cpu()
    for n in (0, 1, 0, 1):
        assert_same(call(x, n), call(eager, n))
    before = trace_steps()
    ltc.mark_step()
    for n in (0, 1):
        assert_same(call(x, n), call(eager, n))
    assert trace_steps() == before
