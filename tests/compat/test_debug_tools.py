"""`torch_xla.debug`: profiler, metrics_saver, graph_saver, model_comparator, as scripts use them."""

from pathlib import Path

from tests.compat.running import run


def test_the_profiler(tmp_path: Path) -> None:
    code = """
import contextlib, glob, io, json, os, time
import pytest
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.parallel_loader as pl

told = io.StringIO()
with contextlib.redirect_stderr(told):
    servers = [xp.start_server(9012), xp.start_server(9013, only_on_master=False)]
assert all(servers) and told.getvalue().count("\\n") == 1
assert "no profiler listens on port 9012" in told.getvalue() and "start_trace" in told.getvalue()
os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
assert xp.start_server(9012) is None and xp.start_server(9012, only_on_master=False)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]

def names(directory):
    (file,) = glob.glob(f"{directory}/*.pt.trace.json")
    with open(file) as f:
        return [e["name"] for e in json.load(f)["traceEvents"] if e.get("ph") == "X"]

model = torch.nn.Linear(2, 1).to("xla")
data = [torch.ones(3, 2)] * 4

@xp.trace_me("loss")
def loss_of(x):
    return model(x).sum()

xp.start_trace("logs")
with pytest.raises(RuntimeError, match="Only one profile may be run at a time."):
    xp.start_trace("logs")
for step, x in enumerate(pl.MpDeviceLoader(data, "xla")):
    with xp.StepTrace("train_step", step_num=step):
        with xp.Trace("forward"):
            loss = loss_of(x)
            torch_xla.sync(reset_scope=False)
        loss.backward()
xp.stop_trace()
with pytest.raises(RuntimeError, match="No profile started"):
    xp.stop_trace()
found = names("logs")
assert found.count("forward") == found.count("loss") == 4
assert [n for n in found if n.startswith("train")] == [f"train_step#{k}" for k in range(4)]
assert met.counter_value("Sync.MarkStep") == 8, met.metrics_report()  # the loader's cuts were of nothing

(file,) = glob.glob("logs/plugins/profile/*/*.xplane.pb")  # for TensorBoard's Profile tab
with open(file, "rb") as f:
    planes = f.read()
assert all(name in planes for name in (b"/host:CPU", b"forward", b"train_step#3", b"aten::"))

xp.trace("localhost:9012", "now", duration_ms=1, num_tracing_attempts=1, timeout_s=1, interval_s=1)
names("now")  # there is one file
for use in (xp.trace, xp.trace_detached):
    with pytest.raises(RuntimeError, match="(?s)traces itself only.*got: 10.0.0.2:8466, expected localhost"):
        use("localhost:9012, 10.0.0.2:8466", "elsewhere")
assert not os.path.exists("elsewhere")
xp.trace_detached("127.0.0.1:9012", "beside", duration_ms=1000)
while not torch.autograd.profiler._is_profiler_enabled:
    time.sleep(0.001)
loss_of(data[0].to("xla"))
"""
    run(tmp_path, code)
    beside = tmp_path / "beside"  # written at the end, which waited for it
    (file,) = beside.glob("*.pt.trace.json")
    assert '"loss"' in file.read_text()


def test_metrics_and_graphs_in_files(tmp_path: Path) -> None:
    code = """
import glob, os, threading
import pytest
import torch
import torch_xla.core.xla_model as xm
from torch_xla.debug.graph_saver import save_tensors_graph
from torch_xla.debug.metrics_saver import save_metrics
import lazy_tensor_core.debug.metrics_saver as old

def text_of(path):
    with open(path) as f:
        return f.read()

t = torch.ones(2, device="xla") + 1
xm.mark_step()
assert text_of("each.txt").startswith("[MetricsData; step=1]")
save_metrics("mine.txt")
old.save_metrics("mine.txt")
text = text_of("mine.txt")
assert text.startswith("[MetricsData; step=0]\\n") and text.count("[MetricsData; step=1]\\n") == 1
assert text.count("Counter: MarkStep\\n  Value: 1\\n") == 2
save_metrics()
assert text_of("each.txt").count("[MetricsData; step=") == 2
thread = threading.Thread(target=save_metrics, args=("thread.txt",))
thread.start(); thread.join()
assert text_of("thread.txt").startswith("[MetricsData; step=0]")
save_metrics("STDOUT")
with pytest.raises(FileNotFoundError, match="none"):
    save_metrics("none/m.txt")

os.mkdir("graphs")
y = t * 3
me = threading.get_ident()
for k in range(2):
    save_tensors_graph("graphs", "step", [y])
for fmt in ("hlo", "dot"):
    os.environ["SAVE_GRAPH_FMT"] = fmt
    save_tensors_graph("graphs", fmt, [y])
assert sorted(os.listdir("graphs")) == [f"dot-{me}-0.dot", f"hlo-{me}-0.hlo", f"step-{me}-0.text", f"step-{me}-1.text"]
texts = [text_of(f"graphs/{name}") for name in sorted(os.listdir("graphs"))]
assert texts[0].startswith("digraph") and "aten.mul" in texts[1] and texts[1] == texts[2] == texts[3]
os.environ["SAVE_GRAPH_FMT"] = "png"
with pytest.raises(ValueError, match="Invalid save graph format: png"):
    save_tensors_graph("graphs", "step", [y])
assert len(os.listdir("graphs")) == 4 and y.tolist() == [6, 6]
"""
    out = run(tmp_path, code, XLA_METRICS_FILE="each.txt")
    assert out.startswith("[MetricsData; step=3]\n")


