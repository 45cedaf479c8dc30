"""The statements that random programs are made of, each as the line of Python a user would write.

A maker draws from `Draw` and gives a line, or None where what it drew does not fit. Operands are chosen by name among
the tensors that eager PyTorch has at that point. Mostly a line is legal, and sometimes not: both devices must refuse
it then. Lines end in `# values` where whether they are legal depends on values: those that eager refuses are left out,
as the device tells them later.
"""

import random
from collections.abc import Callable, Sequence

import torch

__all__ = ["STATEMENTS", "Draw", "Maker"]

Shape = Sequence[int]
DTYPES = ("float32", "float32", "float32", "int64", "bool", "float64", "int32", "bfloat16")
FLOATS = (torch.float32, torch.float64)
MOST_ELEMENTS = 400


class Draw:
    """What makers draw from: the tensors there are, by name, each with the number of its device."""

    def __init__(self, rng: random.Random, num_devices: int) -> None:
        self.rng = rng
        self.num_devices = num_devices
        self.tensors: dict[str, torch.Tensor] = {}
        self.devices: dict[str, int] = {}
        self.count = 0

    def name(self, device: int) -> str:
        """A new name, of a tensor to be made on this device."""
        name = f"t{self.count}"
        self.count += 1
        self.devices[name] = device
        return name

    def any(self, fits: Callable[[torch.Tensor], bool] = lambda t: True, device: int = -1) -> str:
        """A tensor that fits; the newest ones mostly. "" if there is none."""
        names = [
            name
            for name, t in self.tensors.items()
            if (device < 0 or self.devices[name] == device) and fits(t)
        ]
        if not names:
            return ""
        return self.rng.choice(names[-6:] if self.rng.random() < 0.7 else names)

    def broadcasting(self, name: str) -> str:
        """A tensor of the same device that broadcasts with this one, nine times out of ten."""
        shape, device = self.tensors[name].shape, self.devices[name]
        if self.rng.random() < 0.1:
            return self.any(device=device)

        def fits(t: torch.Tensor) -> bool:
            try:
                return torch.broadcast_shapes(t.shape, shape).numel() <= MOST_ELEMENTS
            except RuntimeError:
                return False

        return self.any(fits, device)

    def same(self, name: str) -> str:
        """A tensor of the same device and shape, mostly another one."""
        t, device = self.tensors[name], self.devices[name]
        return self.any(lambda u: u.shape == t.shape, device)

    def writable(self, name: str) -> str:
        """A tensor of this shape that can be written with what broadcasts to it."""
        return self.same(name)

    def number(self) -> str:
        return self.rng.choice(("1", "2", "-1", "3", "0", "0.5", "-1.5", "2.0", "True"))

    def shape(self) -> Shape:
        return [self.rng.randint(1, 4) for _ in range(self.rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)))]

    def dim(self, t: torch.Tensor) -> int:
        return self.rng.randrange(-t.dim(), t.dim()) if t.dim() else self.rng.choice((0, -1))

    def to(self, name: str, call: str, values: bool = False) -> str:
        """The line that gives a new name to what a call on this tensor gives."""
        line = f"{self.name(self.devices[name])} = {call}"
        return line + "  # values" if values else line


Maker = Callable[[Draw], str | None]


def fresh(draw: Draw) -> str:
    device = draw.rng.randrange(draw.num_devices)
    dtype = draw.rng.choice(DTYPES)
    grad = ".requires_grad_()" if "float" in dtype and draw.rng.random() < 0.4 else ""
    call = f"make({list(draw.shape())}, torch.{dtype}, {draw.rng.randrange(1000)})"
    name = draw.name(device)
    if draw.rng.random() < 0.15 and not grad:
        made = draw.rng.choice(("zeros", "ones", "full"))
        value = f", {draw.rng.choice(('2', '1.5'))}" if made == "full" else ""
        return f"{name} = torch.{made}({list(draw.shape())}{value}, device=d[{device}])"
    turned = ".t().clone()" if draw.rng.random() < 0.1 else ""
    return f"{name} = {call}{turned}.to(d[{device}]){grad}"


