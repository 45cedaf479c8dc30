"""Three devices in one process, and devices of other names: what is each one's own, what may be mixed.

The number and the name are fixed at the first import, so the programs run in processes of their own; the
plain copies and the model over two devices are in test_two_devices.py.
"""

import json
from functools import cache

import pytest

from tests.core import child

PRELUDE = """
import json, threading, traceback
import torch
import torch.nn.functional as F
from torch import nn
import ltc_core as ltc
from ltc_core import metrics
from ltc_core.runtime import devices as runtime
from tests.core.counting import Counting
from tests.core.custom_ops import Gate, fail
a, b, c = (ltc.lazy_device(i) for i in range(3))
name = a.type

def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")
"""

PROGRAMS = {
    "traces are independent": """
ltc.mark_step(wait=True)
x, y = torch.ones(3, device=a) * 2, torch.ones(3, device=b) * 3
with Counting() as counted:
    assert x.tolist() == [2.0] * 3
assert counted.syncs == {"ToCpu": 1} and counted.ops == {"ones": 1, "mul": 1}
assert runtime.context(1).trace, "the other device's trace was cut"
with Counting() as counted:
    ltc.mark_step(device=b)
assert counted.syncs == {"MarkStep": 1}
z, w = x + 1, y + 1
with Counting() as counted:
    ltc.mark_step()                       # both
assert counted.syncs == {"MarkStep": 2}
assert "aten.mul" not in ltc.dump_ir([torch.zeros(1, device=c)])
""",
    "one device does not wait for another": """
with Gate() as gate:
    held = gate(torch.ones(2, device=b))
    ltc.mark_step()
    assert gate.reached.wait(10)
    assert (torch.ones(2, device=a) + 1).tolist() == [2.0, 2.0]
    ltc.wait_device_ops([a, f"{name}:2"])
    torch.accelerator.synchronize(c)
    gate.open()
    ltc.wait_device_ops()
    assert held.tolist() == [1.0, 1.0]
""",
    "each has its worker, memory and programs": """
ltc.wait_device_ops()
before = [ltc.get_memory_info(i)["bytes_used"] for i in range(3)]
kept = torch.ones(1000, device=b) + 1
ltc.mark_step(wait=True)
grown = [ltc.get_memory_info(i)["bytes_used"] - n for i, n in enumerate(before)]
assert grown == [0, 4000, 0], grown
assert torch.accelerator.memory_allocated(b) == ltc.get_memory_info(b)["bytes_used"]
names = {t.name for t in threading.enumerate()}
assert "ltc-worker-1" in names
""",
    "copies in all directions": """
for first in (a, b, c):
    for second in (a, b, c):
        x = torch.arange(6.0, device=first).view(2, 3)
        y = x.t()[1:].to(second, copy=True)
        assert y.device == second and y.tolist() == [[1.0, 4.0], [2.0, 5.0]]
        z = torch.zeros(2, 3, device=second, dtype=torch.float64)
        z[1].copy_(x[0])
        z[:, 0] = x[:, 2]
        assert z.tolist() == [[2.0, 0.0, 0.0], [5.0, 1.0, 2.0]]
        assert x.to(second, torch.int64).dtype == torch.int64
        assert (x.to(second) is x) == (first == second)
        y += 1                            # a copy, wherever it went
        assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
with Counting() as counted:
    x.to(a), torch.zeros_like(x, device=b), torch.empty_like(x, device=b), x.new_ones(2, device=a)
assert metrics.counter_value("CrossDeviceCopy"), "a copy that syncs is counted"
""",
    "backward": """
torch.manual_seed(0)
def program(where):
    w = torch.arange(1.0, 4.0, device=where, requires_grad=True)
    (w * w).sum().backward()
    model = nn.LSTM(3, 4).to(where)
    model(torch.ones(2, 1, 3, device=where))[0].sum().backward()
    return w.grad.tolist(), all(p.grad.device == p.device for p in model.parameters())
assert program(c) == program(b) == program(a) == program("cpu") == ([2.0, 4.0, 6.0], True)
threads = [threading.Thread(target=program, args=(d,)) for d in (a, b, c) for _ in range(2)]
for t in threads: t.start()
for t in threads: t.join()
x = torch.ones(2, device=a, requires_grad=True)
((x * 2).to(b) * 3).to(c).mul(4).to("cpu").sum().backward()
assert x.grad.device == a and x.grad.tolist() == [24.0, 24.0]
w = torch.ones(2, device=c, requires_grad=True)
w.register_hook(lambda g: g * (g.device.index or 100))
(w.to(a) * 5).sum().backward()
assert w.grad.tolist() == [10.0, 10.0]
""",
    "what may not be mixed": """
x, y, host = torch.ones(2, device=a), torch.ones(2, device=c), torch.ones(2)
calls = [
    lambda: x + y,
    lambda: x.add_(y),
    lambda: torch.stack([x, y]),
    lambda: torch.where(x > 0, x, y),
    lambda: torch.add(x, 1, out=y),
    lambda: F.linear(x, torch.ones(2, 2, device=c)),
    lambda: torch._foreach_add([x], [y]),
    lambda: x.equal(y),
    lambda: F.embedding(torch.tensor([0], device=a), torch.ones(2, 2, device=c)),
]
for i, call in enumerate(calls):
    kind, text = raised(call)
    assert "Expected all tensors to be on the same device" in text, (i, text)
    assert f"{a}" in text and f"{c}" in text and "Next: move one of them" in text, (i, text)
    assert "<string>:" in text, (i, text)
for call in (lambda: x + host, lambda: host + x, lambda: torch.cat([host, x]), lambda: x.mul_(host)):
    kind, text = raised(call)
    what = "an XLA tensor" if a.type == "xla" else "a lazy tensor"  # as the peer of that name says
    assert f"Input tensor is not {what}: torch.FloatTensor" in text and "Next: move it" in text
assert x.tolist() == y.tolist() == [1.0, 1.0] and (x + torch.tensor(1)).tolist() == [2.0, 2.0]
assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0]
assert (y + y).tolist() == [2.0, 2.0]
""",
    "a device's random numbers are its own": """
torch.manual_seed(5)
first = [torch.rand(3, device=d).tolist() for d in (a, b, c)]
assert first[0] == first[1] == first[2]
second = torch.rand(3, device=b)
assert torch.rand(3, device=a).tolist() == second.tolist()
torch.rand(100, device=c)
ltc.manual_seed(5, device=b)
assert torch.rand(3, device=b).tolist() == first[0] and torch.rand(3, device=a).tolist() != first[0]
state = ltc.get_rng_state(c)
assert state.device == c
drawn = torch.rand(3, device=c)
ltc.set_rng_state(state, a)               # a state of one device set on another
assert torch.rand(3, device=a).tolist() == drawn.tolist()
with ltc.fork_rng(b):
    torch.rand(3, device=b), torch.rand(3, device=a)
module = getattr(torch, name)
states = module.get_rng_state_all()
drawn = [torch.rand(2, device=d).tolist() for d in (a, b, c)]
module.set_rng_state_all(states)
assert [torch.rand(2, device=d).tolist() for d in (a, b, c)] == drawn
module.manual_seed_all(9)
assert torch.rand(2, device=a).tolist() == torch.rand(2, device=c).tolist()
g = torch.Generator(b).manual_seed(1)
kind, text = raised(lambda: torch.rand(2, device=c, generator=g))
assert f"{b}" in text and f"{c}" in text and "torch.Generator" in text, text
""",
    "the current device": """
with torch.accelerator.device_index(2):
    assert ltc.lazy_device() == c == torch.ones(1, device=name).device
    assert torch.ones(1).to(name).device == nn.Linear(1, 1, device=name).weight.device == c
    assert torch.zeros_like(torch.ones(1), device=name).device == c
    assert torch.ones(1, device=a).to(name).device == c
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(1, device=name).device))
    thread.start(), thread.join()
    assert seen == [a]
assert torch.ones(1, device=name).device == a == torch.device(name, torch.accelerator.current_device_index())
assert ltc.get_lazy_supported_devices() == [f"{name}:{i}" for i in range(3)]
kind, text = raised(lambda: ltc.lazy_device(3))
assert kind == "DeviceIndexError" and f"this process has 3: {name}:0, {name}:1, {name}:2" in text
""",
    "what fails on one device is told with its name": """
lost = fail(torch.ones(2, device=b))
ltc.mark_step(device=a)
ltc.wait_device_ops(a)
assert (torch.ones(2, device=c) + 1).tolist() == [2.0, 2.0]
kind, text = raised(lambda: ltc.wait_device_ops())
assert f"failed while its graph ran on {b}" in text and "custom_ops.py" in text
ltc.wait_device_ops()
""",
    "replicas trained in threads": """
torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)) for _ in range(3)]
state = {k: v.clone() for k, v in models[0].state_dict().items()}
losses = {}
def train(model, where):
    model.load_state_dict(state)
    model.to(where)
    optimizer = torch.optim.Adam(model.parameters())
    losses[where] = []
    for step in range(6):
        loss = model(torch.ones(2, 4, device=where) * step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ltc.mark_step(device=where)
        losses[where].append(loss)
torch.manual_seed(1)
threads = [threading.Thread(target=train, args=(m, d)) for m, d in zip(models, (a, b, c))]
for t in threads: t.start()
for t in threads: t.join()
first, second, third = ([round(l.item(), 5) for l in losses[d]] for d in (a, b, c))
assert first == second == third, (first, second, third)
""",
}


