"""LTC_RANDOM=cpu_stream: a script that draws on the CPU and on the device has eager's numbers."""

from tests.core import child

PROGRAM = """
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F


def numbers(device):
    # Draws of every kind, on the CPU and on the device in turn.
    torch.manual_seed(5)
    x = torch.ones(3, 4, device=device)
    yield torch.rand(3, 4, device=device), torch.rand(2), torch.randn(5, device=device), torch.randn(2)
    yield torch.randint(9, (4,), device=device), torch.randperm(6, device=device), torch.randperm(6)
    yield torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 3, 9), torch.rand(1)
    yield x.clone().normal_(2, 3), x.t().clone().uniform_(-1, 1), x.clone()[:, ::2].exponential_(), torch.rand(1)
    yield x.clone().bernoulli_(0.3), torch.bernoulli(x / 3), x.clone().bernoulli_(x / 4), torch.rand(1)
    yield x.clone().random_(), x.clone().random_(7), x.clone().random_(-3, 7), torch.rand(1)
    yield x.clone().geometric_(0.3), x.clone().log_normal_(), x.clone().cauchy_(), torch.rand(1)
    yield torch.normal(x, 2.0), torch.normal(2.0, x), torch.multinomial(x, 2), torch.poisson(x), torch.rand(1)
    yield F.dropout(x, 0.4), F.alpha_dropout(x, 0.4), F.rrelu(-x, training=True), torch.rand(1)
    yield torch.rand(2, device=device, dtype=torch.float64), torch.rand(1)


def losses(device):
    # A training with dropout, random data and a checkpointed layer.
    torch.manual_seed(3)
    first, last = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)).to(device), nn.Linear(8, 2).to(device)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()])
    found = []
    for _ in range(4):
        x, y = torch.rand(5, 8).to(device), torch.randint(2, (5,)).to(device)
        optimizer.zero_grad()
        h = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False)
        loss = F.cross_entropy(last(F.dropout(h, 0.2)), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


for lazy, eager in zip(list(numbers(device)), list(numbers("cpu")), strict=True):
    for a, b in zip(lazy, eager, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0)
torch.testing.assert_close(losses(device), losses("cpu"))

# A state of the device is the CPU's.
torch.manual_seed(1)
before = torch.ltc.get_rng_state()
assert torch.equal(before.cpu(), torch.get_rng_state())
drawn = torch.rand(3, device=device), torch.rand(3)
torch.ltc.set_rng_state(before)
assert torch.equal(torch.rand(3, device=device).cpu(), drawn[0].cpu()) and torch.equal(torch.rand(3), drawn[1])
assert torch.ltc.initial_seed() == 1

# A generator of the device has its own stream.
torch.manual_seed(1)
own = torch.Generator(device).manual_seed(4)
x, y = torch.rand(3, device=device, generator=own), torch.ones(3, device=device).normal_(generator=own)
own = torch.Generator().manual_seed(4)
assert torch.equal(x.cpu(), torch.rand(3, generator=own)) and torch.equal(y.cpu(), torch.ones(3).normal_(generator=own))
assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))

# What is wrong is eager's error, and nothing is drawn.
torch.manual_seed(1)
for wrong in (lambda: torch.ones(2, device=device).normal_(0, -1), lambda: torch.ones(2, device=device).bernoulli_(2)):
    try:
        wrong()
    except RuntimeError as error:
        assert "normal expects std" in str(error) or "bernoulli_ expects p" in str(error), error
    else:
        raise AssertionError
assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))
try:
    torch.ltc.set_rng_state(torch.zeros(3, dtype=torch.uint8))
except RuntimeError as error:
    assert "not the state of a random stream" in str(error)
else:
    raise AssertionError
"""


def test_a_script_that_draws_on_both_has_eagers_numbers() -> None:
    assert child.run(PROGRAM, LTC_RANDOM="cpu_stream") == ("", "")


def test_by_default_the_streams_are_two() -> None:
    code = """
    torch.manual_seed(1)
    x = torch.rand(3, device=device).cpu()
    assert torch.equal(x, torch.rand(3))
    """
    assert child.run(code) == ("", "")
