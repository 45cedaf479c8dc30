"""Manual tensors: each of eight devices of a CPU computes with its own part; references are computed part by part."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

ROOT = Path(__file__).parents[2]
PRELUDE = """
import copy, json
import torch
from torch import nn
import ltc_core as ltc
import ltc_dist as ltd
from ltc_dist import spmd
device = ltd.lazy_device()
torch.manual_seed(0)
def told(call):
    try:
        return f"nothing: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def far(a, b):
    return (a.detach().cpu() - b.detach().cpu()).abs().max().item()
"""


def run(code: str, devices: int = 8, **environ: str) -> Any:
    """What a program prints as JSON at its end, with so many devices of a CPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LTC_")}
    given = {"LTC_EXECUTOR": "jax", "LTC_RANDOM": "host", "LTC_NUM_DEVICES": str(devices)}
    caches = {k: v for k, v in os.environ.items() if k.startswith("LTC_") and "CACHE" in k}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=140,
        env={**kept, **caches, **given, "PYTHONPATH": str(ROOT), **environ},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_old_script_trains() -> None:
    """A block of rows and columns by hand, as a kernel would be called: losses are eager's."""
    losses, eager, fallbacks, compiles = run(
        """
        import torch_xla.distributed.spmd as xs
        mesh = xs.Mesh(range(8), (4, 2), ("data", "model"))
        xs.set_global_mesh(mesh)
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
            def forward(self, x):
                return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        class Manual(Block):
            def forward(self, x):
                spec = ("data", None)
                own = xs.enable_manual_sharding(x, spec)
                w = {name: xs.enable_manual_sharding(p, (None,) * p.ndim) for name, p in self.named_parameters()}
                h = nn.functional.layer_norm(own, (8,), w["norm.weight"], w["norm.bias"])
                h = nn.functional.gelu(nn.functional.linear(h, w["up.weight"], w["up.bias"]))
                h = own + nn.functional.linear(h, w["down.weight"], w["down.bias"])
                return xs.disable_manual_sharding(h, spec, x.shape).global_tensor
        plain = Block()
        net = Manual()
        net.load_state_dict(plain.state_dict())
        net = net.to(device)
        def train(net, where):
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            found = []
            draws = torch.Generator().manual_seed(1)
            for step in range(5):
                x = torch.randn(16, 8, generator=draws).to(where)
                if where != "cpu":
                    xs.mark_sharding(x, mesh, ("data", None))
                optimizer.zero_grad()
                loss = (net(x) - x.flip(1)).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
                if where != "cpu":
                    ltc.mark_step()
            return [l.item() for l in found]
        losses = train(net, device)
        counts = ltc.metrics.num_fallbacks(), ltc.metrics.counter_value("CompiledProgram")
        print(json.dumps([losses, train(plain, "cpu"), *counts]))
        """,
        LTC_COMPAT="1",
    )
    assert losses == pytest.approx(eager, rel=1e-5)
    assert fallbacks == 0 and compiles <= 3


def test_values_are_those_of_each_part() -> None:
    """A softmax over a divided dimension is one over each part, and needs no communication."""
    found = run("""
    from ltc_core.executors.jax import launch
    texts = []
    class Noted(launch.JaxLaunch):
        def __init__(self, *args):
            super().__init__(*args)
            texts.append(self._program.as_text())
    import ltc_core.executors.jax.device as of_device
    of_device.JaxLaunch = Noted
    mesh = spmd.Mesh(range(8), (4, 2), ("data", "model"))
    x, w = torch.randn(8, 6), torch.randn(3, 5)
    there = spmd.mark_sharding(x.to(device), mesh, ("data", "model"))
    own = spmd.enable_manual_sharding(there, ("data", "model"), mesh=mesh)
    y = own.softmax(1).cumsum(0) @ w.to(device)
    whole = spmd.disable_manual_sharding(y, ("data", "model"), (8, 10), mesh=mesh)
    shape, is_manual = list(own.shape), [spmd.is_manual(own), spmd.is_manual(whole)]
    rows = []
    for row in x.split(2):
        rows.append(torch.cat([part.softmax(1).cumsum(0) @ w for part in row.split(3, 1)], 1))
    parts = [list(part.data.shape) for part in spmd.local_shards(whole)]
    words = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    talk = [word for text in texts for word in words if word in text]
    print(json.dumps([shape, is_manual, far(whole, torch.cat(rows)), parts, talk]))
    """)
    assert found[:2] == [[2, 3], [True, False]]
    assert found[2] < 1e-5 and found[3:] == [[[2, 5]] * 8, []]


