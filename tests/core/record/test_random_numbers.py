"""Random numbers: the same seed gives the numbers eager PyTorch draws on the CPU, without a sync.

The default stream, generators, forking and states. What is recorded later draws later, whatever
thread or step it belongs to.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ltc_core as ltc
from ltc_core.settings import settings
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda t: t.normal_(1, 2),
    "uniform": lambda t: t.uniform_(-1, 3),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "exponential": lambda t: t.exponential_(2.0),
    "cauchy": lambda t: t.cauchy_(),
    "log_normal": lambda t: t.log_normal_(),
    "geometric": lambda t: t.geometric_(0.4),
    "random": lambda t: t.random_(),
    "random_to": lambda t: t.random_(10),
    "random_from": lambda t: t.random_(-3, 4),
    "bernoulli_tensor": lambda t: t.bernoulli_(torch.full((64,), 0.5, device=t.device)),
    "xavier": lambda t: torch.nn.init.xavier_uniform_(t.view(8, 8)),
    "truncated": lambda t: torch.nn.init.trunc_normal_(t),
    "orthogonal": lambda t: torch.nn.init.orthogonal_(t.view(8, 8)),
}
MAKING: dict[str, Callable[..., Any]] = {
    "rand": lambda **d: torch.rand(20, **d),
    "randn": lambda **d: torch.randn(5, 5, **d),
    "randint": lambda **d: torch.randint(-5, 5, (40,), **d),
    "randperm": lambda **d: torch.randperm(30, **d),
    "normal": lambda **d: torch.normal(0.0, 1.0, (20,), **d),
    "double": lambda **d: torch.randn(20, dtype=torch.float64, **d),
    "half": lambda **d: torch.rand(20, dtype=torch.float16, **d),
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 4, 4, 4)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    "multinomial": lambda x: torch.multinomial(x.abs(), 5, replacement=True),
    "multinomial_once": lambda x: torch.multinomial(x.abs() + 0.1, 5),
    "poisson": lambda x: torch.poisson(x.abs() * 3),
    "normal_of_tensors": lambda x: torch.normal(x, x.abs()),
    "gumbel": lambda x: F.gumbel_softmax(x.view(8, 8), hard=True),
    "categorical": lambda x: torch.distributions.Categorical(logits=x).sample((4,)),
    "gamma": lambda x: torch.distributions.Gamma(x.abs() + 1, 2.0).sample(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 8, 4)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    def program(device: torch.device) -> Any:
        torch.manual_seed(123)
        draws = [IN_PLACE[name](torch.zeros(64, device=device)).clone() for _ in range(2)]
        return draws, torch.rand(2, device=device)

    beside_eager(program, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKING)
def test_factories(name: str) -> None:
    def program(device: torch.device) -> Any:
        torch.manual_seed(7)
        first = MAKING[name](device=device)
        g = torch.Generator(device)
        g.manual_seed(7)
        return first, MAKING[name](device=device, generator=g), MAKING[name](device=device)

    beside_eager(program)


@pytest.mark.parametrize("name", OTHERS)
def test_other_draws(name: str) -> None:
    def program(device: torch.device) -> Any:
        x = torch.linspace(-2, 2, 64).to(device)
        torch.manual_seed(3)
        return OTHERS[name](x), OTHERS[name](x), torch.rand(2, device=device)

    beside_eager(program, rtol=1e-5, atol=1e-6)


def test_drawing_does_not_sync() -> None:
    device = ltc.lazy_device()
    torch.manual_seed(0)
    ltc.mark_step()
    with Counting() as counted:
        state = ltc.get_rng_state()
        F.dropout(torch.ones(3, device=device)).add_(torch.rand(3, device=device))
        ltc.set_rng_state(state)
        with ltc.fork_rng():
            torch.rand(1, device=device)
        with torch.random.fork_rng(device_type=settings.device_name, devices=[0]):
            torch.rand(1, device=device)
        torch.manual_seed(1)
        torch.rand(1, device=device)
    assert not counted.syncs


def test_the_seed_of_torch_seeds_the_device_and_nothing_else_does() -> None:
    device = ltc.lazy_device()
    torch.manual_seed(5)
    first = torch.rand(3, device=device)
    torch.rand(100)  # the CPU's stream is another one
    second = torch.rand(3, device=device)
    torch.manual_seed(5)
    assert torch.rand(3, device=device).equal(first)
    assert torch.rand(3, device=device).equal(second)
    assert not first.equal(second)


def test_a_run_without_a_seed_is_not_the_same_numbers_again() -> None:
    device = ltc.lazy_device()
    torch.seed()
    first = torch.rand(4, device=device)
    torch.seed()
    assert not torch.rand(4, device=device).equal(first)


def test_seeding_by_the_devices_own_verbs() -> None:
    device = ltc.lazy_device()
    module = getattr(torch, settings.device_name)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(9))
    for seed in (ltc.manual_seed, ltc.set_rng_state, module.manual_seed, module.manual_seed_all):
        seed(9)
        assert_same(torch.rand(3, device=device), expected)
    assert module.initial_seed() == 9


def test_states() -> None:
    device = ltc.lazy_device()
    module = getattr(torch, settings.device_name)
    torch.manual_seed(0)
    for get, put in (
        (ltc.get_rng_state, ltc.set_rng_state),
        (module.get_rng_state, module.set_rng_state),
    ):
        torch.rand(5, device=device)
        state = get()
        kept = state.clone()
        first = torch.rand(3, device=device)
        assert state.equal(kept)  # a state is a value: drawing does not change it
        put(state)
        assert torch.rand(3, device=device).equal(first)
        put(state.cpu())
        ltc.mark_step()
        assert torch.rand(3, device=device).equal(first)
    with pytest.raises(RuntimeError, match="not the state of a random stream") as raised:
        ltc.set_rng_state(torch.zeros(3, dtype=torch.uint8))
    assert "Next:" in str(raised.value)


def test_a_state_of_the_cpu_goes_on_with_its_numbers() -> None:
    torch.manual_seed(11)
    torch.rand(7)
    ltc.set_rng_state(torch.get_rng_state())
    assert_same(torch.rand(4, device=ltc.lazy_device()), torch.rand(4))


def test_forking() -> None:
    device = ltc.lazy_device()
    torch.manual_seed(0)
    expected = torch.rand(3, device=device)
    forks: list[Callable[[], Any]] = [
        ltc.fork_rng,
        lambda: torch.random.fork_rng(device_type=settings.device_name),
    ]
    for fork in forks:
        torch.manual_seed(0)
        with fork():
            inside = torch.rand(3, device=device)
            torch.manual_seed(99)
            torch.rand(5, device=device)
        assert inside.equal(expected) and torch.rand(3, device=device).equal(expected)
    torch.manual_seed(0)
    with ltc.fork_rng(enabled=False):
        torch.rand(3, device=device)
    assert not torch.rand(3, device=device).equal(expected)


class TestGenerators:
    def test_a_generator_is_a_stream_of_its_own(self) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(1)
            g, h = torch.Generator(device), torch.Generator(device)
            g.manual_seed(5), h.manual_seed(5)
            a = torch.rand(3, device=device, generator=g)
            b = torch.rand(3, device=device)
            c = torch.zeros(3, device=device).normal_(generator=g)
            d = torch.rand(3, device=device, generator=h)
            state = g.get_state()
            e = torch.randperm(5, device=device, generator=g)
            g.set_state(state)
            f = torch.randperm(5, device=device, generator=g)
            return a, b, c, d, e, f, g.initial_seed()

        beside_eager(program)

    def test_copies(self) -> None:
        device = ltc.lazy_device()
        g = torch.Generator(device)
        g.manual_seed(3)
        torch.rand(2, device=device, generator=g)
        clone = g.clone_state()
        assert torch.rand(4, device=device, generator=g).equal(
            torch.rand(4, device=device, generator=clone)
        )

    def test_a_generator_of_another_device_is_refused(self) -> None:
        device = ltc.lazy_device()
        for call in (
            lambda: torch.rand(2, device=device, generator=torch.Generator()),
            lambda: torch.zeros(2, device=device).normal_(generator=torch.Generator()),
            lambda: torch.randperm(2, device=device, generator=torch.Generator()),
        ):
            with pytest.raises(RuntimeError, match="Expected a .* device type for generator"):
                call()
        assert torch.rand(2, device=device).shape == (2,)

    def test_a_generator_that_is_gone_is_gone(self) -> None:
        device = ltc.lazy_device()
        draws = [torch.rand(1, device=device, generator=torch.Generator(device)) for _ in range(3)]
        assert len({t.item() for t in draws}) == 1  # each begins at PyTorch's default seed


def test_a_random_step_compiles_once() -> None:
    device = ltc.lazy_device()
    torch.manual_seed(0)
    seen = []
    for _ in range(4):
        with Counting() as counted:
            seen.append(F.dropout(torch.ones(16, device=device)) + torch.randn(16, device=device))
            ltc.mark_step()
    assert counted.compiles == 0 and counted.syncs == {"MarkStep": 1}
    assert len({tuple(t.tolist()) for t in seen}) == 4
