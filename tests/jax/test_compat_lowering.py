"""`torch_xla._XLAC.lowering`, as scripts of torch_xla use it."""

from pathlib import Path

from tests.jax import torch_xla_script

SCRIPT = """
import ltc_dist.compat
import json
import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met

device = torch_xla.device()
LoweringContext = torch_xla._XLAC.lowering.LoweringContext
a, b = torch.tensor([1.0, 2.0, 3.0], device=device), torch.randn(3).to(device)
result = (a + b).view(1, 3) @ torch.ones(3, 2).to(device) + 0.5
context = LoweringContext("MyName")
assert (context.hlo(), context.hlo_text(), context.hlo_json()) == (b"", "", "{}")
before = torch_xla._XLAC._get_xla_tensors_text([result])
context.build([result])
assert torch_xla._XLAC._get_xla_tensors_text([result]) == before  # nothing ran

text = context.hlo_text()
assert text.startswith('name: "MyName"'), text[:80]
assert text.count('opcode: "parameter"') == 3 and 'opcode: "add"' in text and 'opcode: "dot"' in text
found = json.loads(context.hlo_json())
assert len(found["hostProgramShape"]["parameters"]) == 3
sizes = [shape["dimensions"] for shape in found["hostProgramShape"]["parameters"]]
assert sizes == [["3"], ["3"], ["3", "2"]], sizes
ops = found["computations"][0]["instructions"]
dot = next(one for one in ops if one["opcode"] == "dot")
assert dot["dotDimensionNumbers"] == {"lhsContractingDimensions": ["1"], "rhsContractingDimensions": ["0"]}, dot
constants = [one["literal"]["f32s"] for one in ops if one["opcode"] == "constant"]
assert constants == [[0.5]], constants

# The parameters are the tensors of now, whatever the tensors become later.
assert [context.tensor_parameter_id(t) for t in (a, b, result, torch.ones(3))] == [0, 1, -1, -1]
met.clear_all()
own = context.device_parameter_id_tensor_mapping()
assert list(own) == [0, 1, 2] and all(t.device == device for t in own.values())
assert met.metric_data("TransferFromDeviceTime") is None
kept = b.cpu()
a += 1
torch_xla.sync()
values = context.parameter_id_tensor_mapping()
assert torch.equal(values[0], torch.tensor([1.0, 2.0, 3.0])) and torch.equal(values[1], kept)
assert all(t.device.type == "cpu" for t in values.values())
torch.testing.assert_close(result.cpu(), (values[0] + values[1]).view(1, 3) @ values[2] + 0.5)

# Equal views of one tensor, and numbers of other kinds.
view = a[1:]
other = LoweringContext()
assert other.get_name_string() == "FnLoweringContext"
other.set_name_string("Other")
other.build([view * 2, torch.full((2, 1), -7, dtype=torch.int64, device=device)])
assert other.get_name_string() == "Other" and 's64s: -7' in other.hlo_text()
assert list(other.parameter_id_tensor_mapping()) == [0]
with pytest.raises(RuntimeError, match="not computed by one program.*\\n  got: 0 programs"):
    other.build([a])
with pytest.raises(RuntimeError, match="random numbers that are drawn while they run(.|\\n)*Next: draw the numbers"):
    other.build([torch.randn(3, device=device) + a])
print("done")
"""


def test_a_script_of_torch_xla(tmp_path: Path) -> None:
    done = torch_xla_script.run(SCRIPT, tmp_path)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