def test_specs_and_meshes() -> None:
    """Two axes for one dimension, axes in another order, axes left out."""
    found = run("""
    def there_and_back(ids, sizes, spec, shape):
        mesh = spmd.Mesh(ids, sizes)
        x = torch.randn(shape)
        own = spmd.enable_manual_sharding(x.to(device), spec, mesh=mesh)
        back = spmd.disable_manual_sharding(own * 2, spec, shape, mesh=mesh)
        placed = {part.device: part.data for part in spmd.local_shards(spmd.mark_sharding(x.to(device), mesh, spec))}
        are_equal = all(torch.equal(part.data, placed[part.device]) for part in spmd.local_shards(own))
        return [list(own.shape), torch.equal(back.cpu(), x * 2), are_equal]
    print(json.dumps([
        there_and_back(range(8), (4, 2), ((0, 1), None), (16, 3)),
        there_and_back(range(8), (4, 2), ((1, 0), None), (16, 3)),
        there_and_back(range(8), (4, 2), (1, 0), (4, 8)),
        there_and_back(range(8), (2, 2, 2), (None, 2, 0), (3, 4, 4)),
        there_and_back(range(8), (4, 2), (None, 1), (3, 4)),
        there_and_back(range(8), (4, 2), (None, None), (3, 4)),
        there_and_back(range(8), (8,), (), ()),
    ]))
    """)
    shapes = [[2, 3], [2, 3], [2, 2], [3, 2, 2], [3, 2], [3, 4], []]
    assert found == [[shape, True, True] for shape in shapes]


def test_gradients() -> None:
    """Those of the whole tensors: parts that several devices have are counted as often as they are used."""
    found = run("""
    mesh = spmd.Mesh(range(8), (4, 2), ("data", "model"))
    spmd.set_global_mesh(mesh)
    x, w = torch.randn(8, 6), torch.randn(6, 4)
    def leaf(t):
        return t.to(device).requires_grad_()
    on, off = spmd.enable_manual_sharding, spmd.disable_manual_sharding
    # Batches over "data", columns over "model": w has its gradient of four devices each.
    a, b = leaf(x), leaf(w)
    y = off((on(a, ("data", None)) @ on(b, (None, "model"))).tanh(), ("data", "model"), (8, 4))
    y.square().sum().backward()
    e, f = x.clone().requires_grad_(), w.clone().requires_grad_()
    (e @ f).tanh().square().sum().backward()
    found = [far(a.grad, e.grad), far(b.grad, f.grad), list(spmd.local_shards(b.grad)[0].data.shape)]
    # Partial sums, added up on whole tensors.
    a, b = leaf(x), leaf(w)
    parts = on(a, ("data", "model")) @ on(b, ("model", None))
    whole = off(parts[None], ("model", "data", None), (2, 8, 4)).sum(0)
    whole.tanh().square().sum().backward()
    found += [far(a.grad, e.grad), far(b.grad, f.grad)]
    # Copies on all devices: the first one counts.
    a = leaf(x)
    off(on(a, (None, None)) * 3, (None, None), (8, 6)).square().sum().backward()
    found.append(far(a.grad, 18 * x))
    # The sum over all devices of what each computes.
    a = leaf(x)
    on(a, (None, None)).square().sum().backward()
    found.append(far(a.grad, 16 * x))
    # Second derivatives.
    a = leaf(x)
    cubes = off(on(a, ("data", None)) ** 3, ("data", None), (8, 6))
    (first,) = torch.autograd.grad(cubes.sum(), a, create_graph=True)
    first.sum().backward()
    found.append(far(a.grad, 6 * x))
    print(json.dumps(found))
    """)
    shape = found.pop(2)
    assert max(found) < 1e-4, found
    assert shape in ([6, 2], [6, 4])


