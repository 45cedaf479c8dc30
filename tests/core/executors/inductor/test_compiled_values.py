"""Values that more decides than ops: default dtype, casts that round, signs of zero, errors; by the real compiler."""

from pathlib import Path

import pytest

from tests.compiled_cache import empty_cache
from tests.core import child

SCRIPT = """
import torch.nn.functional as F


def default_dtype(device):
    torch.set_default_dtype(torch.float64)
    try:
        i, b = torch.arange(1, 9).to(device), torch.tensor([True, False]).to(device)
        return [
            i / 3, i.sqrt(), i.log(), i.sinh(), torch.atan2(i, i + 1), i * 0.1, i.sigmoid(), i**0.3, b / 3, i.erf(),
            torch.where(i > 3, 0.1, 0.2), torch.full((2,), 0.1, device=device), torch.linspace(0, 1, 7, device=device),
            torch.arange(0, 1, 0.1, device=device), i.true_divide(7), i.view(torch.float64), torch.fft.fft(i),
        ]
    finally:
        torch.set_default_dtype(torch.float32)


def roundings(device):
    x = torch.linspace(-3, 3, 97).to(device)
    return [x.bfloat16().float() - x, x.half().float() - x, x.double().float().half().double() - x]


def narrow_chains(device):
    results = []
    for dtype in (torch.bfloat16, torch.float16):
        x, s = torch.linspace(-3, 3, 128).to(device).to(dtype), torch.tensor(0.37).to(device)
        y = x + 0.3
        results += [
            (x * 100).int(), (x * 33 + 0.1).round(), (x * 33).floor(), (x * 3 - x - x - x).sign(), (x.exp() * 10).int(),
            (x * 1.001 - x).bool(), x * 3 > y * 3, (x.cumsum(0) * 10).int(), (x * 1.7 + 3).argmax(),
            torch.lerp(x, y, 0.3).mul(100).int(), torch.addcmul(x, y, y, value=0.3).mul(100).int(),
            torch.addcdiv(x, y, x + 9, value=0.3).mul(100).int(), F.silu(x).mul(100).int(), F.gelu(x).mul(50).int(),
        ]
        # ATen rounds the scalars of these ops first, and alpha * y only after the last whole vector of elements.
        results += [
            x + 0.1234567, x - 0.37, 0.37 - x, x + s, x.add(y, alpha=0.37), x.sub(y, alpha=0.37),
            torch.rsub(x, y, alpha=0.37), *torch._foreach_add([x, y], [y, x], alpha=0.37),
        ]
    return results


def zeros(device):
    mask = torch.tensor([True, False, True]).to(device)
    x, zero = torch.ones(3, device=device), torch.zeros(3, device=device)
    plus, minus = torch.full((3,), 0.0, device=device), torch.full((3,), -0.0, device=device)
    filled = [x.clone().fill_(-0.0), x.masked_fill(mask, -0.0), torch.where(mask, -0.0, 1.0), -zero, zero * -1.0]
    return [1 / t for t in (plus, minus, *filled)]


def bytes_reduced(device):
    x = torch.arange(3, 43).to(device)
    up, down = x.to(torch.uint8), (-x).to(torch.int8)
    return [
        (up + up).amin(), up.view(2, 20).amin(1), up.min(), *(up + 1).view(2, 20).min(1), *torch.aminmax(up),
        up.argmin(), down.argmax(), (up * 2).view(2, 20).argmin(1), (down - 1).view(2, 20).argmax(1),
        (down + down).amax(), down.view(2, 20).amax(1), down.max(), *down.view(2, 20).max(1), (-down).amin(),
        down.prod(dtype=torch.int8), (up % 5 * 2 + 1).prod(dtype=torch.uint8), (down % 5 * 2 + 1).view(2, 20).prod(1),
    ]


def sums_at_indices(device):
    x, i = torch.arange(12.0).view(4, 3).to(device).bfloat16(), torch.tensor([1, 0, 1, 3]).to(device)
    return [x.index_add(0, i, x * 2), x.index_add(0, i, x + 1, alpha=2)]


def sums_into_their_source(device):
    x, i = torch.arange(12.0).view(4, 3).to(device), torch.tensor([1, 0, 1, 3]).to(device)
    a, b, c = (x + 1).cumsum(0), (x + 2).cumsum(0).half(), (x + 3).cumsum(0)
    return [
        a.index_add(0, i, a), b.scatter_reduce(0, i.view(4, 1).expand(4, 3), b, "amax"),
        b.index_put((i,), b, accumulate=True), c.index_put((i,), c[2], accumulate=True),
    ]


def sums_in_tiles(device):
    # Convolutions have channels-last tensors, so the loop of the sum runs over tiles.
    x = torch.arange(2 * 3 * 12 * 25.0).remainder(7).view(2, 3, 12, 25).to(device).requires_grad_()
    y = F.conv2d(x, torch.arange(-13.0, 14).view(3, 3, 3, 1).to(device))
    windows = F.unfold(y, 3, stride=2, padding=1)
    windows.mul(2).sum().backward()
    return [windows, F.fold(windows, y.shape[2:], 3, stride=2, padding=1), x.grad]


def packed_sequences(device):
    # States that `cat` joins are read again by backward.
    g = torch.Generator().manual_seed(0)
    rnn = torch.nn.RNN(4, 6, batch_first=True, bidirectional=True)
    for p in rnn.parameters():
        p.data = torch.randn(p.shape, generator=g) / 4
    x = torch.randn(2, 3, 4, generator=g).to(device).requires_grad_()
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 1]), batch_first=True)
    y, h = rnn.to(device)(packed)
    (y.data.sum() + h.square().sum()).backward()
    return [y.data, h, x.grad, *(p.grad for p in rnn.parameters())]


def flips(device):
    x = torch.tensor([[1 + 2j, 3.0]]).to(device)
    return [x.flip(()), x[0, 0].flip(()), x.flip(1), x.real.flip(()) + 1]


def writes_to_windows(device):
    x, y = torch.arange(12.0).to(device), torch.arange(20.0).view(4, 5).to(device)
    x.unfold(0, 2, 3).add_(100)
    y[:, 1:].unfold(1, 2, 3).mul_(2)
    return [x, y]


def bools(device):
    x = (torch.arange(48) % 3 == 0).to(device)
    y = ~(x >= x.flip(0))
    return [
        torch.add(y, y, alpha=2).logical_not(), torch.add(x, y, alpha=0), torch.add(x, y, alpha=3) ^ x, x + y,
        *x.min(0), *y.max(0), *x.view(6, 8).min(1), *x.view(6, 8).max(0),
    ]


def masks_in_parts(device):
    x = torch.arange(64).view(4, 16).to(device)
    found = []
    for ids in (x, x.double(), x.float()):
        mask = ids % 5 > 1
        mask[:2] = ids[:2] * 3 == 6
        mask[:, 3:7] = mask[:, :4] & (ids[:, 8:12] != 9)
        found += [~mask, mask.float() * 2, F.pad(ids > 9, (1, 3)).int()]
    return found


def gradients_of_pools(device):
    # The sum of the gradients gets the loops of the pixel shuffle's, and reads what the max pool's has added up.
    x = torch.arange(2 * 3 * 64.0).mul(7).remainder(31).view(2, 3, 8, 8).to(device).requires_grad_()
    found = [
        F.max_pool2d(x, 2), F.lp_pool2d(x.abs() + 1, 2, 2), F.pixel_shuffle(x[:, :1].expand(2, 4, 8, 8), 2)
    ]
    sum(f.square().sum() for f in found).backward()
    return [*found, x.grad]


PROGRAMS = [
    default_dtype, roundings, narrow_chains, zeros, bytes_reduced, flips, sums_at_indices, sums_into_their_source,
    sums_in_tiles, packed_sequences, writes_to_windows, bools, masks_in_parts,
]
found = [program(ltc.lazy_device()) for program in PROGRAMS]
ltc.mark_step(wait=True)
found.append(gradients_of_pools(ltc.lazy_device()))
ltc.mark_step(wait=True)
for program, got in zip([*PROGRAMS, gradients_of_pools], found):
    for k, (a, b) in enumerate(zip(got, program("cpu"), strict=True)):
        tolerance = 1e-13 if b.dtype in (torch.float64, torch.complex128) else 1e-6
        tolerance = 0 if program is narrow_chains else tolerance
        if a.dtype is not b.dtype or not torch.allclose(a.cpu(), b, tolerance, tolerance, equal_nan=True):
            print(f"{program.__name__}: result {k} is {a.cpu().tolist()}, eager's {b.tolist()}")

x, fills, powers = torch.arange(1, 5).to(device), [], []
for exponent, fill in ((2, 1.0), (2, 0.0), (-1, -0.0)):
    y = torch.ones(2, device=device).fill_(fill)
    ltc.mark_step()
    fills.append((1 / y.cpu())[0].item())
    z = x**exponent
    try:
        powers.append(z.tolist())
    except RuntimeError as error:
        powers.append("negative integer powers" in str(error))
print(fills, powers)
print(ltc.metrics.counter_value("CompiledProgram") > 2)
"""


@pytest.mark.timeout(300)
def test_values_are_those_of_eager(tmp_path: Path) -> None:
    settings = {"LTC_COMPILE": "sync", "LTC_COMPILED_CACHE_DIR": empty_cache(tmp_path / "compiled")}
    out, err = child.run(SCRIPT, timeout_s=280, **settings)
    assert err == ""
    assert out.splitlines() == ["[1.0, inf, -inf] [[1, 4, 9, 16], [1, 4, 9, 16], True]", "True"]
