"""CPU operands beside device ones: torch_xla uploads those of arithmetic, and so do its scripts here."""

from pathlib import Path

from tests.compat.running import run


def test_arithmetic_takes_an_operand_of_the_cpu(tmp_path: Path) -> None:
    code = """
import operator, pytest, torch, torch_xla
import torch_xla.debug.metrics as met
x, y = torch.rand(5, device=torch_xla.device()), torch.rand(5)
for op in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, torch.fmod):
    met.clear_all()
    results = op(x, y), op(y, x)
    assert met.counter_value("CpuOperand") == 2 and {r.device.type for r in results} == {"xla"}
    torch.testing.assert_close([r.cpu() for r in results], [op(x.cpu(), y), op(y, x.cpu())])
assert torch.equal(x + y, y + x)
before = x.cpu()
x += y
torch.testing.assert_close(x.cpu(), before + y)
bits = torch.tensor([3, 5], device="xla")
assert [(bits & torch.tensor([1, 1])).tolist(), (bits << torch.tensor([1, 2])).tolist()] == [[1, 1], [6, 20]]

met.clear_all()
for refused in (lambda: y.add_(x), lambda: torch.maximum(x, y), lambda: x.view(1, 5) @ y.view(5, 1)):
    with pytest.raises(RuntimeError, match="Input tensor is not an XLA tensor: torch.FloatTensor"):
        refused()
assert met.counter_value("CpuOperand") is None
w = torch.ones(5, requires_grad=True, device="xla")
(w * y).sum().backward()
torch.testing.assert_close(w.grad.cpu(), y)
"""
    run(tmp_path, code)


def test_scripts_for_other_peers_get_the_refusal(tmp_path: Path) -> None:
    code = """
import pytest, torch
import lazy_tensor_core.core.lazy_model as ltm
with pytest.raises(RuntimeError, match="Input tensor is not a lazy tensor: torch.FloatTensor"):
    torch.ones(5, device=ltm.lazy_device()) + torch.ones(5)
"""
    run(tmp_path, code, LTC_DEVICE_NAME="lazy")