def test_in_place_and_across_cuts() -> None:
    """A manual tensor is kept by its devices: written, viewed, indexed, and used in later programs."""
    found = run("""
    mesh = spmd.get_1d_mesh("x")
    x = torch.randn(16, 6)
    spec = ("x", None)
    def back(t, width=6):
        return spmd.disable_manual_sharding(t, spec, (16, width), mesh=mesh)
    own = spmd.enable_manual_sharding(x.to(device), spec, mesh=mesh)
    ltc.mark_step(wait=True)
    own.add_(1)
    own[0] = 5
    own[:, 1].mul_(own.sum(1))
    ltc.mark_step(wait=True)
    expected = [part + 1 for part in x.split(2)]
    for part in expected:
        part[0] = 5
        part[:, 1].mul_(part.sum(1))
    found = [far(back(own), torch.cat(expected))]
    scratch = torch.zeros(2, 6, device=device)
    scratch[:, 2:] += own[:, 2:]
    found.append(far(back(scratch), torch.cat([nn.functional.pad(p[:, 2:], (2, 0)) for p in expected])))
    for step in range(3):
        own = own * 2
        ltc.mark_step()
    found.append(far(back(own), 8 * torch.cat(expected)))
    rows = own.sort(1).values.t()
    ltc.mark_step()
    found.append(far(back(rows.t()), 8 * torch.cat(expected).sort(1).values))
    own.zero_()
    ltc.mark_step()
    found.append(far(back(own + 1), torch.ones(16, 6)))
    print(json.dumps(found))
    """)
    assert max(found) < 1e-4, found


def test_reading_each_device_s_value() -> None:
    found = run("""
    mesh = spmd.get_1d_mesh("x")
    x = torch.arange(16.0).reshape(8, 2)
    own = spmd.enable_manual_sharding(x.to(device), ("x", None), mesh=mesh)
    values = [part.data.tolist() for part in spmd.local_shards(own.sum(1))]
    read = [told(call) for call in (own.cpu, own.sum().item, lambda: str(own), lambda: float(own[0, 0]),
                                    lambda: ltd.save({"t": own}, "unwritten"))]
    print(json.dumps([values, read]))
    """)
    values, read = found
    assert values == [[4.0 * k + 1] for k in range(8)]
    for said in read:
        assert said.startswith("ShardingError: a manual tensor cannot be read: each device has"), (
            said
        )
        assert "Next: disable_manual_sharding(t, partition_spec, full_shape) makes" in said


def test_draws() -> None:
    """Each device draws the same numbers; a draw that reads manual tensors needs keys on the device."""
    code = """
    mesh = spmd.get_1d_mesh("x")
    own = spmd.enable_manual_sharding(torch.ones(16, 50).to(device), ("x", None), mesh=mesh)
    noise = torch.randn(2, 50, device=device)
    first, *rest = spmd.local_shards(own + noise)
    are_equal = all(torch.equal(first.data, part.data) for part in rest)
    drawn = told(lambda: sorted({part.data.sum().item() for part in spmd.local_shards(torch.bernoulli(own / 2))}))
    dropped = told(lambda: len({part.data.sum().item() for part in spmd.local_shards(nn.functional.dropout(own, 0.5))}))
    print(json.dumps([are_equal, drawn, dropped]))
    """
    are_equal, drawn, dropped = run(code)
    assert are_equal and dropped == "nothing: 1", dropped
    assert "aten.bernoulli.default of a manual tensor would run on the host: each device" in drawn
    assert "Next: disable_manual_sharding(t, partition_spec, full_shape) makes" in drawn
    are_equal, drawn, dropped = run(code, LTC_RANDOM="device")
    assert are_equal and dropped == "nothing: 1" and drawn.count(",") == 0, drawn


