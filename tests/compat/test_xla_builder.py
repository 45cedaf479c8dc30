"""Ops whose computations are built by hand, as torch_xla's examples and libraries build them; DotGeneral; its GRU."""

from pathlib import Path

from tests.compat.running import run

IMPORTS = """
import pytest, torch, torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_op_registry as xor
import torch_xla.debug.metrics as met
from torch_xla import _XLAC
device = torch_xla.device()
torch.manual_seed(0)

def check(fn, expected, *tensors, **kwargs):
    results = xor.register(fn.__name__, fn)(*(t.to(device) for t in tensors), **kwargs)
    results, wanted = (list(r) if isinstance(r, list | tuple) else [r] for r in (results, expected))
    assert all(r.device.type == "xla" for r in results)
    torch.testing.assert_close([r.cpu() for r in results], wanted)
"""


def test_a_registered_op_is_traced_once_for_each_shape(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
calls = []

def slice_and_add(a, b, dimno=0):
    calls.append(a.shape().sizes)
    sa = a.slice_in_dim(start_index=0, limit_index=1, dimno=dimno)
    sb = b.slice_in_dim(start_index=1, limit_index=2, dimno=dimno)
    return sa + sb

op = xor.register("slice_and_add", slice_and_add)
x, y = torch.randn(2, 2), torch.randn(2, 2)
for _ in range(3):
    z = op(x.to(device), y.to(device), dimno=0)
    assert torch.equal(z.cpu(), x[:1] + y[1:]) and not z.requires_grad
op(x.to(device), y.to(device), dimno=1)
op(torch.ones(3, 2, device=device), torch.ones(3, 2, device=device), dimno=0)
assert calls == [(2, 2), (2, 2), (3, 2)]
assert not met.executed_fallback_ops()
"""
    run(tmp_path, code)


def test_simple_operations_have_their_values(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
a, b, c = torch.rand(3, 4) + 1, torch.rand(3, 4) + 1, torch.rand(4, 3)
i, j = torch.tensor([7, -7, 5]), torch.tensor([2, 2, -3])

def arithmetic(a, b, c):
    return xb.Op.tuple((a - b * a / b, a ** b, -a % b, a @ c, a.max(b), a.min(b), a.atan2(b), a.tanh().exp().log1p()))
check(arithmetic, [a - b * a / b, a ** b, torch.fmod(-a, b), a @ c, a.maximum(b), a.minimum(b), torch.atan2(a, b),
                   a.tanh().exp().log1p()], a, b, c)

def integers(i, j):
    return xb.Op.tuple((i / j, i % j, i & j, i ^ j, i << i.ones_like(), (i > j).select(i, j), i.cast(xb.Type.F32)))
quotients, rests = torch.tensor([3, -3, -1]), torch.tensor([1, -1, 2])
check(integers, [quotients, rests, i & j, i ^ j, i << 1, i.maximum(j), i.float()], i, j)

def shapes(a, c):
    one = xb.Op.one(a.builder(), a.shape().dtype)
    start = xb.Op.scalar(a.builder(), 9, xb.Type.S32)
    zero = xb.Op.zero(a.builder(), xb.Type.S32)
    return xb.Op.tuple((
        a.reshape((2, 6)), a.broadcast((2,)), one.broadcast_in_dim((2, 3), ()), a.transpose((1, 0)) + c,
        a.slice((0, 1), (3, 4), (2, 1)), xb.Op.concat_in_dim((a, a), 1), a.rev((1,)), a.scalar_like(3),
        a.pad(one, ((1, 0, 1), (-1, 2, 0))), a.dynamic_slice((start, zero), (2, 2)),
        a.dynamic_update_slice(one.broadcast((1, 2)), (zero, start)),
        xb.Op.iota(a.builder(), xb.mkshape(xb.Type.S64, (2, 3)), 1), a.get_dimension_size(1),
    ))
padded = torch.ones(6, 5)
padded[1::2, :3] = a[:, 1:]
updated = a.clone()
updated[:1, 2:] = 1
check(shapes, [a.reshape(2, 6), a.expand(2, 3, 4), torch.ones(2, 3), a.t() + c, a[::2, 1:], torch.cat([a, a], 1),
               a.flip(1), torch.full_like(a, 3), padded, a[1:, :2], updated, torch.arange(3).expand(2, 3),
               torch.tensor(4, dtype=torch.int32)], a, c)

def reductions(a, i):
    zero = xb.Op.zero(a.builder(), a.shape().dtype)
    two = xb.Op.scalar(i.builder(), 2, xb.Type.S64)
    add = xb.create_computation("add", lambda p, q: p + q, [xb.mkshape(xb.Type.F32, ())] * 2)
    return xb.Op.tuple((
        a.reduce(zero, add, (0,)), a.reduce_all(zero, lambda p, q: p.max(q)), i.reduce(two, lambda p, q: p * q, (0,)),
    ))
check(reductions, [a.sum(0), a.max(), i.prod() * 2], a, i)

def solve(b, u):
    return u.triangualr_solve(b, True, False, False, False)
upper = (torch.rand(3, 3) + 1).triu()
check(solve, torch.linalg.solve_triangular(upper, b, upper=True), b, upper)
"""
    run(tmp_path, code)


def test_conditions_and_loops(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
def conditional(k, a, b, k0=None):
    cond = k > xb.Op.scalar(k.builder(), k0, dtype=k.shape().dtype)
    return cond.mkconditional((a, b), lambda a, b: a + b, lambda a, b: a - b)
k, a, b = torch.tensor(0.2), torch.randn(2, 2), torch.randn(2, 2)
check(conditional, a + b, k, a, b, k0=0.1)
check(conditional, a - b, k, a, b, k0=0.9)

def loop(a, b, limit=None):
    def cond(counter, a, b):
        return counter < xb.Op.scalar(counter.builder(), limit, dtype=xb.Type.S32)
    def body(counter, a, b):
        return xb.Op.tuple((counter + xb.Op.scalar(counter.builder(), 1, dtype=xb.Type.S32), a + b, b))
    zero = xb.Op.scalar(a.builder(), 0, dtype=xb.Type.S32)
    return xb.Op.mkwhile((zero, a, b), cond, body).get_tuple_element(1)
check(loop, a + 10 * b, a, b, limit=10)
check(loop, a, a, b, limit=0)

builder = xb.create_builder("twice")
p = xb.mkparam(builder, 0, xb.tensor_shape(a.to(device)))
twice = xb.xla_computation_as_func((p + p).build("twice"))
assert torch.equal(twice([a.to(device)])[0].cpu(), 2 * a)
check(lambda a: xb.Op.call(lambda x: x * x, (a,)), a * a, a)
"""
    run(tmp_path, code)


def test_what_has_no_rule_is_refused_where_it_is_built(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
x = torch.ones(3, device=device)
refused = {{
    "SelectAndScatter": lambda a: a.select_and_scatter(a, a, (1,), (1,), None, None),
    "Conv": lambda a: a.conv(a, (1,)),
    "Sort": lambda a: xb.Op.sort((a,), None),
    "Clz": lambda a: a.clz(),
}}
for name, fn in refused.items():
    text = rf"(?s)the XLA operation {{name}} is not here \\(.*script.py.*got: .*Next: "
    with pytest.raises(NotImplementedError, match=text):
        xor.register(name, fn)(x)
with pytest.raises(NotImplementedError, match="(?s)this computation does not reduce here.*got: .*Next: "):
    xor.register("odd", lambda a: a.reduce_all(xb.Op.zero(a.builder()), lambda p, q: p + q * q))(x)
with pytest.raises(NotImplementedError, match="get_computation_hlo is not here"):
    xb.get_computation_hlo(None)
"""
    run(tmp_path, code)


def test_dot_general(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
x, w, v = torch.rand(10, 3, 4), torch.rand(10, 4, 5), torch.rand(5, 4)
dot = _XLAC._xla_dot_general
for dims in ([2], [1]), ([-1], [-2]):
    torch.testing.assert_close(dot(x.to(device), w.to(device), (dims, ([0], [0]))).cpu(), x @ w)
torch.testing.assert_close(dot(x.to(device), v.to(device), (([2], [1]), ())).cpu(), x @ v.t())
torch.testing.assert_close(dot(x.to(device), v.to(device), ((), ())).cpu(), x[..., None, None] * v)
i, j = torch.randint(-15, 15, (3, 40), dtype=torch.int8), torch.randint(-15, 15, (40, 5), dtype=torch.int8)
found = dot(i.to(device), j.to(device), (([1], [0]), ()), preferred_element_type=torch.int32)
assert found.dtype is torch.int32 and torch.equal(found.cpu(), i.int() @ j.int())
text = r"input tensor \\(second argument\\) to be an actual XLA tensor. Got: CPUFloatType"
with pytest.raises(RuntimeError, match=text):
    dot(x.to(device), w, (([2], [1]), ([0], [0])))
"""
    run(tmp_path, code)


def test_gru(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
from torch_xla.experimental.gru import GRU
assert torch.nn.GRU._orig is torch.nn.GRU
plain = torch.nn.GRU(4, 5, num_layers=2)
ours = GRU(4, 5, num_layers=2)
ours.load_state_dict(plain.state_dict())
x = torch.randn(7, 3, 4)
output, hidden = ours.to(device)(x.to(device))
torch.testing.assert_close((output.cpu(), hidden.cpu()), plain(x))
with pytest.warns(UserWarning, match="only supports unidirectional"):
    assert type(GRU(4, 5, bidirectional=True)) is torch.nn.GRU
packed = torch.nn.utils.rnn.pack_sequence([torch.randn(2, 4, device=device)])
with pytest.raises(AssertionError, match="PackedSequence is not supported"):
    ours(packed)
"""
    run(tmp_path, code)