UNARY = (
    "{t}.neg()", "{t}.abs()", "{t}.sin()", "{t}.cos()", "{t}.tanh()", "{t}.sigmoid()", "F.relu({t})", "-{t}",
    "{t}.clamp(-20, 20).exp()", "{t}.abs().sqrt()", "{t}.square()", "{t}.sign()", "{t}.logical_not()", "{t} ** 2",
    "{t}.clone()", "{t}.contiguous()", "{t}.flip({dim})", "{t}.cumsum({dim})", "{t}.roll(1, {dim})", "{t}.tril()",
    "{t}.sort({dim})[0]", "{t}.sort({dim}, stable=True)[1]", "{t}.softmax({dim})", "{t}.clamp(-3, 3)", "{t}.isnan()",
    "F.gelu({t})", "F.layer_norm({t}, {t}.shape[-1:])", "F.log_softmax({t}, {dim})", "{t}.floor()", "{t}.trunc()",
    "{t}.float()", "{t}.double()", "{t}.bool()", "{t}.to(torch.bfloat16)", "torch.zeros_like({t})",
    "{t}.bitwise_not()", "safe({t}).to(torch.int64)", "safe({t}).to(torch.int32)", "safe({t}).to(torch.uint8)",
    "torch.ones_like({t})", "{t}.detach().clone()", "F.pad({t}, (1, 0))", "{t}.repeat_interleave(2, {dim})",
    "{t}.reciprocal()", "1 / {t}", "{t}.cosh()", "{t}.log1p()", "{t}.erf()", "{t}.round()", "{t}.frac()",
    "{t}.expm1()", "F.silu({t})", "{t}.triu(1)", "F.softplus({t})", "F.leaky_relu({t}, 0.1)", "F.elu({t})",
    "F.hardtanh({t})", "{t}.rsqrt()", "{t}.nan_to_num()", "{t}.cumprod({dim})", "{t}.diff(dim={dim})",
    "{t}.topk(1, {dim})[0]", "{t}.renorm(2, 0, 1.0)", "{t}.tile(2)", "copy.deepcopy({t})",
    "torch.stack([{t}, {t}], {dim})", "torch.cat([{t}, {t}], {dim})", "torch.diag_embed({t})",
    "F.normalize({t}, dim={dim})", "F.one_hot(safe({t}).to(torch.int64).abs() % 5, 5)", "{t}.new_zeros(3)",
)  # fmt: skip

BINARY = (
    "{t} + {u}", "{t} - {u}", "{t} * {u}", "torch.maximum({t}, {u})", "torch.minimum({t}, {u})", "{t} == {u}",
    "{t} < {u}", "torch.where({t} > 0, {t}, {u})", "{t}.atan2({u})", "{t} / {u}", "{t} // {u}", "{t} % {u}",
    "torch.lerp({t}, {u}, 0.3)", "{t}.logical_and({u})", "{t} & {u}", "{t} ^ {u}", "{t} >= {u}", "{t} != {u}",
    "torch.add({t}, {u}, alpha=2)", "{t}.float().div({u}, rounding_mode='floor')", "{t}.float().fmod({u})",
    "torch.addcmul({t}, {u}, {u}, value=0.5)", "F.mse_loss({t}, {u})", "torch.hypot({t}, {u})", "{t}.copysign({u})",
    "{t}.div({u}, rounding_mode='trunc')", "torch.addcdiv({t}, {u}, {u}.abs() + 1)", "torch.fmax({t}, {u})",
    "torch.logaddexp({t}, {u})", "{t}.heaviside({u})", "torch.where({u} != 0, {t}, 2)", "F.smooth_l1_loss({t}, {u})",
    "torch.cat([{t}, {u}], {dim})", "torch.stack([{t}, {u}], {dim})", "{t}.expand_as({u})", "torch.dist({t}, {u})",
    "torch.isclose({t}, {u})", "{t}.masked_fill({u} > 0, 1.5)", "torch.cdist({t}, {u})",
)  # fmt: skip

