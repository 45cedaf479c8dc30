"""Eager mode, checkpointing, closures, queues, test_utils and the names of variables, as scripts use them."""

from pathlib import Path

from tests.compat.running import run


def test_eager_mode(tmp_path: Path) -> None:
    code = """
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.experimental
from torch_xla.experimental.eager import eager_mode, eager_mode_context, is_eager_mode

def cuts(reason):
    return met.counter_value(f"Sync.{reason}") or 0

assert is_eager_mode() and torch_xla.experimental.is_eager_mode()
x = torch.ones(2, device="xla")
y = x.exp() * 2
assert cuts("Eager") >= 2
with eager_mode_context(False) as before:
    started = cuts("Eager")
    assert before and not is_eager_mode()
    y = x.exp() * 2
    assert cuts("Eager") == started
    torch_xla.sync()
z = x.exp() * 2
assert cuts("Eager") == started + 2 and torch.equal(y, z)
torch_xla.experimental.eager_mode(False)

@torch_xla.experimental.compile
def twice(v):
    return v.exp() * 2

started = cuts("MarkStep")
assert torch.equal(twice(x), z) and cuts("MarkStep") == started + 1 and not is_eager_mode()
"""
    run(tmp_path, code, XLA_USE_EAGER_DEBUG_MODE="1")


def test_checkpoint_and_tagger(tmp_path: Path) -> None:
    code = """
import pytest
import torch
import torch_xla.core.xla_model as xm
from torch_xla.utils.checkpoint import checkpoint
from torch_xla.utils.checkpoint_tagger import CheckpointTagger

def gradients(device, call):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Tanh()).to(device)
    x = torch.ones(3, 4, device=device, requires_grad=True)
    torch.manual_seed(1)
    calls = []
    call(lambda v: calls.append(1) or layer(v), x).sum().backward()
    return [x.grad.cpu(), *(p.grad.cpu() for p in layer.parameters())], len(calls)

expected, once = gradients("cpu", lambda f, x: f(x))
assert once == 1
for kwargs in ({}, {"use_reentrant": True, "preserve_rng_state": True}, {"use_reentrant": False}):
    found, twice = gradients("xla", lambda f, x: checkpoint(f, x, **kwargs))
    assert twice == 2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
with pytest.raises(ValueError, match="Unexpected keyword arguments: nothing"):
    checkpoint(torch.exp, torch.ones(1), nothing=1)

removed = []
tagger = CheckpointTagger(removed.append)
tagger.tag("last", "1.pt"), tagger.tag("best", "1.pt"), tagger.tag("last", "2.pt")
assert removed == [] and tagger.tags == {"last": "2.pt", "best": "1.pt"}
tagger.tag("last", "2.pt"), tagger.tag("best", "2.pt")
assert removed == ["1.pt"]
again = CheckpointTagger.load_from_json(tagger.save_to_json(), remover=removed.append)
assert again.tags == {"last": "2.pt", "best": "2.pt"}
again.tag("last", "3.pt"), again.tag("best", "3.pt")
assert removed == ["1.pt", "2.pt"]
unheard = CheckpointTagger()
unheard.tag("a", "1"), unheard.tag("a", "2")
assert unheard.tags == {"a": "2"}
"""
    run(tmp_path, code)


def test_a_module_under_a_checkpoint_runs_its_whole_forward_again(tmp_path: Path) -> None:
    code = """
import torch
import torch_xla
from torch_xla.distributed.fsdp.utils import checkpoint_module

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 4), []
    def forward(self, x):
        x = torch.nn.functional.dropout(self.layer(x))
        self.seen.append(x.detach())
        return x

model = checkpoint_module(Model().to("xla"))
model(torch.ones(3, 4, device="xla")).sum().backward()
torch_xla.sync()
first, second = model.seen
assert torch.equal(first, second) and first.abs().sum() > 0
"""
    run(tmp_path, code)