@cache
def finished(device_name: str) -> dict[str, str]:
    """Run all programs in one process, each in a namespace of its own: name -> what went wrong."""
    code = "results = {}\n"
    for name, program in PROGRAMS.items():
        code += f"""
try:
    exec({program!r}, dict(globals()))
    ltc.wait_device_ops()
    results[{name!r}] = ""
except BaseException:
    results[{name!r}] = traceback.format_exc()
    try:
        ltc.wait_device_ops()
    except Exception:
        pass
"""
    out, _ = child.run(
        code + "print(json.dumps(results))",
        prelude=PRELUDE,
        LTC_NUM_DEVICES="3",
        LTC_DEVICE_NAME=device_name,
    )
    return dict(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("device_name", ["ltc", "xla"])
def test_three_devices(program: str, device_name: str) -> None:
    wrong = finished(device_name)[program]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["xla", "lazy"])
def test_a_script_written_for_another_device(name: str) -> None:
    """PyTorch knows these names: their methods, flags, printing, autocast and saving must fit."""
    out, err = child.run(
        """
        import io, pickle, sys
        name = sys.argv[1] if len(sys.argv) > 1 else device.type
        assert str(device) == f"{name}:0" and torch.device(name, 0) == device
        x = torch.randn(2, 2, device=f"{name}:0")
        assert repr(x).endswith(f"device='{name}:0')"), repr(x)
        assert x.device.type == name and x.to(name) is x and not x.is_cpu
        assert torch.accelerator.current_accelerator().type == name
        if hasattr(x, f"is_{name}"):
            assert getattr(x, f"is_{name}") is True and getattr(torch.ones(1), f"is_{name}") is False
        assert getattr(torch, name).device_count() == 1
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(), torch.nn.Linear(3, 1)).to(name)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(name):
                loss = model(torch.ones(2, 3, device=name)).float().square().mean()
            loss.backward()
            optimizer.step()
            ltc.mark_step()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert torch.load(file)["0.weight"].device == device
        assert pickle.loads(pickle.dumps(x)).tolist() == x.tolist()
        torch.nn.functional.embedding(torch.tensor([0], device=name), model[0].weight)
        try:
            x + torch.ones(2, 2)
        except RuntimeError as error:
            print(str(error).splitlines()[-1])
        print([n for n in ltc.metrics.counter_names() if n.startswith(name + "::")][:1])
        print([n for n in ltc.metrics.executed_fallback_ops() if n != "aten::_local_scalar_dense"])
        """,
        LTC_DEVICE_NAME=name,
    )
    advice, counters, fallbacks = out.splitlines()
    assert f"t.to('{name}')" in advice and name in counters and fallbacks == "[]"
    assert (
        err.startswith(f"[ltc] torch.save writes tensors of the device {name} (")
        and err.count("\n") == 1
    ), err
