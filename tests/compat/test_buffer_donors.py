"""Buffers that a script donates, and placeholders: tensors without memory."""

from pathlib import Path

from tests.compat.running import run

IMPORTS = """
import gc, pytest, torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
from torch_xla.core.xla_builder import create_placeholder_tensor
X = torch_xla._XLAC
"""


def test_marked_buffers_are_given_to_the_step_that_reads_them(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
cache, other = torch.ones(4, 2).to("xla"), torch.ones(4, 2).to("xla")
assert torch.ops.xla.dynamo_set_buffer_donor_(cache, True) is cache
assert X._get_buffer_donation(cache) and not X._get_buffer_donation(other)
assert met.counter_value("XlaSetBufferDonation") == 1
torch_xla.sync()
assert X._get_buffer_donation(cache) and not X._is_placecholder(cache)  # no step has read it
total = cache + other
torch_xla.sync(wait=True)
assert X._is_placecholder(cache) and not X._get_buffer_donation(cache) and not X._is_placecholder(other)
assert total.tolist() == [[2.0, 2.0]] * 4
with pytest.raises(RuntimeError, match="(?s)is deleted.*script.py.*float32.4, 2. on xla:0.*Next: read the results"):
    cache.cpu()
with pytest.raises(RuntimeError, match="is deleted"):
    X._get_tensors_handle([other, cache])

# A mark ends with a new value, and can be removed.
assert X._set_buffer_donation(other, True)
other += 1
assert not X._get_buffer_donation(other) and not X._set_buffer_donation(other, True)  # pending
torch_xla.sync()
assert X._set_buffer_donation(other, True) and X._set_buffer_donation(other, False)
more = other + 1
torch_xla.sync()
assert other.tolist() == [[2.0, 2.0]] * 4 and not X._set_buffer_donation(torch.ones(2), True)

# Syncs of some tensors donate if a setting says so.
for is_on in (False, True):
    X._xla_set_enable_alias_with_buffer_donor_config(is_on)
    assert X._xla_get_enable_alias_with_buffer_donor_config() is is_on
    X._set_buffer_donation(other, True)
    more = other + 1
    X._xla_sync_multi([other, more], ["xla:0"], True, False)
    assert X._is_placecholder(other) is is_on and more.tolist() == [[3.0, 3.0]] * 4
"""
    run(tmp_path, code)


def test_calls_with_marked_buffers_run_at_their_end(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import warnings
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config
warnings.filterwarnings("ignore", message="torch.compile does nothing on xla")
add = torch.compile(lambda t: t + 1, backend="openxla")
x = torch.ones(3).to("xla")
plain, hashed = add(x), X._get_graph_hash([add(x)])
assert met.metric_data("ExecuteTime") is None
assert "Data Handle: " in X._get_xla_tensor_debug_info(x) and X._set_buffer_donation(x, True)
result = add(x)
assert "Data Handle: Deleted" in X._get_xla_tensor_debug_info(x) and not X._get_buffer_donation(x)
xm.wait_device_ops()
assert met.metric_data("ExecuteTime")[0] == 1 and result.tolist() == [2.0] * 3

@torch.compile(backend="openxla")
def double(t):
    torch.ops.xla.dynamo_set_buffer_donor_(t, True)
    t *= 2

for _ in range(3):
    double(result)
    xm.wait_device_ops()
assert met.metric_data("ExecuteTime")[0] == 4 and result.tolist() == [16.0] * 3

y = torch.ones(3).to("xla")
z = y.cos()
before = X._get_graph_hash([z])
assert X._set_buffer_donation(y, True) and X._get_graph_hash([z]) == before
with alias_with_buffer_donor_config():
    assert X._get_graph_hash([z]) != before
"""
    run(tmp_path, code)


def test_a_compiled_call_in_eager_mode_is_one_graph(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
import warnings
warnings.filterwarnings("ignore", message="torch.compile does nothing on xla")
x = torch.ones(3).to("xla")
torch_xla.experimental.eager_mode(True)
function = torch.compile(lambda t: t.sin().cos(), backend="openxla")
module = torch.compile(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU()), backend="openxla")
assert torch.equal(function(x).cpu(), torch.ones(3).sin().cos()) and torch.equal(module(x).cpu(), torch.ones(3).tanh())
assert met.metric_data("ExecuteTime")[0] == 2 and met.metric_data("EagerOpExecuteTime") is None
assert torch_xla.experimental.is_eager_mode()
"""
    run(tmp_path, code)


def test_placeholders_are_recorded_and_not_run(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
p, q = create_placeholder_tensor((2, 3), torch.bfloat16), create_placeholder_tensor((3, 4), torch.bfloat16)
assert (p.shape, p.dtype, p.device) == ((2, 3), torch.bfloat16, torch_xla.device())
assert X._is_placecholder(p) and not X._is_placecholder(torch.ones(1, device="xla"))
result = (torch.sin(p) @ q) @ q.T
text = X._get_xla_tensors_text([result])
assert text.count("xla::device_data()") == 2 and "bf16[2,3]{{1,0}} xla::device_data()" in text
assert len(set(X._get_tensors_handle([p, q, p]))) == 2 and not met.metric_data("TransferToDeviceTime")
with pytest.raises(RuntimeError, match="(?s)no value: it is a placeholder.*bfloat16.3, 4. on xla:0"):
    q.cpu()
with pytest.raises(RuntimeError, match="it is a placeholder"):
    result.cpu()
"""
    run(tmp_path, code)


def test_the_report_of_live_tensors(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
ready = torch.ones(2).to("xla")
pending = (ready + 1) * 2
report = X._xla_tensors_report(1, "xla:0")
assert report.count("[Tensor: ") == 1 and "shape=f32[2], device=xla:0, ir_nodes=2]" in report
assert X._xla_tensors_report(0).count("[Tensor: ") == 2 and not X._xla_tensors_report(0, "xla:1")
assert "Frames" not in report and not X._get_ir_debug()
X._set_ir_debug(True)
again = (ready + 1) * 2
report = X._xla_tensors_report(2)
assert X._get_ir_debug() and "Frames" in report and "script.py" in report
"""
    run(tmp_path, code)