def test_closures_and_queues(tmp_path: Path) -> None:
    code = """
import threading, time
import pytest
from lazy_tensor_core.utils.closures import AsyncClosureHandler as Old
from torch_xla.utils.closures import AsyncClosureHandler, ClosureHandler
from torch_xla.utils.keyd_queue import KeydQueue, Queue

# closures
main, seen = threading.current_thread(), []
handler = AsyncClosureHandler(max_queue_size=2)
assert isinstance(handler, ClosureHandler) and Old is AsyncClosureHandler
gate, entered = threading.Event(), threading.Event()
handler.start_event_loop()  # nothing waits
handler.run(lambda: (entered.set(), gate.wait(), seen.append(threading.current_thread() is main)))
assert entered.wait(20)
handler.run_all([lambda k=k: seen.append(k) for k in range(2)])
blocked = threading.Thread(target=handler.run, args=(lambda: seen.append("blocked"),))
blocked.start()
assert seen == [] and blocked.is_alive()
gate.set()
blocked.join()
done = threading.Event()
handler.run(done.set)
assert done.wait(20) and seen == [False, 0, 1, "blocked"]

def fail(what):
    raise KeyError(what)

done.clear()
handler.run(lambda: fail("first"))
while not handler._errors:
    time.sleep(0.001)
with pytest.raises(RuntimeError, match="Cannot run asynchronous closure due to previously raised exception") as told:
    handler.run(lambda: seen.append("never"))
assert isinstance(told.value.__cause__, KeyError) and "first" in str(told.value)
handler.run(done.set)
assert done.wait(20) and seen[-1] == "blocked"

def reads(queue, *keys):
    found = []
    thread = threading.Thread(target=lambda: found.append(queue.get(*keys)))
    thread.start()
    return thread, found

# first in, first out
queue = Queue(maxsize=2)
assert queue.max_size() == 2 and Queue().max_size() == KeydQueue().max_size() == 1024
queue.put(1), queue.put(2)
third = threading.Thread(target=queue.put, args=(3,))
third.start()
assert queue.get() == 1
third.join()
queue.close_write()
assert [queue.get() for _ in range(3)] == [2, 3, None]
queue = Queue(maxsize=1)
thread, found = reads(queue)
queue.put("late")
thread.join()
assert found == ["late"]
queue.put("full")
waiting = threading.Thread(target=queue.put, args=("dropped",))
waiting.start()
queue.close()
waiting.join()
queue.put("dropped too")
assert [queue.get(), queue.get()] == ["full", None]

# by key
queue = KeydQueue(maxsize=1)
queue.put("a", 1)
thread, found = reads(queue, "b")
queue.put("b", 2)  # full, but it is waited for, now or soon
thread.join()
assert found == [2] and queue.get("a") == 1
threads = [reads(queue, key) for key in ("c", "c", "d")]
queue.put("c", 3)
queue.put("c", 4)
queue.close_write()
for thread, _ in threads:
    thread.join()
assert threads[2][1] == [None] and not queue._waited_for
assert {v for _, found in threads[:2] for v in found} <= {3, 4, None}
queue.put("e", 5)
assert queue.get("e") == 5
queue.put("e", 6)
queue.close()
queue.put("f", 7)
assert queue.get("e") == 6 and queue.get("f") is None

# at the end what waits is done, and who raised last is named
handler.run(lambda: (time.sleep(0.05), print("done at the end", flush=True), fail("last")))
"""
    assert run(tmp_path, code) == "done at the end\n"


def test_an_error_that_nobody_was_told_of_is_named_at_the_end(tmp_path: Path) -> None:
    code = """
import subprocess, sys
text = '''
import ltc_dist.compat
from torch_xla.utils.closures import AsyncClosureHandler
AsyncClosureHandler().run(lambda: 1 / 0)
'''
done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
assert done.returncode == 0
assert done.stderr == (
    "ltc: a closure raised, and nobody was told before the end: ZeroDivisionError: division by zero\\n"
), done.stderr
"""
    run(tmp_path, code, is_served=False)


WRITER = """
class SummaryWriter:
    def __init__(self, log_dir):
        self.rows, self.calls = [], [log_dir]
    def add_scalar(self, name, value, global_step=None):
        self.rows.append((name, float(value), global_step))
    def flush(self):
        self.calls.append("flush")
    def close(self):
        self.calls.append("close")
"""