def test_what_is_refused() -> None:
    cases = {
        "on(there, ('x', None))": "dimension 0 of a tensor cannot be divided evenly over the mesh",
        "on(there, ('x',))": "should be equal to the input rank (2)",
        "on(there, 'xx')": "an entry for each dimension, not 'xx'",
        "on(there, (None, 'y'))": "Axis name y is not defined",
        "on(there, (None, 'x'), mesh=3)": "enable_manual_sharding takes a Mesh as its mesh, not int",
        "spmd.enable_manual_sharding(there, (None, 'x'))": "needs a mesh, and no global one is set",
        "on(torch.ones(8), ('x',))": "only tensors on the device can be split",
        "on(own, (None, None))": "takes a tensor that is whole, not a manual one",
        "off(own, (None, 'x'), (6, 9))": "(6, 9), expected (6, 8): parts of shape (6, 1)",
        "off(torch.ones(8), ('x',), (64,))": "only tensors on the device can be joined",
        "spmd.mark_manual_sharding(torch.ones(8))": "only tensors on the device can be marked as manual",
        "spmd.mark_sharding(own, mesh, (None, None))": "a manual tensor cannot be divided over a mesh",
        "spmd.clear_sharding(own)": "a manual tensor cannot be divided over a mesh",
        "on(there, (None, 'x'), spmd.Mesh(range(7, -1, -1), (8,), ('x',)))": "in the order of their numbers",
        # Only the program shows these.
        "local(on(own + 1, (None, None)))": "a manual tensor cannot be divided over a mesh: it is the part",
        "local(spmd.mark_sharding(own + 1, mesh, (None, None)))": "a manual tensor cannot be divided",
        "local(spmd.mark_sharding(ready, mesh, (None, None)))": "a manual tensor cannot be divided",
        "memory.add_(own)": "writes a manual tensor into one that is the same on all devices",
        "optimized()": "enable_manual_sharding(w, (None, ...)) of a parameter before it is used",
        "(own > 0).nonzero()": "each device has a value of its own",
        "local(torch.special.bessel_j0(own))": "special_bessel_j0.default cannot run on manual tensors",
        "local(own[torch.tensor([9], device=device)])": "has an index that is not from -6 to 5",
    }
    found = run(f"""
    mesh = spmd.get_1d_mesh("x")
    def on(t, spec, mesh=mesh):
        return spmd.enable_manual_sharding(t, spec, mesh=mesh)
    def off(t, spec, shape):
        return spmd.disable_manual_sharding(t, spec, shape, mesh=mesh)
    def local(t):
        return spmd.local_shards(t)[0].data
    def optimized():
        net = nn.Linear(1, 2).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(own).sum().backward()
        optimizer.step()
        return net.weight.cpu()
    there = torch.ones(6, 8).to(device)
    memory = torch.ones(6, 1).to(device)
    own = on(there, (None, "x"))
    ready = own + 1
    ltc.mark_step(wait=True)
    said = []
    for code in {list(cases)!r}:
        def call():
            found = eval(code)
            return found.cpu() if isinstance(found, torch.Tensor) else found
        said.append(told(call))
    print(json.dumps(said))
    """)
    for (code, expected), said in zip(cases.items(), found, strict=True):
        assert expected in said and "Next: " in said, (code, said)