NUMBERS = (
    "{t} + {n}", "{t} * {n}", "{n} - {t}", "{t} / {n}", "{n} / ({t}.abs() + 1)", "{t} == {n}", "{t} > {n}",
    "{t}.clamp(min={n})", "{t}.clamp(max={n})", "torch.where({t} > {n}, {t}, {n})",
    "{t}.masked_fill({t} == {n}, {n})", "{t}.pow({n})", "{n} ** {t}", "{t} % {n}", "{t} // {n}",
    "{t}.add({n}, alpha=2)", "torch.full_like({t}, {n})", "{t}.float().div({n}, rounding_mode='floor')",
    "{t}.div({n}, rounding_mode='trunc')", "{t}.rsub({n})", "{t}.fmod({n})", "torch.lerp({t}, {t} + 1, {n})",
    "F.threshold({t}, 0.5, {n})", "torch.maximum({t}, torch.tensor({n}))",
)  # fmt: skip

REDUCTIONS = (
    "{t}.sum()", "{t}.sum({dim})", "{t}.sum({dim}, keepdim=True)", "{t}.mean()", "{t}.mean({dim})",
    "{t}.amax({dim})", "{t}.amin({dim})", "{t}.any({dim})", "{t}.all()", "{t}.argmax({dim})", "{t}.norm()",
    "{t}.var({dim})", "{t}.std()", "{t}.logsumexp({dim})", "{t}.max({dim})[0]", "{t}.min({dim})[1]",
    "{t}.prod({dim})", "{t}.sum(dtype=torch.float64)", "{t}.count_nonzero()", "{t}.median()", "{t}.max()",
    "{t}.argmin()", "{t}.nansum({dim})", "{t}.var_mean({dim})[1]", "{t}.norm(dim={dim})", "{t}.aminmax()[1]",
    "torch.linalg.vector_norm({t}, 1)", "{t}.cummax({dim})[0]", "{t}.float().histc(4, -9, 9)",
    "{t}.kthvalue(1, {dim})[0]", "{t}.mode({dim})[0]", "{t}.trace()",
    "safe({t}).to(torch.int64).abs().flatten().bincount()", "{t}.unique()",
)  # fmt: skip

MATMULS = (
    "{t} @ {u}", "{t} @ {u}.mT", "{t}.mT @ {t}", "torch.outer({t}.flatten(), {u}.flatten())", "F.linear({t}, {u})",
    "torch.einsum('...i,...j->...ij', {t}, {u})", "torch.addmm({t}, {t}, {u})", "torch.bmm({t}, {u})", "{t}.mv({u})",
    "torch.tensordot({t}, {u}, 1)", "torch.baddbmm({t}, {t}, {u}, beta=0.5)", "torch.kron({t}, {u})",
)  # fmt: skip

INDEXING = (
    "{t}[{i}]", "{t}[{t} > 0]", "{t}[[0, -1]]", "{t}[..., [0]]", "{t}[None, ..., 0]", "{t}[{m}]", "{t}[{i}, ...]",
    "{t}.index_select({dim}, {i}.flatten())", "{t}.gather({dim}, {t}.argsort({dim}))", "{t}.take({i})",
    "{t}.nonzero()", "{t}.masked_select({t} != 0)", "torch.where({t} > 0)[0]",
    "{t}.take_along_dim({t}.argsort({dim}), {dim})", "F.embedding({i}, {t})",
    "{t}.scatter({dim}, {t}.argsort({dim}), 1)", "{t}.index_fill({dim}, {i}.flatten(), 2)",
    "{t}.index_add({dim}, {i}.flatten(), {t}.index_select({dim}, {i}.flatten()))", "{t}[{i}.tolist()]",
    "torch.searchsorted({t}.flatten().sort()[0], {t})", "{t}[{m}] * 2", "{t}[{i} % {t}.shape[0]]",
)  # fmt: skip