def test_what_training_scripts_print_and_write(tmp_path: Path) -> None:
    code = f"""
import contextlib, io, os, re, sys, unittest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.test.test_utils as test_utils

def printed(call, *args, **kwargs):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call(*args, **kwargs)
    return re.sub(r"\\d\\d:\\d\\d:\\d\\d", "T", out.getvalue())

device = xm.xla_device()
loss = torch.ones(4, device=device).mean() / 3
line = printed(test_utils.print_training_update, device, 20, loss, 12.345, 9.8, epoch=1)
assert line == "| Training Device=xla:0/0 Epoch=1 Step=20 Loss=0.33333 Rate=12.35 GlobalRate=9.80 Time=T\\n", line
line = printed(test_utils.print_training_update, device, 0, 0.5, 1, 2)
assert line == "| Training Device=xla:0/0 Step=0 Loss=0.50000 Rate=1.00 GlobalRate=2.00 Time=T\\n", line
assert printed(test_utils.print_test_update, device, None, 3) == "| Test Device=xla:0/0 Epoch=3 Time=T\\n"
line = printed(test_utils.print_test_update, device, torch.tensor(91.234), epoch=3, step=7)
assert line == "| Test Device=xla:0/0 Step=7 Epoch=3 Accuracy=91.23 Time=T\\n", line
assert len(test_utils.now("%Y")) == 4

# without a library, and without a directory
told = io.StringIO()
with contextlib.redirect_stderr(told):
    sys.modules.update({{"tensorboardX": None, "torch.utils.tensorboard": None}})
    assert test_utils.get_summary_writer("logs") is None
    assert test_utils.get_summary_writer(None) is None
assert told.getvalue() == "ltc: nothing is written to logs: neither tensorboardX nor tensorboard is installed.\\n"
test_utils.write_to_summary(None, 1, {{"a": 1}}, write_xla_metrics=True)
test_utils.close_summary_writer(None)

# with one
del sys.modules["tensorboardX"]
with open("tensorboardX.py", "w") as file:
    file.write({WRITER!r})
sys.path.insert(0, os.getcwd())
writer = test_utils.get_summary_writer("logs")
assert writer.calls == ["logs"] and writer.rows.pop()[::2] == ("TensorboardStartTimestamp", 0)
printed(test_utils.print_training_update, device, 0, 0.5, 1, 2, summary_writer=writer)
assert writer.rows == [("examples/sec", 1.0, None), ("average_examples/sec", 2.0, None)]
writer.rows.clear()
torch.linalg.det(torch.eye(2, device=device)).cpu()
xm.mark_step()
test_utils.write_to_summary(writer, global_step=3, dict_to_write={{"loss": 0.5}}, write_xla_metrics=True)
rows = {{name: value for name, value, step in writer.rows if step == 3}}
assert rows["loss"] == 0.5 and rows["MarkStep__Value"] == 1
assert 0 < rows["ExecuteTime__Accumulator_sec"] < 100
assert 0 < rows["ExecuteTime__Percentile_1_sec"] <= rows["ExecuteTime__Percentile_99_sec"]
assert rows["ExecuteTime__TotalSamples"] >= 2 and 0 < rows["InboundData__Accumulator_mb"] < 1
assert rows["aten_ops_sum"] == sum(v for name, v in rows.items() if name.startswith("aten::"))
import ltc_dist.compat.torch_xla.test.test_utils as ours
report = "Metric: A\\n  TotalSamples: 2\\n  Accumulator: 01m02s003ms004.500us\\n  ValueRate: 1.00 / second\\n"
report += "  Percentiles: 1%=1.50GB; 50%=12.00\\nCounter: aten::x\\n  Value: 3\\n"
found = ours._numbers_of(report)
assert abs(found.pop("A__Accumulator_sec") - 62.0030045) < 1e-9
assert found == {{"A__TotalSamples": 2, "A__Percentile_1_mb": 1500, "A__Percentile_50": 12, "aten::x__Value": 3}}
os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
assert test_utils.get_summary_writer("logs") is None
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]
test_utils.close_summary_writer(writer)
assert writer.calls == ["logs", "flush", "close"]

# tests in a process of their own
class Cases(unittest.TestCase):
    @test_utils.mp_test
    def test_good(self):
        assert torch.ones(2, device=device).sum().item() == 2

    @test_utils.mp_test
    def test_bad(self):
        sys.exit(3)

result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(Cases).run(result)
assert result.testsRun == 2 and not result.errors, result.errors
assert [case.id() for case, _ in result.failures] == ["__main__.Cases.test_bad"], result.failures
assert test_utils.mp_test(lambda: sys.exit(4))() == 4
assert "3 != 0" in result.failures[0][1]
"""
    run(tmp_path, code)


