"""Two devices in one process: copies, a model across both, and what may not be mixed.

The number of devices is fixed at the first import, so the program is a process of its own.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import prepared

ROOT = Path(__file__).parents[3]

PRELUDE = """
import io, torch, ltc_core as ltc
from torch import nn
a, b = ltc.lazy_device(0), ltc.lazy_device(1)
name = a.type

def raised(call, *args):
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing raised")
"""
PROGRAMS = {
    "copies": """
x = torch.ones(2, device=a)
y = x.to(b)
assert (y.device, y.tolist()) == (b, [1.0, 1.0])
y += 1
x.copy_(y * 3)
y[0] = x[1]
assert x.device == a and x.tolist() == [6.0, 6.0] and y.tolist() == [6.0, 2.0]
assert torch.zeros_like(x, device=b).device == x.new_ones(1, device=b).device == b
for host in (torch.rand(2, 3).t(), torch.rand(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)):
    there = host.to(a).to(b, copy=True)
    assert there.cpu().equal(host) and there.cpu().stride() == host.stride(), there.cpu().stride()
part = torch.rand(2, 4)[:, ::2].t()
assert part.to(a).to(b).cpu().stride() == part.clone().stride()
""",
    "mixing": """
x, y = torch.ones(2, device=a), torch.ones(2, device=b)
for call in (lambda: x + y, lambda: torch.cat([x, y]), lambda: nn.Linear(2, 2).to(a)(y)):
    text = raised(call)
    assert f"at least two devices, {a} and {b}" in text and "Next: move one of them" in text, text
assert (x + 1).tolist() == (y + 1).tolist() == [2.0, 2.0]
""",
    "current": """
assert ltc.get_lazy_supported_devices() == [f"{name}:0", f"{name}:1"]
assert ltc.get_lazy_supported_devices(1) == [f"{name}:0"]
with torch.accelerator.device_index(1):
    assert torch.ones(1, device=name).device == b == ltc.lazy_device()
assert torch.ones(1, device=name).device == a
text = raised(ltc.lazy_device, 5)
assert f"there is no device {name}:5" in text and f"{name}:0, {name}:1" in text and "Next:" in text
""",
    "a thread that has one for itself": """
from ltc_core.api.verbs import alone_on
def cuts():
    return ltc.metrics.counter_value("ExecuteComputation") or 0
x, y = torch.ones(1, device=a) + 1, torch.ones(1, device=b) + 1
before = cuts()
with alone_on(1):
    ltc.mark_step()
    ltc.wait_device_ops()
assert cuts() - before == 1
ltc.mark_step()
assert cuts() - before == 2 and (x + y.to(a)).item() == 4.0
""",
    "random numbers": """
torch.manual_seed(3)
x, y = torch.rand(2, device=a), torch.rand(2, device=b)
eager = torch.rand(2, generator=torch.Generator().manual_seed(3))
assert x.tolist() == y.tolist() == eager.tolist()
ltc.manual_seed(4, b)
assert torch.rand(2, device=b).tolist() != torch.rand(2, device=a).tolist()
""",
    "a model across both": """
def train(first, second):
    torch.manual_seed(0)
    l1, l2 = nn.Linear(3, 4).to(first), nn.Linear(4, 2).to(second)
    optimizer = torch.optim.Adam([*l1.parameters(), *l2.parameters()], lr=0.1)
    losses = []
    for _ in range(5):
        hidden = l1(torch.ones(2, 3, device=first)).relu()
        loss = l2(hidden.to(second)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*l1.parameters(), *l2.parameters()], 0.5)
        optimizer.step()
        ltc.mark_step()
        losses.append(loss.item())
    return torch.tensor(losses)
torch.testing.assert_close(train(a, b), train("cpu", "cpu"))
""",
    "saving": """
file = io.BytesIO()
torch.save({"w": torch.ones(2, device=b)}, file)
table = {f"{name}:1": f"{name}:0"}
for where, expected in ((None, b), (table, a), (a, a), ("cpu", torch.device("cpu"))):
    file.seek(0)
    assert torch.load(file, map_location=where)["w"].device == expected, where
model = nn.Linear(2, 2).to(a)
weight = model.weight
assert model.to(b).weight is weight and weight.device == b
""",
    "waiting and memory": """
x, y = torch.ones(1000, device=a) + 1, torch.ones(500, device=b) + 1
ltc.wait_device_ops([b])
assert ltc.get_memory_info(b)["bytes_used"] >= 2000
ltc.mark_step(wait=True)
assert ltc.get_memory_info(a)["bytes_used"] >= 4000
bad = nn.functional.embedding(torch.tensor([9], device=b), torch.ones(2, 2, device=b))
assert (x + 1).sum().item() == 3000.0
try:
    ltc.wait_device_ops()
except IndexError as error:
    assert f"on {b}" in str(error)
else:
    raise AssertionError("the error was lost")
""",
}


@pytest.fixture(scope="module")
def finished() -> dict[str, str]:
    """Run all programs in one process (its start costs more): name -> what went wrong."""
    code = PRELUDE + "import json, traceback\nresults = {}\n"
    for name, program in PROGRAMS.items():
        code += f"""
try:
    exec({program!r}, dict(globals()))
    results[{name!r}] = ""
except BaseException:
    results[{name!r}] = traceback.format_exc()
"""
    code += "print(json.dumps(results))"
    child = prepared.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LTC_NUM_DEVICES": "2"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return dict(json.loads(child.stdout))


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, finished: dict[str, str]) -> None:
    assert not finished[name], finished[name]