INDEXED_WRITES = (
    "{t}[{i}] = {n}", "{t}[{t} > 0] = {n}", "{t}[{m}] = {n}", "{t}[..., 0] = {u}", "{t}[0] = {n}", "{t}[...] = {u}",
    "{t}[{i}] = {u}", "{t}[{t} == {n}] += 1", "{t}.index_fill_({dim}, {i}.flatten(), {n})", "{t}[::2] += {n}",
    "{t}.scatter_({dim}, {t}.argsort({dim}), {n})", "{t}.scatter_add_({dim}, {t}.argsort({dim}), {t}.clone())",
    "{t}.index_put_(({i},), {t}.new_ones(()), accumulate=True)", "{t}[1:] = {t}[:-1].clone()", "{t}[{i}] *= 2",
    "{t}.index_add_(0, {i}.flatten(), {t}[{i}.flatten()])", "{t}.masked_fill_({t} > 0, {n})", "{t}[-1] -= {t}[0]",
    "{t}.index_copy_(0, {i}.flatten(), {t}[{i}.flatten()])", "{t}.masked_scatter_({t} > 0, {t}.flip(0))",
    "{t}.fill_diagonal_(2)", "{t}[{t} != {t}] = 0", "{t}.put_({i}, {i}.to({t}.dtype, copy=True), accumulate=True)",
)  # fmt: skip

WRITES = (
    "{t}.add_({n})", "{t}.mul_({n})", "{t}.fill_({n})", "{t}.zero_()", "{t}.add_({u})", "{t}.mul_({u})",
    "{t}.sub_({u})", "{t}.copy_({u})", "{t}.clamp_(-3, 3)", "{t}.neg_()", "{t}.abs_()", "{t} += {u}", "{t} *= {n}",
    "{t}.addcmul_({u}, {u})", "{t}.copy_({t}.clone() * 2)", "{t}.relu_()", "{t}.lerp_({u}, 0.5)", "{t}.square_()",
    "{t}.sign_()", "{t}.tril_()", "{t}.copy_({t}.flip(0))", "{t}.div_(2)", "{t}.masked_fill_({u} > 0, {n})",
    "{t}.remainder_(3)", "{t}.logical_not_()", "{t}.sigmoid_()", "{t}.bitwise_not_()", "{t}.cumsum_({dim})",
    "{t}.clamp_({u})", "{t} -= {t}.float().mean()", "{t}.copy_({u}.to(torch.float64))", "{t}.squeeze_()",
    "{t}.unsqueeze_(0)", "{t}.t_()", "{t}.transpose_(0, -1)", "{t}.eq_({u})", "{t}.floor_()", "{t}.floor_divide_(2)",
    "{t}.add_({t})", "{t}.mul_({t})", "{t}.sub_({t}, alpha=0.5)", "F.relu({t}, inplace=True)",
    "F.hardtanh({t}, inplace=True)", "{t}.swapaxes_(0, -1)", "{t}.addcdiv_({u}, {u}.abs() + 1)",
)  # fmt: skip

OUTS = (
    "torch.add({t}, {u}, out={w})", "torch.mul({t}, {n}, out={w})", "torch.cumsum({t}, {dim}, out={w})",
    "torch.sub({t}, {u}, out={t})", "torch.abs({t}, out={w})", "torch.matmul({t}, {u}, out={w})",
    "torch.cat([{t}, {u}], out={w})", "torch.sum({t}, {dim}, out={w})", "torch.maximum({t}, {u}, out={w})",
    "torch.where({t} > 0, {t}, {u}, out={w})", "torch.clamp({t}, -1, 1, out={w})", "torch.sort({t}, out=({w}, {i}))",
    "torch.max({t}, {dim}, out=({w}, {i}))", "torch.eq({t}, {u}, out={w})", "torch.exp({t}, out={t})",
    "torch.index_select({t}, 0, {i}.flatten(), out={w})", "torch.stack([{t}, {u}], out={w})",
    "torch.neg({t}, out={w})",
)  # fmt: skip