def test_models_are_compared(tmp_path: Path) -> None:
    code = """
import math, os
import pytest
import torch
import torch_xla.debug.model_comparator as mc

t = torch.arange(6.0).reshape(2, 3)
assert mc.save("ignored", t) is t
assert [n for n in os.listdir(".") if n != "script.py"] == []

# values
same = mc.compare_tensors
assert same(t, t.clone()) == same(t, t + 1e-9) == same(t[0, 0], t[0, 0]) == ""
assert same(t[0], t) == "Tensors have different shape: [3] vs. [2, 3]\\n"
other = t.clone()
other[1, 2], other[0, 1] = 7.0, 1.5
assert same(t, other) == "[1, 2]: 5.0 vs. 7.0\\terror=2.0\\n[0, 1]: 1.0 vs. 1.5\\terror=0.5\\n"
assert same(t, other, max_diffs=1) == "[1, 2]: 5.0 vs. 7.0\\terror=2.0\\n... aborting after 1 differences\\n"
assert same(t, other, rtol=0.5) == same(t, other, atol=2) == ""
assert same(t, other, rtol=0.3).count("\\n") == 1
assert same(torch.tensor(True), torch.tensor(False)) == "[]: True vs. False\\terror=1.0\\n"
assert same(torch.tensor([1j]), torch.tensor([2j])).startswith("[0]: 1j vs. 2j")
assert same(torch.tensor([3]), torch.tensor([5])) == "[0]: 3 vs. 5\\terror=2.0\\n"
odd = torch.tensor([math.nan, math.inf, -math.inf, math.inf, 1.0, math.nan])
assert same(odd, odd) == ""
report = same(odd, torch.tensor([math.nan, math.inf, -math.inf, -math.inf, math.inf, 1.0]))
assert sorted(line[:3] for line in report.splitlines()) == ["[3]", "[4]", "[5]"]

# two runs
def train(directory, device, change=0.0):
    mc.configure(directory)
    for step in range(2):
        x = torch.ones(2, 2, device=device) * step + change * (step == 1)
        assert mc.save("x", x, step=step) is x
        mc.save("x", x + 1, step=step)
        mc.save(None, x * 2)
    mc.configure(None)
    mc.save("x", x)

train("a", "cpu"), train("b", "xla"), train("c", "xla", 1.0)
assert sorted(os.listdir("a")) == ["script.py.l40.0", "script.py.l40.1", "step-0", "step-1"]
assert sorted(os.listdir("a/step-1")) == ["x.0", "x.1"]
assert mc.compare("a", "b") == ""
report = mc.compare("b", "c", max_diffs=2)
first = '''Changes in saved tensor "script.py.l40" with id=1
  [0, 0]: 2.0 vs. 4.0\\terror=2.0
  [0, 1]: 2.0 vs. 4.0\\terror=2.0
  ... aborting after 2 differences
Changes in saved tensor "x" with id=0 at step=1
'''
assert report.startswith(first) and report.count("Changes in") == 3
os.remove("a/step-0/x.1"), os.remove("b/step-1/x.0")
assert mc.compare("a", "b") == "Mismatch: step-0/x.1 not in a\\nMismatch: step-1/x.0 not in b\\n"
with pytest.raises(OSError, match="there are no saved tensors in nowhere"):
    mc.compare("a", "nowhere")

os.environ["MODELCMP_SAVEDIR"] = "named"
mc.save("y", t)
os.environ["RANK"], os.environ["WORLD_SIZE"] = "1", "2"
mc.save("z", t)
assert os.listdir("named") == ["y.0"]
"""
    line = 1 + code.split("mc.save(None")[0].count("\n")
    run(tmp_path, code.replace("l40", f"l{line}"))
    # The same from the command line, with 1 where they differ.
    code = """
import subprocess, sys
compare = [sys.executable, "-m", "ltc_dist.compat.torch_xla.debug.model_comparator"]
same = subprocess.run([*compare, "b", "b"], capture_output=True, text=True)
assert same.returncode == 0 and same.stdout == "", same.stderr
done = subprocess.run([*compare, "b", "c", "--rtol", "1e-3", "--max_diffs", "1"], capture_output=True, text=True)
assert done.returncode == 1 and done.stderr.count("aborting after 1 differences") >= 1, done.stderr
"""
    run(tmp_path, code, is_served=False)


