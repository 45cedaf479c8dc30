"""`torch_xla.stablehlo`, as scripts of torch_xla use it."""

from pathlib import Path

from tests.jax import torch_xla_script

SCRIPT = """
import ltc_dist.compat
import pytest
import torch
from torch_xla import stablehlo
from torch_xla.stablehlo import (
    StableHLOExportOptions, StableHLOGraphModule, exported_program_to_stablehlo, save_as_stablehlo,
    save_torch_model_as_stablehlo,
)

model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.BatchNorm1d(9), torch.nn.ReLU()).eval()
x, y = torch.randn(3, 5), torch.randn(4, 5)
exported = torch.export.export(model, (x,))
program = exported_program_to_stablehlo(exported)
torch.testing.assert_close(program(x), model(x))
torch.testing.assert_close(program.evaluate("forward", (x,)), model(x))
assert "stablehlo.dot_general" in program.get_stablehlo_text()
assert program.get_stablehlo_bytecode("forward").startswith(b"ML")
with pytest.raises(ValueError, match="got: 'backward', expected 'forward'"):
    program.get_stablehlo_text("backward")

save_as_stablehlo(exported, "saved")
torch.testing.assert_close(StableHLOGraphModule.load("saved")(x), model(x))
save_torch_model_as_stablehlo(model, (y,), "other", StableHLOExportOptions(include_human_readable_text=False))
torch.testing.assert_close(stablehlo.StableHLOGraphModule.load("other")(y), model(y))

image = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2)).eval()
image(torch.randn(2, 3, 8, 8))
free = torch.export.export(image, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
program = exported_program_to_stablehlo(free)
assert "tensor<?x3x8x8xf32>" in program.get_stablehlo_text()
for count in (1, 3):
    images = torch.randn(count, 3, 8, 8)
    torch.testing.assert_close(program(images), image(images), rtol=1e-5, atol=1e-5)

import torch_xla.core.xla_model as xm
from torch_xla import _XLAC
left, right = torch.randn(10, 5, device=xm.xla_device()), torch.randn(1, 5, device=xm.xla_device())
xm.mark_step()
_XLAC._xla_mark_dynamic(left, 0)
_XLAC._xla_mark_dynamic(left, 1)
_XLAC._xla_mark_dynamic(right, 1)
product = left * right
text = xm.get_stablehlo([product])
assert "dims = [0, 1] : (tensor<1x?xf32>, tensor<2xi32>) -> tensor<?x?xf32>" in text, text
assert xm.get_stablehlo_bytecode([product]).startswith(b"ML")
with pytest.raises(ValueError, match=r"(?s)the size cannot be dynamic.*got: dim 0 of LazyTensor"):
    _XLAC._xla_mark_dynamic(product, 0)
right.fill_(1)  # a mark ends with the value
assert "tensor<1x?xf32>" not in xm.get_stablehlo([left * right])
assert product.shape == (10, 5)

import torch_xla.experimental.xla_mlir_debuginfo

class Named(torch.nn.Module):
    def forward(self, x, y):
        x = torch.ops.xla.write_mlir_debuginfo(x + y, "MY_ADD")
        return torch.ops.xla.write_mlir_debuginfo(torch.ops.xla.write_mlir_debuginfo(y, "INPUT") - x, "MY_SUB")

given = torch.randn(4), torch.randn(4)
named = exported_program_to_stablehlo(torch.export.export(Named(), given))
there = [t.to(xm.xla_device()) for t in given]
result = Named()(*there)
for text in (named.get_stablehlo_text(), xm.get_stablehlo([result])):
    assert ' : tensor<4xf32> loc("MY_ADD")' in text and text.count("MY_SUB") == 1 and "custom_call" not in text
assert torch.equal(named(*given), Named()(*given)) and torch.equal(result.cpu(), Named()(*given))
assert b"lowering.py" not in named.get_stablehlo_bytecode() and "loc(" not in program.get_stablehlo_text()

options = StableHLOExportOptions(export_weights=False, inline_all_constant=False)
light = exported_program_to_stablehlo(exported, options)
assert light._bundle.state_dict == {} and len(program._bundle.state_dict) == 4
assert light.get_stablehlo_text() == exported_program_to_stablehlo(exported).get_stablehlo_text()
light.save("light")
import os
assert os.path.exists("light/program.mlir") and not os.path.exists("light/weights.safetensors")
with pytest.raises(ValueError, match="(?s)the program has no weights.*Next: export it with export_weights=True"):
    light(x)

from torch_xla.experimental import mark_pattern_utils, xla_marker
from torch_xla.experimental.mark_pattern_utils import StableHLOCompositeBuilder

class Marked(torch.nn.Module):
    def forward(self, x, y):
        builder = StableHLOCompositeBuilder("my.add", {"scale": 2.0, "axes": [0, 1]})
        x, y = builder.mark_inputs(x, y)
        return builder.mark_outputs((x + y) * 2.0)

program = exported_program_to_stablehlo(torch.export.export(Marked(), (x, x)))
text = program.get_stablehlo_text()
assert text.count('stablehlo.composite "my.add"') == 1 and "axes = dense<[0, 1]> : tensor<2xi64>" in text, text
torch.testing.assert_close(program(x, x), Marked()(x, x))
on_device = torch.export.export(Marked(), (x.to("xla"), x.to("xla")))
found = stablehlo._run_decompositions(on_device).module()(x.to("xla"), x.to("xla"))
import torch_xla.core.xla_model as xm
assert xm.get_stablehlo([found]).count('stablehlo.composite "my.add"') == 1
torch.testing.assert_close(found.cpu(), x * 4)
torch.testing.assert_close(
    torch.ops.xla.mark_tensor(x, "my.add", 0, "0", True, xla_marker.serialize_composite_attr({"k": 1})), x
)
with pytest.raises(ValueError, match="(?s)only tensors can be marked.*got: float.*Next: give numbers as attributes"):
    StableHLOCompositeBuilder("my.add").mark_inputs(x, 2.0)
for attr in ({"k": ["a"]}, {1: 2}, {"k": []}, {"k": [1, 2.0]}, {"k": None}):
    with pytest.raises(ValueError, match="(?s)other attributes than StableHLO can have.*got: "):
        StableHLOCompositeBuilder("my.add", attr).mark_outputs(x)

import os
assert not os.path.exists("other/program.mlir") and os.path.exists("saved/program.mlir")
print("done")
"""


def test_a_script_of_torch_xla(tmp_path: Path) -> None:
    done = torch_xla_script.run(SCRIPT, tmp_path)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