VIEWS = (
    "{t}[{k}]", "{t}[{k}:]", "{t}[::2]", "{t}[..., {k}]", "{t}.t()", "{t}.mT", "{t}.transpose(0, -1)",
    "{t}.unsqueeze(0)", "{t}.unsqueeze(-1)", "{t}.squeeze()", "{t}.flatten()", "{t}.view(-1)", "{t}.reshape(-1)",
    "{t}.diagonal()", "{t}[:]", "{t}.expand(2, *{t}.shape)", "{t}.chunk(2)[-1]", "{t}.unbind()[0]",
    "{t}.narrow(0, 0, 1)", "{t}.movedim(0, -1)", "{t}.unfold(0, 2, 1)", "{t}.detach()", "{t}.data",
    "{t}.view_as({t})", "{t}.permute(*range({t}.dim())[::-1])", "{t}.split(1)[0]", "{t}[..., None]", "{t}[..., 1:]",
    "{t}.view({t}.shape[::-1])", "{t}.select(0, -1)", "{t}.real", "{t}.unflatten(0, (1, -1))", "{t}.swapaxes(0, 1)",
    "{t}.T", "{t}[None]", "{t}[1:3]", "{t}[..., ::2]", "{t}.ravel()", "{t}.contiguous()", "{t}.view(torch.int32)",
    "{t}.to({t}.dtype)", "{t}.expand({t}.shape)", "torch.atleast_2d({t})",
)  # fmt: skip

FOREACH = (
    "torch._foreach_add_([{ts}], {n})", "torch._foreach_mul_([{ts}], {n})", "torch._foreach_add_([{ts}], [{us}])",
    "torch._foreach_mul_([{ts}], [{us}])", "torch._foreach_sub_([{ts}], [{us}], alpha=2)",
    "torch._foreach_neg_([{ts}])", "torch._foreach_copy_([{ts}], [{us}])", "torch._foreach_zero_([{ts}])",
    "torch._foreach_lerp_([{ts}], [{us}], 0.3)", "torch._foreach_addcmul_([{ts}], [{us}], [{us}], 0.5)",
    "torch._foreach_clamp_max_([{ts}], [{us}])", "torch._foreach_abs_([{ts}])",
    "torch._foreach_maximum_([{ts}], {n})", "torch._foreach_div_([{ts}], 2.0)",
)  # fmt: skip

PURE_FOREACH = (
    "torch._foreach_add([{ts}], [{us}])", "torch._foreach_mul([{ts}], {n})", "torch._foreach_norm([{ts}])",
    "torch._foreach_exp([{ts}])", "torch.broadcast_tensors({ts})", "torch.meshgrid({ts}, indexing='ij')",
    "torch._foreach_sub([{ts}], [{us}])", "torch._foreach_max([{ts}])", "copy.deepcopy([{ts}])",
)  # fmt: skip

AUTOGRAD = (
    "({t} * {t}).sum().backward()", "{t}.sum().backward()", "{t}.square().mean().backward()", "{t}.detach_()",
    "{t}.requires_grad_()", "{t}.grad = None", "{t}.retain_grad()", "{t}.data = {u}.data", "{t}.data.mul_(2)",
    "{t}.register_hook(lambda g: g * 2)", "{t}.data = {t}.data.clone()", "{t}.backward({u})", "{t}.grad.zero_()",
    "({t} * {u}).sum().backward(retain_graph=True)", "{t}.backward(torch.ones_like({t}))", "{t}.grad.add_(1)",
)  # fmt: skip

GRADS = (
    "torch.autograd.grad(({t} ** 2).sum(), {t})[0]",
    "torch.autograd.grad(({t} ** 3).sum(), {t}, create_graph=True)[0]",
    "torch.func.grad(lambda v: (v ** 3).sum())({t}.detach())", "torch.func.vmap(lambda v: v.sum() * v)({t})",
    "torch.func.jvp(lambda v: v.sin(), ({t}.detach(),), ({t}.detach(),))[1]", "{t}.grad", "{t}.grad.clone()",
    "torch.func.jacrev(lambda v: v ** 2)({t}.detach())",
    "checkpoint(lambda v: (v * 2).sin(), {t}, use_reentrant=False)",
    "torch.autograd.grad({t}.sum(), {u}, allow_unused=True)[0]", "torch.func.functionalize(lambda v: v.add(1))({t})",
)  # fmt: skip

