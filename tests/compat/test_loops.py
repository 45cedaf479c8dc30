"""Loops, pure functions and attention of `torch_xla.experimental`: values and gradients are eager's."""

from pathlib import Path

from tests.compat.running import run

CLOSE = """
import copy
import functools
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

def same(found, expected, **tolerances):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(None if a is None else a.cpu(), b, **tolerances)
"""


def test_scan(tmp_path: Path) -> None:
    code = f"""{CLOSE}
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch_xla.experimental.scan import scan

torch.manual_seed(0)
values = [torch.randn(3), torch.randn(5, 3), torch.randn(5, 3, 3), torch.randn(3)]

def numbers(device, loop, **kwargs):
    init, xs, matrices, outside = (v.clone().to(device).requires_grad_() for v in values)
    calls = []
    def fn(carry, x):
        calls.append(1)
        hidden = torch.tanh(x["m"] @ carry["h"] + x["x"] * outside)
        return {{"h": hidden, "n": carry["n"] + 1}}, (hidden * 2, None, carry["n"])
    carry, (y, nothing, n) = loop(fn, {{"h": init, "n": torch.zeros((), device=device)}},
                                  {{"x": xs, "m": matrices}}, **kwargs)
    assert nothing is None and y.shape == (5, 3) and n.cpu().tolist() == [0, 1, 2, 3, 4]
    (y.sin().sum() + carry["h"].sum() * carry["n"]).backward()
    if device != "cpu":
        torch_xla.sync()
    return [y.detach(), carry["h"].detach(), carry["n"], *(v.grad for v in (init, xs, matrices, outside))], len(calls)

def plain(fn, init, xs):
    carry, ys = init, []
    for k in range(5):
        carry, y = fn(carry, {{name: v[k] for name, v in xs.items()}})
        ys.append(y)
    return carry, tuple(None if leaf[0] is None else torch.stack(leaf) for leaf in zip(*ys))

expected, _ = numbers("cpu", plain)
for kwargs, calls in (({{}}, 5), ({{"partition_fn": default_partition, "is_fn_pure": True}}, 5),
                      ({{"partition_fn": min_cut_rematerialization_partition}}, 10)):
    found, called = numbers("xla", scan, **kwargs)
    same(found, expected)
    assert called == calls
assert not [name for name in met.counter_names() if name.startswith("aten::")]

# random numbers differ, as in a loop
torch.manual_seed(1)
_, drawn = scan(lambda c, x: (c, torch.rand_like(x)), torch.zeros(1, device="xla"), torch.ones(3, 2, device="xla"))
torch.manual_seed(1)
same([drawn], [torch.stack([torch.rand(2) for _ in range(3)])])

one = torch.ones(2, device="xla")
for wrong, text in (
    (lambda: scan(1000, one, one), "must be callable"),
    (lambda: scan(lambda c, x: (c, x), one, (one, torch.ones(3, device="xla"))), "Got 2 and 3"),
    (lambda: scan(lambda c, x: (c, x), one, []), "is an empty PyTree"),
    (lambda: scan(lambda c, x: (c, x), one, one[:0]), "have no slice"),
):
    with pytest.raises(ValueError, match=text):
        wrong()
"""
    run(tmp_path, code)


