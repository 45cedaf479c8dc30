"""`torch_xla.amp`: autocast with and without a device, GradScaler, and optimizers that skip a step on the device."""

from pathlib import Path

from tests.compat.running import run

AUTOCAST = """
import inspect
import threading
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.amp import autocast, syncfree, GradScaler
from torch_xla.amp.autocast_mode import autocast as second
from torch_xla.amp.grad_scaler import GradScaler as other
from lazy_tensor_core.amp import autocast as third

device = xm.xla_device()
a = torch.ones(2, 2, device=device)

def product(**options):
    return (a @ a).dtype

low, half, full = torch.bfloat16, torch.float16, torch.float32
for made, dtype in [
    (autocast(device), low),
    (autocast("xla"), low),
    (autocast("xla:0", True, half), half),
    (autocast(device, dtype=half), half),
    (autocast(device, False), full),
    (autocast(device=device, enabled=False), full),
    (autocast(torch.device("cpu")), full),
    (second(device, True, None, False), low),
    # up to 1.13
    (autocast(), low),
    (autocast(False), full),
    (autocast(True, half), half),
    (autocast(enabled=True, dtype=half, cache_enabled=False), half),
    (third(), low),
]:
    with made:
        assert product() is dtype
    assert product() is full
    assert made(product)() is dtype  # as a decorator
with autocast(torch.device("cpu")):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is low
with autocast(device, cache_enabled=False):
    assert not torch.is_autocast_cache_enabled()
with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
    autocast(device, precision=16)

found = []
def in_a_thread():
    with autocast(device):
        found.append(product())
thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
assert found == [low]
"""

TRAINING = """
import torch_xla.debug.metrics as met
from torch_xla.amp.syncfree import SGD, Adam, AdamW
import torch_xla.distributed.zero_redundancy_optimizer as zero

assert GradScaler is other and issubclass(GradScaler, torch.amp.GradScaler) and syncfree.SGD is SGD
names = list(inspect.signature(GradScaler).parameters)
assert names == ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled", "use_zero_grad"]
for kind in (SGD, Adam, AdamW):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
    optimizer = kind(model.parameters(), lr=0.01)
    scaler = GradScaler(init_scale=64.0)
    kept, losses = [], []
    met.clear_all()
    for k in range(6):
        optimizer.zero_grad()
        with autocast(device):
            loss = model(torch.ones(3, 4, device=device)).square().mean()
        scaler.scale(loss * (float("inf") if k == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        kept.append(model[0].weight.detach().clone())
        xm.mark_step()
    assert met.counter_value("Sync.MarkStep") == 6
    assert [name for name in met.counter_names() if name.startswith("Sync.")] == ["Sync.MarkStep"]
    assert not met.executed_fallback_ops()
    assert torch.equal(kept[1], kept[2]) and not torch.equal(kept[2], kept[3])
    assert float(losses[-1]) < float(losses[0]) and scaler.get_scale() == 32.0

p = torch.nn.Parameter(torch.ones(3, device=device))
shared = zero.ZeroRedundancyOptimizer([p], torch.optim.SGD, torch.float32, False, None, True, lr=0.5)
p.sum().backward()
shared.step()
assert p.tolist() == [0.5, 0.5, 0.5] and shared.state_dict().keys() >= {"base_state", "shape_info"}
"""


def test_autocast_and_gradients_that_overflow(tmp_path: Path) -> None:
    run(tmp_path, AUTOCAST + TRAINING)
