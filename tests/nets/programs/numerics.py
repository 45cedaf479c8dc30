"""Arithmetic at its corners, dtypes, autocast, fft, linalg, distributions."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

from tests.core.beside_eager import attempt

Device = torch.device
INF, NAN = math.inf, math.nan


def corners(on: Device) -> torch.Tensor:
    return torch.tensor([0.0, -0.0, 1, -1, 0.5, -2.5, 88, 89, -89, 1e-40, 1e30, INF, -INF, NAN]).to(
        on
    )


def positive(device: Device, *shape: int) -> torch.Tensor:
    return (torch.arange(float(torch.Size(shape).numel())).view(shape) + 1).div(4).to(device)


def exponentials(device: Device) -> Any:
    x = corners(device)
    return (
        x.exp(),
        x.expm1(),
        x.cosh(),
        x.sinh(),
        x.tanh(),
        x.sigmoid(),
        x.exp2(),
        F.softplus(x),
        x.erf(),
        x.erfc(),
    )


def logarithms_and_roots(device: Device) -> Any:
    x = corners(device)
    return (
        x.log(),
        x.log1p(),
        x.log2(),
        x.sqrt(),
        x.rsqrt(),
        x.reciprocal(),
        x.asinh(),
        x.acosh(),
        x.atanh(),
        F.logsigmoid(x),
    )


def rounding(device: Device) -> Any:
    x = torch.tensor([0.5, 1.5, -0.5, -1.5, 2.4999, -2.5, 1e6 + 0.5]).to(device)
    return (
        x.round(),
        x.floor(),
        x.ceil(),
        x.trunc(),
        x.frac(),
        x.round(decimals=1),
        x.sign(),
        x.signbit(),
        x.sgn(),
    )


def divisions(device: Device) -> Any:
    x, y = (
        torch.tensor([1.5, -1.5, 7.0, 0.0, -0.0]).to(device),
        torch.tensor([0.3, 0.3, -2.0, 3.0, 2.0]).to(device),
    )
    return (
        x.div(0.3, rounding_mode="floor"), x.div(y, rounding_mode="floor"), x // 0.3, x // y, x % 0.3, x % y,
        x.fmod(0.3), x.div(y, rounding_mode="trunc"), x.remainder(y), 1.5 // y, torch.floor_divide(x, y), x.fmod(y),
    )  # fmt: skip


def division_of_one_number(device: Device) -> Any:
    x = torch.tensor(1.5).to(device)
    return torch.div(x, 0.3, rounding_mode="floor"), torch.div(
        x, torch.tensor(0.3), rounding_mode="floor"
    )


def whole_divisions(device: Device) -> Any:
    x = torch.tensor([7, -7, 0, 2**31 - 1]).to(device)
    return (
        x // 2, x // -2, x % 3, x % -3, x / 2, x.div(2, rounding_mode="trunc"), x.fmod(-3), x << 2, x >> 1, x & 5,
        x | 8, x ^ 3, ~x, x.bitwise_left_shift(1),
    )  # fmt: skip


def refused_for_values(device: Device) -> Any:
    x = torch.tensor([7, -7, 0]).to(device)
    return attempt(lambda: x // 0), attempt(lambda: x % 0), attempt(lambda: x**-1), x + 1


def powers(device: Device) -> Any:
    x = torch.tensor([0.0, -1, 2, -2, 0.5]).to(device)
    i = torch.tensor([0, -1, 2, 3]).to(device)
    return (
        x**2, x**3, x**0.5, x**-1, x**0, 2**x, x**x, i**2, 2**i.abs(), (-2.0) ** i, x.pow(i[2]), x.float_power(2),
        torch.pow(2, x),
    )  # fmt: skip


def numbers_that_change(device: Device) -> Any:
    x, found = torch.ones(3, device=device), []
    for k in (1, 1.0, True, 2, 2.5, -0.0, INF, NAN, 10**12, 1e-300):
        found += [x * k, x + k, x.clamp(max=k), torch.full((2,), k, device=device), k - x]
    return found


def promotion(device: Device) -> Any:
    dtypes = [
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    ]
    found = []
    for dtype in dtypes:
        x = torch.ones(2, dtype=dtype, device=device)
        found += [
            x + 1,
            x * 1.5,
            x / 2,
            x + torch.ones((), dtype=torch.float64, device=device),
            x.sum(),
            x.cumsum(0),
        ]
        found += [
            attempt(lambda x=x: x.mean()),
            attempt(lambda x=x: -x),
            attempt(lambda x=x: x.add_(0.5)),
            x == 1,
        ]
    return found


def conversions(device: Device) -> Any:
    x = torch.tensor([-1.7, 0.0, 1.5, 255.9, 300.0]).to(device)
    return (
        x.int(),
        x.long(),
        x.bool(),
        x.to(torch.int16),
        x.half(),
        x.bfloat16().float(),
        x.double(),
        x.abs().to(torch.uint8),
    )


def complex_numbers(device: Device) -> Any:
    x = torch.complex(positive(device, 3), -positive(device, 3)).requires_grad_()
    y = (x * x.conj() + x.exp() / 3).abs().sum()
    y.backward()
    return (
        y,
        x.grad,
        x.angle(),
        x.real,
        torch.polar(positive(device, 2), positive(device, 2)),
        x.conj().resolve_conj(),
    )


def reductions_of_nothing(device: Device) -> Any:
    x = torch.zeros(0, 3, device=device)
    return (
        x.sum(),
        x.sum(0),
        x.mean(),
        x.prod(),
        x.any(),
        x.all(),
        attempt(lambda: x.max()),
        attempt(lambda: x.argmax(0)),
        x.norm(),
    )


def reductions_of_nan_and_inf(device: Device) -> Any:
    x = corners(device)
    return (
        x.sum(), x.nansum(), x.max(), x.min(), x.amax(), x.nan_to_num(), x.isfinite(), x.isinf(), x.argmax(),
        x.cummax(0), x.nanmean(), x.nanmedian(), x.logsumexp(0), x.softmax(0), torch.fmax(x, x.flip(0)),
        torch.maximum(x, x.flip(0)),
    )  # fmt: skip


def statistics(device: Device) -> Any:
    x = positive(device, 3, 4)
    return (
        x.var(1), x.std(0, correction=0), torch.var_mean(x), x.median(1), x.quantile(0.3, 1), x.mode(1), x.cov(),
        x.corrcoef(), x.cumprod(1), x.logcumsumexp(1), x.diff(dim=0), x.aminmax(dim=1), x.kthvalue(2, 1),
        torch.trapezoid(x),
    )  # fmt: skip


def autocast_of_layers(device: Device) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to(device)
    x = positive(device, 3, 4)
    with torch.autocast(device.type, torch.bfloat16):
        out = model(x)
        loss = F.mse_loss(out, torch.zeros(3, 2, device=device))
        with torch.autocast(device.type, enabled=False):
            wide = x @ x.t()
    loss.backward()
    return (
        out.dtype,
        out.float().round(decimals=1),
        loss.dtype,
        wide,
        [p.grad.dtype for p in model.parameters()],
    )


def cpu_autocast_around_the_device(device: Device) -> Any:
    x = positive(device, 3, 3)
    if device.type == "cpu":
        return x @ x, (x @ x).sum(0)
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x
        total = y.sum(0).cpu()
    return y, total


def grad_scaler(device: Device) -> Any:
    model = nn.Linear(4, 1).to(device)
    opt, scaler, found = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler(device.type, init_scale=8.0),
        [],
    )
    for k in range(3):
        opt.zero_grad()
        loss = model(positive(device, 2, 4)).sum() * (INF if k == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        found.append(scaler.get_scale())
    return found, list(model.parameters())


def ffts(device: Device) -> Any:
    x = positive(device, 3, 8)
    return (
        torch.fft.fft(x), torch.fft.rfft(x, norm="ortho"), torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fft2(x),
        torch.fft.fftshift(x), torch.fft.ifft(torch.fft.fft(x)).real, torch.fft.hfft(x),
        torch.fft.rfftfreq(8, device=device), torch.fft.dct(x) if hasattr(torch.fft, "dct") else 0,
    )  # fmt: skip


def gradients_of_ffts(device: Device) -> Any:
    x = positive(device, 8).requires_grad_()
    torch.fft.rfft(x).abs().square().sum().backward()
    window = torch.hann_window(4, device=device)
    y = torch.stft(positive(device, 16), 4, 2, window=window, return_complex=True)
    return x.grad, y, torch.istft(y, 4, 2, window=window)


def decompositions(device: Device) -> Any:
    a = positive(device, 3, 3) + torch.eye(3, device=device) * 4
    s = a @ a.t()
    return (
        torch.linalg.cholesky(s), torch.linalg.inv(a), torch.linalg.det(a), torch.linalg.slogdet(a),
        torch.linalg.solve(a, a[:, :1]), torch.linalg.eigvalsh(s), torch.linalg.svdvals(a),
        torch.linalg.qr(s).R.abs(), torch.linalg.matrix_power(a, 3), torch.linalg.pinv(a),
        torch.linalg.matrix_rank(a), torch.linalg.cond(a), torch.linalg.lstsq(a, a[:, :1]).solution,
        torch.linalg.matrix_exp(a / 9), torch.linalg.norm(a), torch.linalg.multi_dot([a, a, a]),
        torch.cholesky_solve(a, s.cholesky()),
    )  # fmt: skip


def singular_matrices(device: Device) -> Any:
    z = torch.zeros(2, 2, device=device)
    return (
        attempt(lambda: torch.linalg.inv(z)),
        attempt(lambda: torch.linalg.cholesky(z - 1)),
        torch.linalg.inv_ex(z).info,
    )


def gradients_of_linalg(device: Device) -> Any:
    a = (positive(device, 3, 3) + torch.eye(3, device=device) * 4).requires_grad_()
    y = (
        torch.linalg.inv(a).sum()
        + torch.linalg.slogdet(a)[1]
        + torch.linalg.svdvals(a).sum()
        + torch.linalg.cholesky(a @ a.t()).sum()
    )
    y.backward()
    return y, a.grad


def products(device: Device) -> Any:
    x, y = positive(device, 2, 3, 4), positive(device, 2, 4, 3)
    return (
        x @ y, torch.bmm(x, y), torch.einsum("bij,bjk->bk", x, y), torch.baddbmm(x @ y, x, y, beta=0.5, alpha=2),
        x[0] @ y[0, :, 0], torch.tensordot(x, y, ([2], [1])), torch.kron(x[0], y[0]),
        torch.cross(x[..., :3], x[..., :3] + 1, dim=-1), x[0].mv(y[0, :, 0]), torch.addmm(x[0, :, :3], x[0], y[0]),
        torch.addr(x[0], x[0, :, 0], x[0, 0]), torch.inner(x, x), torch.cdist(x, x + 1), (x.long() @ y.long()),
        attempt(lambda: x @ x), attempt(lambda: x.long() @ y),
    )  # fmt: skip


def distributions_of_all_kinds(device: Device) -> Any:
    one = torch.ones(3, device=device)
    found = [
        D.Normal(one, one * 2),
        D.Bernoulli(one * 0.3),
        D.Uniform(one * 0, one),
        D.Exponential(one),
        D.Laplace(one, one),
    ]
    found += [
        D.Categorical(logits=torch.eye(3, device=device)),
        D.LogNormal(one, one),
        D.Cauchy(one, one),
        D.Geometric(one * 0.3),
    ]
    return [
        (
            d.sample(),
            d.log_prob(torch.ones(3, device=device) * (0 if isinstance(d, D.Uniform) else 1)),
        )
        for d in found
    ]


def reparameterized(device: Device) -> Any:
    mean, scale = (
        torch.zeros(3, device=device, requires_grad=True),
        torch.ones(3, device=device, requires_grad=True),
    )
    d = D.Normal(mean, scale)
    loss = (
        d.rsample((4,)).square().mean()
        + D.kl_divergence(d, D.Normal(mean.detach() + 1, scale.detach())).sum()
    )
    loss.backward()
    return loss, mean.grad, scale.grad, d.entropy(), d.cdf(mean)


def multivariate(device: Device) -> Any:
    cov = torch.eye(2, device=device) * 2
    d = D.MultivariateNormal(torch.zeros(2, device=device), cov)
    mix = D.MixtureSameFamily(
        D.Categorical(torch.ones(2, device=device)),
        D.Normal(torch.arange(2.0, device=device), torch.ones(2, device=device)),
    )
    return (
        d.sample(),
        d.log_prob(torch.ones(2, device=device)),
        mix.log_prob(torch.ones(3, device=device)),
        D.Gumbel(cov, cov + 1).mean,
    )


def wrong_parameters(device: Device) -> Any:
    return (
        attempt(
            lambda: D.Normal(torch.zeros(1, device=device), -torch.ones(1, device=device)).mean
        ),
        attempt(lambda: D.Categorical(probs=-torch.ones(3, device=device)).probs),
        attempt(lambda: torch.bernoulli(torch.full((2,), 2.0, device=device))),
        attempt(lambda: torch.multinomial(torch.zeros(3, device=device), 2)),
    )


def draws(device: Device) -> Any:
    x = torch.zeros(5, device=device)
    found = [
        x.clone().normal_(1, 2),
        x.clone().uniform_(-1, 1),
        x.clone().exponential_(),
        x.clone().random_(10),
        x.clone().bernoulli_(0.5),
    ]
    return [
        *found, torch.randn(3, device=device), torch.randint(0, 9, (4,), device=device),
        torch.randperm(6, device=device), torch.rand_like(x), torch.multinomial(x + 1, 3), torch.bernoulli(x + 0.5),
        torch.normal(x, x + 1), F.dropout(x + 1, 0.3),
    ]  # fmt: skip


def draws_between_seeds(device: Device) -> Any:
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(torch.randn(3, device=device))
    return found


def initializers(device: Device) -> Any:
    w = torch.empty(4, 5, device=device)
    found = []
    for init in (
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.eye_,
    ):
        found.append(init(w).clone())
    return found


def factories(device: Device) -> Any:
    x = positive(device, 2, 3)
    return (
        torch.arange(5, device=device), torch.linspace(0, 1, 4, device=device), torch.eye(3, device=device),
        torch.full((2,), True, device=device), torch.logspace(0, 1, 3, device=device),
        torch.tril_indices(3, 3, device=device), torch.zeros_like(x, dtype=torch.int64), x.new_full((2,), 7),
        x.new_tensor([1, 2]), torch.ones((), device=device), torch.tensor([[1, 2]], device=device),
        torch.vander(x[0]), torch.scalar_tensor(3, device=device), torch.as_tensor([1.5], device=device),
        torch.block_diag(x, x),
    )  # fmt: skip


def answers_of_python(device: Device) -> Any:
    x = torch.tensor([1.5, 2.0]).to(device)
    return (
        x.sum().item(), x.tolist(), bool((x > 0).all()), float(x[0]), int(x[1]), len(x),
        x.numpy(force=True).tolist(), 2.0 in x, [float(v) for v in x], torch.equal(x, x.clone()),
        torch.allclose(x, x + 1e-9), x.dim(), x.dtype, list(x.shape), f"{x[0]:.1f}", attempt(lambda: bool(x)),
        attempt(lambda: x.item()), attempt(lambda: int(x)), round(x[0].item()), x[1].is_nonzero(),
    )  # fmt: skip