def test_torch_xla_s_attributes() -> None:
    found = run(
        """
        import torch_xla
        import torch_xla.distributed.spmd as xs
        xs.set_global_mesh(xs.Mesh(range(8), (1, 8)))
        x = torch.zeros(8, 8).to("xla")
        own = xs.enable_manual_sharding(x, (0, 1))
        assert isinstance(own, xs.XLAShardedTensor) and own.global_tensor is own
        assert own.sharding_type == xs.ShardingType.MANUAL and own.sharding_spec == "{manual}"
        assert own.partition_spec == (0, 1) and own.mesh_shape == (1, 8)
        assert own.local_shards[3].data.shape == (8, 1)
        back = xs.disable_manual_sharding(own + 1, (0, 1), x.shape).global_tensor
        assert back.sharding_type == xs.ShardingType.TILED
        assert torch.allclose(x.cpu() + 1, back.cpu())
        marked = xs._mark_manual_sharding(x + 1)
        assert isinstance(marked, xs.XLAShardedTensor) and marked.sharding_spec == "{manual}"
        print(json.dumps([list(own.shape), torch_xla._XLAC._get_xla_sharding_spec(own)]))
        """,
        LTC_COMPAT="1",
    )
    assert found == [[8, 1], "{manual}"]


@pytest.mark.parametrize("executor", ["jax", "inductor", "reference"])
def test_on_one_device_it_is_a_copy(executor: str) -> None:
    found = run(
        """
        mesh = spmd.get_1d_mesh("x")
        x = torch.randn(3, 4)
        there = x.to(device).requires_grad_()
        own = spmd.enable_manual_sharding(there, ("x", None), mesh=mesh)
        y = spmd.disable_manual_sharding(own.softmax(0) * 2, ("x", None), (3, 4), mesh=mesh)
        y.square().sum().backward()
        e = x.clone().requires_grad_()
        (e.softmax(0) * 2).square().sum().backward()
        print(json.dumps([far(own, x), far(there.grad, e.grad), told(lambda: spmd.Mesh(range(8), (8,)))]))
        """,
        devices=1,
        LTC_EXECUTOR=executor,
    )
    assert found[0] == 0 and found[1] < 1e-6
    assert "LTC_EXECUTOR=jax LTC_NUM_DEVICES=8 makes 8 devices" in found[2]


def test_a_later_process_compiles_nothing() -> None:
    code = """
    mesh = spmd.get_1d_mesh("x")
    own = spmd.enable_manual_sharding(torch.arange(24.0).reshape(8, 3).to(device), ("x", None), mesh=mesh)
    ltc.mark_step()
    own = own * 3
    ltc.mark_step()
    back = spmd.disable_manual_sharding(own + 7, ("x", None), (8, 3), mesh=mesh)
    print(json.dumps([back.sum().item(), ltc.metrics.counter_value("PersistentCacheMiss")]))
    """
    first, second = run(code), run(code)
    assert first[0] == second[0] == 276 * 3 + 7 * 24
    assert second[1] is None


def test_a_mesh_of_two_processes(tmp_path: Path) -> None:
    """Each process has the values of its devices; results and gradients are those of one process."""
    script = tmp_path / "job.py"
    body = """
    mesh = spmd.Mesh(range(spmd.num_devices()), (2, 2), ("data", "model"))
    spmd.set_global_mesh(mesh)
    x, w = torch.randn(8, 6), torch.randn(3, 5)
    a = x.to(device).requires_grad_()
    own = spmd.enable_manual_sharding(a, ("data", "model"))
    ltc.mark_step()
    y = own.softmax(1) @ spmd.enable_manual_sharding(w.to(device), (None, None))
    whole = spmd.disable_manual_sharding(y, ("data", "model"), (8, 10))
    whole.square().sum().backward()
    e = x.clone().requires_grad_()
    parts = [torch.cat([p.softmax(1) @ w for p in row.split(3, 1)], 1) for row in e.split(4)]
    torch.cat(parts).square().sum().backward()
    assert far(whole, torch.cat(parts)) < 1e-5 and far(a.grad, e.grad) < 1e-5
    assert len(spmd.local_shards(own)) == 2 and "cannot be read" in told(own.cpu)
    print("done")
    """
    script.write_text(PRELUDE + textwrap.dedent(body))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LTC_")}
    given = {"LTC_EXECUTOR": "jax", "LTC_SPMD": "1", "LTC_NUM_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "launch", "--nprocs", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=140,
        env={**kept, **given, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done") == 2