GUARDED = (
    "with torch.no_grad(): {w}", "with torch.no_grad(): {w}", "with torch.enable_grad(): {w}",
    "with torch.inference_mode(): {w}",
)  # fmt: skip

DRAWS = (
    "torch.manual_seed({s}); {t}.normal_()", "torch.manual_seed({s}); {t}.uniform_()",
    "torch.manual_seed({s}); {t}.bernoulli_(0.5)", "torch.manual_seed({s}); F.dropout({t}, 0.5, inplace=True)",
    "torch.manual_seed({s}); {t}.random_(9)",
)  # fmt: skip

NETWORK = (
    "F.batch_norm({t}, {r}, {v}, training=True)", "F.cross_entropy({t}, safe({t}).argmax(-1))", "F.conv1d({t}, {u})",
    "F.binary_cross_entropy_with_logits({t}, {u}.sigmoid())", "F.max_pool1d({t}.float(), 2, 1)",
    "F.avg_pool2d({t}, 2, 1)",
    "F.scaled_dot_product_attention(*[torch.atleast_2d({t})] * 3)", "F.group_norm({t}, 1)",
    "F.nll_loss({t}, safe({t}).argmax(-1))", "F.rms_norm({t}, {t}.shape[-1:])", "F.conv2d({t}, {u})",
    "F.interpolate({t}, scale_factor=2)", "F.glu({t}, {dim})", "F.instance_norm({t})", "F.kl_div({t}, {u})",
    "F.huber_loss({t}, {u})", "F.cosine_similarity({t}, {u}, {dim})", "F.unfold({t}, 2)",
    "F.adaptive_avg_pool2d({t}, 1)", "F.bilinear({t}, {t}, {u})", "F.prelu({t}, {t}.new_ones(1))",
    "torch.fft.fft({t}).abs()", "torch.fft.irfft(torch.fft.rfft({t}), {t}.shape[-1])",
    "torch.linalg.matrix_norm({t})", "torch.cumulative_trapezoid({t})", "torch.linalg.det({t})",
    "F.ctc_loss({t}, {i}, [2], [1])", "F.fold({t}, 4, 2)",
)  # fmt: skip

CONTROL = (
    "{w} if float({t}.float().nan_to_num().sum()) > 0 else {x}", "{w} if {t}.numel() > 4 else {x}",
    "{w} if bool(({t} > 0).any()) else {x}",
)  # fmt: skip

ASKS = (
    "{t}.tolist()", "{t}.sum().item()", "repr({t}.shape)", "{t}.is_leaf", "{t}.requires_grad", "{t}._version",
    "{t}.dtype", "torch.equal({t}, {u})", "{t}.cpu().numpy().tolist()", "len({t})",
    "bool({t}.any())", "{t}._base is None", "{t}.is_inference()", "(t.grad_fn is None)", "{t}.any().item()",
    "torch.allclose({t}, {u})",
)  # fmt: skip


def _filled(draw: Draw, templates: Sequence[str]) -> tuple[str, str] | None:
    """A template with everything filled in, and the tensor it starts from."""
    template = draw.rng.choice(templates)
    name = draw.any()
    if not name:
        return None
    t, device = draw.tensors[name], draw.devices[name]
    keys: dict[str, str] = {"t": name, "n": draw.number(), "dim": str(draw.dim(t))}
    keys["k"] = str(draw.rng.randrange(-1, max(t.shape[0], 1)) if t.dim() else 0)
    keys["s"] = str(draw.rng.randrange(100))
    for key, fits in (
        ("i", lambda u: u.dtype is torch.int64),
        ("m", lambda u: u.dtype is torch.bool and u.shape == t.shape[: u.dim()]),
        ("r", lambda u: t.dim() > 1 and u.shape == t.shape[1:2] and u.dtype == t.dtype),
        ("w", lambda u: u.dtype == t.dtype or draw.rng.random() < 0.2),
    ):
        if "{" + key + "}" in template:
            keys[key] = draw.any(fits, device)
    keys["v"] = keys.get("r", "")
    if "{u}" in template:
        keys["u"] = draw.broadcasting(name)
    if "{ts}" in template:
        names = [name, *(draw.any(device=device) for _ in range(draw.rng.randint(1, 2)))]
        keys["ts"] = ", ".join(names)
        keys["us"] = ", ".join(draw.broadcasting(n) or n for n in names)
    if any("{" + key + "}" in template and not keys[key] for key in keys):
        return None
    return template.format(**keys), name


