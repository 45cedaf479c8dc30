"""Products with quantized weights, beside those of the weights that they stand for."""

from pathlib import Path

from tests.compat.running import run


def test_quantized_weights(tmp_path: Path) -> None:
    code = """
import pytest, torch, torch_xla
from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear

device = torch_xla.device()
torch.manual_seed(0)
x = torch.randn(3, 6)
w = torch.randint(-8, 8, (4, 6)).to(torch.int8)
scale, zero = torch.rand(4), torch.randn(4)
in_blocks = w.T.reshape(3, 2, 4).contiguous()
scales, zeros = torch.rand(3, 4), torch.randn(3, 4)
whole = (in_blocks * scales[:, None] - zeros[:, None]).reshape(6, 4)
cases = (
    (w, scale, None, {}, x @ (w * scale[:, None]).T, 1e-5),
    (w, scale, zero, {"int4_weight": True}, x @ (w * scale[:, None] - zero[:, None]).T, 1e-5),
    (w, scale, zero, {"quantize_activation": True}, x @ (w * scale[:, None] - zero[:, None]).T, 0.2),
    (in_blocks, scales, zeros, {"block_size": 2}, x @ whole, 1e-5),
)
for weight, s, z, how, wanted, tolerance in cases:
    layer = XlaQuantizedLinear(6, 4, is_symmetric=z is None, **how)
    layer.load_quantized_weight(weight, s, z)
    on_cpu = layer(x)
    torch.testing.assert_close(on_cpu, wanted, atol=tolerance, rtol=0)
    ours = layer.to(device)(x.to(device))
    assert ours.device == device and layer.weight.dtype is torch.int8
    torch.testing.assert_close(ours.cpu(), on_cpu)
matmul = torch.ops.xla.quantized_matmul
whole = matmul(x, w, scale, zero, quantize_activation=True)
for shape in ((3, 1, 6), (1, 3, 6)):
    given = x.reshape(shape)
    for t in (given, given.to(device)):
        there = (o.to(t.device) for o in (w, scale, zero))
        found = matmul(t, *there, quantize_activation=True)
        torch.testing.assert_close(found.cpu(), whole.reshape(*shape[:-1], 4))
row = matmul(x[0], w, scale, zero, quantize_activation=True)
torch.testing.assert_close(row, whole[0])
assert torch.ops.quantized_decomposed.quantize_per_channel
for call, text in (
    (lambda: matmul(x, w.float(), scale), "dtype is expected to be torch.int8"),
    (lambda: matmul(x, w[:, :5], scale), r"Weight shape is expected to be \\[4, 6\\], got \\[4, 5\\]"),
    (lambda: matmul(x, w, scale[:2]), "weight scaler shape is expected to be"),
    (lambda: matmul(x, w, scale, zero[:1]), "zero_point shape is expected to be"),
    (lambda: matmul(x, in_blocks, scales, block_size=4), "should be divisible by block_size"),
    (lambda: matmul(x, in_blocks, scales, block_size=2, quantize_activation=True), "does not support activation"),
):
    with pytest.raises(AssertionError, match=text):
        call()
"""
    run(tmp_path, code)