def test_names_of_variables(tmp_path: Path) -> None:
    code = """
import os
import torch_xla.core.xla_env_vars as xenv
assert xenv.PJRT_DEVICE == "PJRT_DEVICE" and xenv.CPU_NUM_DEVICES == "CPU_NUM_DEVICES"
assert xenv.TPU_CONFIG == "XRT_TPU_CONFIG" and xenv.LOCAL_WORKER == "XRT_LOCAL_WORKER"
assert xenv.ORDINAL == "XRT_SHARD_ORDINAL" and xenv.LOCAL_ORDINAL == "XRT_SHARD_LOCAL_ORDINAL"
assert xenv.TPU_MESH_CTLER_ADDR == "TPU_MESH_CONTROLLER_ADDRESS" and xenv.WORLD_SIZE == "WORLD_SIZE"
names = [name for name in dir(xenv) if name.isupper()]
assert len(names) >= 44 and all(type(getattr(xenv, name)) is str for name in names)
"""
    run(tmp_path, code)


def test_precision_of_products(tmp_path: Path) -> None:
    code = """
import torch
from torch_xla import backends

warned = []
backends.logger.addFilter(lambda record: warned.append(record.getMessage()) or False)
assert backends.get_mat_mul_precision() == "highest"
backends.set_mat_mul_precision("default")
assert warned == [backends._WARNING_MESSAGE] and "compiled anew" in warned[0]
assert torch.get_float32_matmul_precision() == "medium"
assert backends.get_mat_mul_precision() == "default"
try:
    backends.set_mat_mul_precision("low")
except ValueError as error:
    assert "no such precision" in str(error) and "'high'" in str(error)
else:
    raise AssertionError
"""
    run(tmp_path, code)


def test_a_callback_when_a_tensor_is_computed(tmp_path: Path) -> None:
    code = """
import threading
import torch
import torch_xla
from torch_xla.experimental import callback

x = torch.ones(3, device="xla") * 2
told, done = [], threading.Event()
callback.on_ready_callback(x, lambda t: (told.append(t), done.set()))
assert done.wait(20) and told[0] is x
assert callback.on_ready_event(x + 1).wait(20)
"""
    run(tmp_path, code)


def test_structures_without_none(tmp_path: Path) -> None:
    code = """
import pytest
import torch
import torch_xla.experimental.scan as module

leaves, unflatten = module.tree_flatten_none({"a": torch.ones(1), "b": None, "c": [torch.zeros(1)]})
assert [t.item() for t in leaves] == [1.0, 0.0]
assert unflatten(["x", "y"]) == {"a": "x", "b": None, "c": ["y"]}
module._SCAN_COMPUTATION_CACHE.clear()
"""
    run(tmp_path, code)


def test_forward_and_backward_of_one_iteration(tmp_path: Path) -> None:
    code = """
import torch
import torch_xla
from torch_xla.experimental.scan import value_and_grad_partitioned

device = torch_xla.device()

def fn(carry, x):
    hidden = carry["h"] @ x
    return {"h": hidden, "n": carry["n"] + 1}, (hidden.tanh(), None)

n = torch.zeros((), dtype=torch.int64, device=device)
h, x = (torch.rand(3, 3, device=device).requires_grad_() for _ in range(2))
forward, alias_input, backward = value_and_grad_partitioned(fn, {"h": h, "n": n}, x[None])
carry, (y, made) = forward({"h": h, "n": n}, x)
activations = alias_input(made, x)
assert any(a is x for a in activations) and not any(a is x for a in made)
assert carry["n"].item() == 1 and y[1] is None
expected, (of_y, _) = fn({"h": h, "n": n}, x)
assert torch.equal(carry["h"], expected["h"]) and torch.equal(y[0], of_y)
grads, of_x = backward(
    {"h": torch.ones_like(h), "n": None}, ((torch.ones_like(of_y), None), activations)
)
wanted = torch.autograd.grad((expected["h"] + of_y).sum(), (h, x))
assert grads["n"] is None
torch.testing.assert_close((grads["h"], of_x), wanted)
"""
    run(tmp_path, code)