def _value(templates: Sequence[str], values: bool = False) -> Maker:
    def make(draw: Draw) -> str | None:
        found = _filled(draw, templates)
        return None if found is None else draw.to(found[1], found[0], values)

    return make


def _plain(templates: Sequence[str], values: bool = False) -> Maker:
    def make(draw: Draw) -> str | None:
        found = _filled(draw, templates)
        return None if found is None else found[0] + ("  # values" if values else "")

    return make


def _several(draw: Draw) -> str | None:
    found = _filled(draw, PURE_FOREACH)
    return None if found is None else draw.to(found[1], f"{found[0]}[0]")


def _guarded(draw: Draw) -> str | None:
    maker = draw.rng.choice((write, indexed_write, value, foreach, view))
    inner = maker(draw)
    if inner is None or "=" in inner and "+=" in inner:
        return inner
    return draw.rng.choice(GUARDED).format(w=inner)


def _control(draw: Draw) -> str | None:
    one, other = _filled(draw, WRITES), _filled(draw, WRITES)
    name = draw.any()
    if (
        one is None
        or other is None
        or "=" in one[0].replace("=True", "").replace("alpha=", "")
        or "=" in other[0]
    ):
        return None
    template = draw.rng.choice(CONTROL)
    return template.format(t=name, w=one[0], x=other[0])


def _asked(draw: Draw) -> str | None:
    found = _filled(draw, ASKS)
    return (
        None
        if found is None
        else f"out.append({found[0].replace('(t.', '(' + found[1] + '.')})  # values"
    )


def _moved(draw: Draw) -> str | None:
    name, device = draw.any(), draw.rng.randrange(draw.num_devices)
    if not name:
        return None
    if draw.rng.random() < 0.3:
        other = draw.any(lambda u: u.shape == draw.tensors[name].shape)
        return f"{name}.copy_(safe({other}))"
    return f"{draw.name(device)} = {name}.to(d[{device}], copy=True)"


def _two_views(draw: Draw) -> str | None:
    """A tensor and a view of it under one memo of deepcopy."""
    name = draw.any(lambda t: t.dim() > 0 and not t.requires_grad)
    if not name:
        return None
    device = draw.devices[name]
    return f"{draw.name(device)}, {draw.name(device)} = copy.deepcopy([{name}, {name}[0]])"


def _deleted(draw: Draw) -> str | None:
    return f"del {draw.any()}" if len(draw.tensors) > 4 else None


value = _value(UNARY + BINARY + NUMBERS)
write = _plain(WRITES)
indexed_write = _plain(INDEXED_WRITES, values=True)
foreach = _plain(FOREACH)
view = _value(VIEWS)

# Each kind of statement, and how often it is drawn.
STATEMENTS: tuple[tuple[Maker, float], ...] = (
    (fresh, 2.0),
    (_value(UNARY), 2.0),
    (_value(BINARY), 3.0),
    (_value(NUMBERS), 1.5),
    (_value(REDUCTIONS), 1.5),
    (_value(MATMULS), 0.7),
    (_value(INDEXING, values=True), 1.5),
    (indexed_write, 2.0),
    (write, 5.0),
    (_plain(OUTS), 1.2),
    (view, 4.0),
    (foreach, 1.5),
    (_several, 0.6),
    (_plain(AUTOGRAD), 1.2),
    (_value(GRADS), 0.8),
    (_guarded, 0.8),
    (_plain(DRAWS), 0.5),
    (_value(NETWORK), 0.8),
    (_control, 0.5),
    (_asked, 0.8),
    (_moved, 0.5),
    (_two_views, 0.3),
    (_deleted, 0.4),
    (lambda draw: "cut()", 1.5),
)
