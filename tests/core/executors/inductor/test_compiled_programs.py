"""Programs that compiled code once got wrong, by the real compiler: each gives what eager gives."""

import json
from typing import Any

import pytest

from tests.compiled_cache import empty_cache
from tests.core import child

SCRIPT = """
import json
import warnings
from torch import nn
from torch.func import hessian, jacfwd, jacrev, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

warnings.filterwarnings("ignore", "`torch.jit.script")  # PyTorch's own rules of jvp use it


def numbers(*size):
    g = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=g)


def averages(device):
    torch.manual_seed(0)
    net = nn.BatchNorm1d(3).to(device)
    average = AveragedModel(net, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        net(numbers(8 + step, 3).to(device))
        average.update_parameters(net)
    return [*average.buffers(), *net.buffers()]


def cubes(x):
    return (x**3).sum() + x[0] * x[1]


def derivatives(device):
    x = numbers(3).to(device)
    return [
        hessian(cubes)(x),
        jacfwd(jacrev(cubes))(x),
        jacrev(jacfwd(torch.sin))(x),
        vmap(hessian(cubes))(numbers(2, 3).to(device)),
    ]


def layouts(device):
    turned = torch.zeros(4, 3, device=device)
    turned.copy_(numbers(3, 4).t())
    conv = nn.Conv2d(2, 3, 2).to(device)
    other = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    with torch.no_grad():
        other.weight.copy_(numbers(3, 2, 2, 2)), other.bias.zero_()
    conv.load_state_dict(other.state_dict())
    negative = torch.zeros(2, device=device)
    negative.copy_(torch.view_as_complex(numbers(2, 2)).conj().imag)
    spread = torch.zeros(4, 3, device=device)
    spread.copy_(numbers(4, 1).expand(4, 3))
    return [turned * 2, conv(numbers(1, 2, 4, 4).to(device)), negative + 1, spread * 3]


def complexes(device):
    x, y = (torch.view_as_complex(numbers(4, k, 2)).to(device) for k in (4, 5))
    square, row = x @ x, y[:, 0]
    return [
        x - row, x.add(row, alpha=2), x - 2, 3 - x, x * 2, x / 3, torch.rsub(x, row, alpha=2), x.real - row,
        torch.addmm(square, x, y[:, :4], beta=2, alpha=3), torch.addmv(row, x, row), torch.baddbmm(*[x[None]] * 3),
        torch.addcmul(x, row, row, value=2), torch.addcdiv(x, row, x, value=2), torch.lerp(x, square, 0.5),
        x.sum(0) - 1, x.mean() * 2, x.pow(2), torch.eye(4, device=device) - x,
    ]


def complex_numbers(device):
    x, r = torch.view_as_complex(numbers(4, 4, 2)).to(device), numbers(4, 4).to(device)
    row = x[0]
    return [
        x * 2j, r * 2j, 3j - x, 3j - r, x + (1 + 2j), r + 2j, 2j / x, x / 2j, x**2j, r**(1 + 1j), 2j**x, 2j**r,
        x.add(row, alpha=2j), x.sub(row, alpha=2j), torch.rsub(x, row, alpha=2j), torch.addcmul(x, x, row, value=2j),
        torch.addmm(x, x, r + 0j, beta=1j, alpha=2j), torch.addmm(x, x, x, beta=0, alpha=2j),
        torch.baddbmm(x[None], x[None], x[None], alpha=2j), torch.addcdiv(x, row, x, value=2j),
        x.masked_fill(r > 0, 2j), torch.where(r > 0, x, 2j), torch.where(r > 0, r, 2j), x.clone().fill_(2j) + x,
        torch.full((2, 3), 2j, device=device), torch.zeros((), dtype=torch.complex64, device=device) + 1j, x == 2j,
        r != 2j, x.index_fill(0, torch.tensor([1]).to(device), 1j), torch.polar(r.abs(), r) * 1j, x.sum() * 1j,
        torch.stack(torch._foreach_mul([x, x + 1], [1j, 2.0])), r.double() * 0.1j,
    ]


PROGRAMS = [averages, derivatives, layouts, complexes, complex_numbers]
found = [program(ltc.lazy_device()) for program in PROGRAMS]
ltc.mark_step(wait=True)
wrong = {}
for program, got in zip(PROGRAMS, found):
    pairs = zip(got, program("cpu"), strict=True)
    wrong[program.__name__] = [
        k for k, (a, b) in enumerate(pairs) if not torch.allclose(a.cpu(), b, 1e-5, 1e-6, equal_nan=True)
    ]
names = ltc.metrics.counter_names()
wrong["counters"] = {name: ltc.metrics.counter_value(name) for name in names}
print(json.dumps(wrong))
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = empty_cache(tmp_path_factory.mktemp("compiled"))
    settings = {"LTC_COMPILE": "sync", "LTC_COMPILED_CACHE_DIR": cache}
    out, err = child.run(SCRIPT, timeout_s=280, **settings)
    assert err == ""
    return json.loads(out)  # type: ignore[no-any-return]


pytestmark = pytest.mark.timeout(300)


def test_all_of_it_is_compiled(wrong: dict[str, Any]) -> None:
    counters = wrong["counters"]
    assert counters["UncachedCompile"] == counters["CompiledProgram"]
    assert "CompileRefused" not in counters


@pytest.mark.parametrize(
    "program", ["averages", "derivatives", "layouts", "complexes", "complex_numbers"]
)
def test_it_gives_what_eager_gives(wrong: dict[str, Any], program: str) -> None:
    assert wrong[program] == []