def test_scan_layers_trains_as_a_sequential(tmp_path: Path) -> None:
    code = f"""{CLOSE}
from functorch.compile import min_cut_rematerialization_partition
from torch_xla.experimental.scan_layers import scan_layers

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
    def forward(self, x, scale=None):
        out = x + torch.relu(self.linear(self.norm(x)))
        return out if scale is None else (out * scale, scale)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        return self.run(self.layers, x)

torch.manual_seed(0)
net = Net()
batches = torch.randn(3, 6, 8)

def train(device, run):
    own = copy.deepcopy(net).to(device)
    own.run = run
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    losses = []
    for batch in batches.to(device):
        optimizer.zero_grad()
        loss = own(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if device != "cpu":
            torch_xla.sync()
    return [*losses, *own.state_dict().values()]

expected = train("cpu", lambda layers, x: torch.nn.Sequential(*layers)(x))
same(train("xla", scan_layers), expected, rtol=1e-4, atol=1e-5)
same(train("xla", functools.partial(scan_layers, is_layer_pure=True)), expected, rtol=1e-4, atol=1e-5)
found = train("xla", functools.partial(scan_layers, partition_fn=min_cut_rematerialization_partition))
same(found[:3], expected[:3], rtol=1e-4, atol=1e-5)

x, layers = batches[0].to("xla"), net.to("xla").eval().layers
assert scan_layers([], x) is x
out, scale = scan_layers(iter(layers), (x, torch.ones(8, device="xla")))
same([out], [scan_layers(layers, x).cpu()])
with pytest.raises(ValueError, match="(?s)Layer 1 has mismatched keys. Missing keys: .'bias'"):
    scan_layers([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)], x)
with pytest.raises(ValueError, match="Shape mismatch for 'weight' in layer 1"):
    scan_layers([torch.nn.Linear(8, 8), torch.nn.Linear(4, 8)], x)
"""
    run(tmp_path, code)


def test_gradient_accumulation(tmp_path: Path) -> None:
    code = f"""{CLOSE}
from torch_xla.experimental.gradient_accumulation import gradient_accumulation

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
inputs, targets = torch.randn(4, 3, 6), torch.randn(4, 3, 2)

def train(device, accumulate):
    own = copy.deepcopy(net).to(device)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    def train_step(x, y, count, last):
        out = own(x)
        return torch.nn.functional.mse_loss(out, y) + 0 * last.sum(), count + 5, out
    count, last, losses = torch.tensor([5, 5], device=device), torch.zeros(3, 2, device=device), []
    x, y = inputs.to(device), targets.to(device)
    for _ in range(3):
        optimizer.zero_grad()
        own[0].bias.grad = torch.ones(8, device=device)  # what is there stays
        loss, count, last = accumulate(train_step, (x, y), own, count, last)
        assert not loss.requires_grad and not last.requires_grad
        optimizer.step()
        losses.append(loss)
        if device != "cpu":
            torch_xla.sync()
    return [*losses, count, last, *own.state_dict().values()]

def plain(train_step, tensors, model, count, last):
    total = 0
    for x, y in zip(*tensors):
        loss, count, last = train_step(x, y, count, last)
        (loss / 4).backward()
        total, last = total + loss.detach() / 4, last.detach()
    return total, count, last

same(train("xla", gradient_accumulation), train("cpu", plain))
device_net, x = copy.deepcopy(net).to("xla"), inputs.to("xla")
loss = gradient_accumulation(lambda x: device_net(x).square().mean(), [x], device_net)
same([loss], [net(inputs).square().mean().detach()])
for wrong, text in (
    ([], "cannot be empty"), ([x, 1], "Element 1 of iterable_tensors is not a tensor"),
    ([x, x[:, :0]], "Element 1 of iterable_tensors is empty"),
    ([x, x[:2]], "Element 1 of iterable_tensors has inconsistent first dimension"),
):
    with pytest.raises(ValueError, match=text):
        gradient_accumulation(lambda *a: None, wrong, device_net)

def in_place(x, count):
    count += 1
    return device_net(x).square().mean(), count

with pytest.raises(AssertionError, match="train_step changed its argument 1 in place"):
    gradient_accumulation(in_place, [x], device_net, torch.zeros(1, device="xla"))
"""
    run(tmp_path, code)


