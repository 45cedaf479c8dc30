"""torch_xla's counters and metrics, read as scripts read them."""

from pathlib import Path

from tests.compat.running import run

IMPORTS = """
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
device = torch_xla.device()
"""


def test_an_op_is_counted_when_it_is_recorded_and_once(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
t = torch.tensor(100, device=device)
t += 2
assert met.counter_value("xla::add") == 1 and "Counter: xla::add\\n  Value: 1" in met.metrics_report()
met.clear_counters()
assert met.counter_value("xla::add") is None and met.counter_names() == []
torch_xla.sync()
assert met.counter_value("xla::add") is None and met.counter_value("MarkStep") == 1
t = t + 2
t = t * 2
assert met.counter_value("xla::add") == met.counter_value("xla::mul") == 1
torch_xla.sync()
assert met.counter_value("xla::add") == met.counter_value("xla::mul") == 1
"""
    run(tmp_path, code)


def test_ops_that_are_cleared_and_never_run_hide_no_later_ones(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
t = torch.ones(3, device=device)
torch_xla.sync()
u = t + 1
met.clear_counters()
del u
torch_xla.sync()  # nothing of it is alive
assert met.counter_value("xla::add") is None
v = t + 1
assert met.counter_value("xla::add") == 1
"""
    run(tmp_path, code)


def test_tensors_transfers_and_programs_have_their_counters(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
t = torch.tensor(2077, device=device)
assert met.counter_value("CreateXlaTensor") == met.counter_value("DeviceDataCacheMiss") == 1
assert met.counter_value("DestroyXlaTensor") is None
torch_xla._XLAC._xla_increment_counter("CreateXlaTensor", 3)
torch_xla._XLAC._xla_increment_counter("Mine", 2)
assert met.counter_value("CreateXlaTensor") == 4 and met.counter_value("Mine") == 2
u = t * 2
torch_xla.sync()
assert met.counter_value("UncachedCompile") == met.counter_value("CreateCompileHandles") == 1
assert met.metric_data("CompileTime")[0] == met.metric_data("InputOutputAliasCount")[0] == 1
assert met.metric_data("TensorToData") == met.metric_data("TransferToDeviceTime")
t += 1
torch_xla.sync()
assert met.metric_data("InputOutputAliasCount")[1] == 1  # the memory of t is written again
for _ in range(2):
    u = t * 3
    torch_xla.sync()
assert met.counter_value("CachedCompile") == 2  # the factor is an operand of the program
if u > 0:
    pass
assert met.executed_fallback_ops() == ["aten::_local_scalar_dense"]
met.clear_all()
assert met.metric_names() == met.counter_names() == [] and met.metric_data("TensorToData") is None
"""
    run(tmp_path, code)


def test_eager_mode_has_metrics_of_its_own(tmp_path: Path) -> None:
    code = f"""{IMPORTS}
with torch_xla.experimental.eager_mode_context(True):
    met.clear_all()
    t = torch.tensor(156, device=device) + 100
    xm.wait_device_ops()
    assert met.metric_data("EagerOpCompileTime")[0] == met.metric_data("EagerOpExecuteTime")[0] == 1
    assert not {{"CompileTime", "ExecuteTime"}} & set(met.metric_names())
t = t + 1
torch_xla.sync()
assert met.metric_data("CompileTime")[0] == 1 and met.metric_data("EagerOpCompileTime")[0] == 1
with torch_xla.experimental.eager_mode_context(True):
    t = torch.ones(200, 200, device=device)
    xm.wait_device_ops()
    met.clear_all()
    t = torch_xla.compile(lambda t: t @ t)(t)  # runs on when eager mode is back
    xm.wait_device_ops()
    assert met.metric_data("ExecuteTime")[0] == 1 and met.metric_data("EagerOpExecuteTime") is None
"""
    run(tmp_path, code)