def test_no_step_ends_inside_of_a_trace(tmp_path: Path) -> None:
    code = """
import pytest, torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp

x = torch.ones(2, device=torch_xla.device())
with pytest.raises(RuntimeError, match=r"(?s)Expecting scope to be empty but it is conv1.1.*reset_scope=False"):
    with xp.Trace("conv1"):
        x += 1
        torch_xla.sync()
assert met.counter_value("MarkStep") == 1 and x.tolist() == [2, 2]
xm.mark_step()  # the scope is closed
with pytest.raises(RuntimeError, match=r"scope to be empty but it is outer.1/inner.2 "):
    with xp.Trace("outer"):
        with xp.Trace("inner"):
            torch_xla.sync(reset_scope=False)
        xp.trace_me("inner")(xm.mark_step)()
xm.mark_step()
with xp.StepTrace("step"):
    x += 1
assert met.counter_value("MarkStep") == 6
"""
    run(tmp_path, code)


def test_reports_are_read_and_compared(tmp_path: Path) -> None:
    code = """
import pytest, torch, torch_xla
import torch_xla.debug.metrics as met
import torch_xla.debug.metrics_compare_utils as mcu

REPORT = '''--metric:localhost
Metric: InboundData
  TotalSamples: 1728
  Accumulator: {size}
  Rate: 16.8665 / second
  Percentiles: 1%=393.00KB; 50%=1.54MB; 99%=1.54MB
Metric: TransferToDeviceTime
  TotalSamples: 2616
  Accumulator: 04d17h11m07s495ms546.299us
  ValueRate: 783ms426.227us / second
  Rate: 24.5054 / second
  Percentiles: 1%=05m003ms; 99%=05m129ms
Counter: CreateCompileHandles
  Value: 40
'''
first, second = REPORT.format(size="10GB"), REPORT.format(size="14GB") + "Counter: aten::nonzero\\n  Value: 3\\n"
found = mcu.parse_metrics_report(first)
assert found["InboundData__TotalSamples"] == 1728 and found["InboundData__Accumulator_mb"] == 10000
assert found["InboundData__Percentile_1_mb"] == 0.393 and found["CreateCompileHandles__Value"] == 40
assert abs(found["TransferToDeviceTime__Accumulator_sec"] - 407467.495546299) < 1e-6
assert abs(found["TransferToDeviceTime__Percentile_99_sec"] - 300.129) < 1e-9
assert mcu.parse_metrics_report(first, dehumanize=False)["InboundData__Accumulator_mb"] == (10000, "10GB")
with pytest.raises(ValueError, match="Unknown metric_str format: 3parsec"):
    mcu.parse_metrics_report(first.replace("10GB", "3parsec"))

points = mcu.get_data_points_from_metrics_reports([first, second])
assert points["InboundData__Accumulator_mb"] == [10000, 14000] and points["aten::nonzero__Value"] == [None, 3]
assert mcu.compare_metrics(points, second) == ""
points = mcu.get_data_points_from_metrics_reports([first, first])
mean = "Mean: 10000.0.  Stddev: 0.0.  Actual Value: 14000.0"
failed = f"InboundData__Accumulator_mb failed its expression check. Expression: v <= v_mean + (v_stddev * 2.0).  {mean}"
assert mcu.compare_metrics(points, second).splitlines() == [failed, "Found new aten counter: aten::nonzero__Value: 3"]
given = {"base_expression": "v == v_mean", "InboundData__Accumulator_mb_expression": "v > v_mean"}
assert mcu.compare_metrics(points, second.replace("aten::", "xla::"), given) == ""

(torch.rand(3, 3, device="xla") + 1).cpu()
own = mcu.parse_metrics_report(met.metrics_report())
assert {"CompileTime__TotalSamples", "CompileTime__Accumulator_sec", "ExecuteTime__Percentile_99_sec"} <= own.keys()
"""
    run(tmp_path, code)