def test_loops_whose_length_the_data_decide(tmp_path: Path) -> None:
    code = f"""{CLOSE}
from torch._higher_order_ops.while_loop import while_loop as of_pytorch
from torch_xla.experimental.fori_loop import _xla_while_loop_wrapper, fori_loop, while_loop

device = torch_xla.device()
torch.manual_seed(0)
layer = torch.nn.Linear(2, 2)
x = torch.randn(3, 2)
expected = x
with torch.no_grad():
    for _ in range(10):
        expected = layer(expected)
    layer = layer.to(device)
    for loop in (while_loop, of_pytorch, _xla_while_loop_wrapper):
        start = torch.tensor(10, dtype=torch.int32, device=device), x.to(device)
        left, out = loop(lambda i, x: i > 0, lambda i, x: (i - 1, layer(x)), start)
        same([left, out], [torch.tensor(0, dtype=torch.int32), expected])
one, zero, two = (torch.tensor(k, device=device) for k in (1, 0, 2))
i, total = while_loop(lambda i, t, step: i < 7, lambda i, t, step: (i + step, t + i), (one, zero), (two,))
assert (i.item(), total.item()) == (7, 9)

weight = torch.tensor([1.5, -2.0], device=device, requires_grad=True)
left, out = fori_loop(torch.tensor(2, device=device), torch.tensor(5, device=device), lambda v: v * weight,
                      torch.ones(2, device=device))
out.sum().backward()
assert left.item() == 0
same([out.detach(), weight.grad], [torch.tensor([1.5, -2.0]) ** 3, 3 * torch.tensor([1.5, -2.0]) ** 2])
assert fori_loop(0, 3, lambda a, b: (b, a + b), 1, 1) == (0, 3, 5)
with pytest.raises(ValueError, match="upper must not be below lower: 1, 2"):
    fori_loop(2, 1, lambda v: v, 1)
"""
    run(tmp_path, code)


def test_assume_pure(tmp_path: Path) -> None:
    code = f"""{CLOSE}
from torch_xla.experimental.assume_pure import PureModule, assume_pure, assume_pure_torch

torch.manual_seed(0)
net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.randn(3, 4)
own, y = PureModule(copy.deepcopy(net)).to("xla"), x.to("xla").requires_grad_()
x.requires_grad_()
net(x).square().sum().backward()
own(y).square().sum().backward()
same([y.grad, *(p.grad for p in own.parameters())], [x.grad, *(p.grad for p in net.parameters())])
assert list(own.state_dict()) == ["_module.0.weight", "_module.0.bias"]

@assume_pure
def einsum(a, b, *, scale):
    return torch.einsum("bi,bj->ij", a, b) * scale

same([einsum(y.detach(), y.detach(), scale=2)], [(x.T @ x).detach() * 2])

drawn = assume_pure(lambda a: a + torch.rand_like(a), add_rng_seed_argument=True)
zeros = torch.zeros(3, device="xla")
torch.manual_seed(5)
first, again, other = drawn(zeros, rng_seed=1), drawn(zeros, rng_seed=torch.tensor(1)), drawn(zeros, rng_seed=2)
after = torch.rand(3, device="xla")
torch.manual_seed(5)
same([after], [torch.rand(3)])
torch.manual_seed(1)
same([first, again], [torch.rand(3)] * 2)
assert not torch.equal(first, other)
with pytest.raises(AssertionError, match="Missing keyword argument rng_seed"):
    drawn(zeros)
with pytest.raises(AssertionError, match="without gradients"):
    assume_pure_torch(torch.exp)
with torch.no_grad():
    same([assume_pure_torch(torch.exp, use_cache=True)(zeros)], [torch.ones(3)])
"""
    run(tmp_path, code)


def test_flash_attention(tmp_path: Path) -> None:
    code = f"""{CLOSE}
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.custom_kernel import FlashAttention, flash_attention, jax_import_guard

jax_import_guard()
FlashAttention.DEFAULT_BLOCK_SIZES = {{"block_q": 256}}
torch.manual_seed(0)
values = [torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 5, 7)]
of_q, of_kv = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]), torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2)

def plain(q, k, v, causal, has_segments, sm_scale, ab):
    scores = q @ k.transpose(-1, -2)
    if ab is not None:
        scores = scores + ab
    scores = scores * sm_scale
    if has_segments:
        scores = scores.masked_fill(of_q[:, None, :, None] != of_kv[:, None, None, :], float("-inf"))
    if causal:
        scores = scores.masked_fill(torch.ones(5, 7, dtype=torch.bool).tril().logical_not(), float("-inf"))
    return scores.softmax(-1) @ v

def numbers(device, causal, has_segments, scale, has_bias, call=None):
    q, k, v, ab = own = [v.clone().to(device).requires_grad_() for v in values]
    ab = ab if has_bias else None
    if call is None:
        out = plain(q, k, v, causal, has_segments, scale, ab)
    else:
        ids = (of_q.to(device), of_kv.to(device)) if has_segments else (None, None)
        out = call(q, k, v, causal, *ids, scale, ab=ab)
    (out * torch.arange(4.0, device=device)).square().sum().backward()
    return [out.detach(), *(t.grad for t in own)]

for case in ((False, False, 1.0, False), (True, False, 0.5, False), (False, True, 0.5, False), (True, False, 0.5, True),
             (False, True, 0.25, True), (False, False, 0.5, True)):
    for call in (flash_attention, FlashAttention.apply):
        same(numbers("xla", *case, call), numbers("cpu", *case), rtol=1e-4, atol=1e-5)
q, k, v = (t.to("xla") for t in values[:3])
same([flash_attention(q, k, v, sm_scale=0.5)], [torch.nn.functional.scaled_dot_product_attention(*values[:3])])
with pytest.raises(AssertionError, match="Both q_segment_ids and kv_segment_ids"):
    flash_attention(q, k, v, q_segment_ids=of_q.to("xla"))
with pytest.raises(ValueError, match="partition_spec needs a mesh"):
    flash_attention(q, k, v, partition_spec=("x", None, None, None))
mesh = xs.Mesh(range(1), (1,), ("x",))
same([flash_attention(q, k, v, mesh=mesh, partition_spec=("x", None, None, None))], [flash_attention(q, k, v).cpu()])
"""
    run(tmp_path, code)


def test_a_pure_function_that_is_traced_once(tmp_path: Path) -> None:
    code = f"""{CLOSE}
from torch_xla.experimental import assume_pure as module

weight = torch.rand(3, 3).to("xla").requires_grad_()
calls = []

def fn(a, scale=1):
    calls.append(1)
    row = torch.zeros(3, device=a.device)
    row += 1
    return {{"y": torch.sin(a @ weight) * scale + row, "none": None, "z": torch.full((2,), 3.0, device="xla"),
             "t": torch.tensor([1.0, 2.0, 3.0], device=a.device) * a, "drawn": torch.rand(3, device=a.device)}}

with torch.no_grad():
    called = module.assume_pure_torch(fn, use_cache=True)
drawn = []
for step in range(3):
    a = torch.rand(3, 3).to("xla")
    found = called(a)
    expected = fn(a)
    calls.pop()
    same([found[name] for name in "yzt"], [expected[name].detach().cpu() for name in "yzt"])
    assert found["none"] is None and found["z"].device == a.device and not found["y"].requires_grad
    drawn.append(found["drawn"].tolist())
    with torch.no_grad():
        weight.mul_(2)  # what the function uses besides is read at each call
assert len(calls) == 1 and drawn[0] != drawn[1]
called(a, scale=2)
assert len(calls) == 2 and len(module._XLA_COMPUTATION_CACHE[fn]) == 2

def looks(t):
    calls.append(1)
    return t if t.sum() > 0 else -t

with torch.no_grad():
    called = module.assume_pure_torch(looks, use_cache=True)
assert torch.equal(called(a), called(-a)) and len(calls) > 4
assert module.assume_pure_torch.__doc__
"""
    run(tmp_path, code)
