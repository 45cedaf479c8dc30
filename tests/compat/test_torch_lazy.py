"""torch._lazy beside what scripts of document 002 use: what PyTorch's own tests of it call."""

from pathlib import Path

from tests.compat.running import run


def test_what_its_tests_call(tmp_path: Path) -> None:
    code = """
from pathlib import Path

import pytest
import torch
import torch._lazy
import torch._lazy.metrics
import torch._lazy.ts_backend
from torch import fx
from torch._lazy import computation, config, debug, ir_cache
from torch._lazy.closure import add_step_closure, run_step_closures
from torch._lazy.device_context import get_device_context
from torch._lazy.extract_compiled_graph import extract_compiled_graph
from torch._lazy.tensor_factory_functions import tensor_factory_functions

torch._lazy.ts_backend.init()
x = torch.ones(2, device="lazy")
assert x.device.type == "lazy"

# hashes
one, two, other = x + 1, x + 1, x * 2
assert computation.get_graph_hash([one]) == computation.get_graph_hash([x + 1]) != computation.get_graph_hash([other])
with pytest.raises(NotImplementedError, match="run_cached_graph is not here"):
    computation.run_cached_graph("", [])

# the trie
torch._lazy.mark_step()
ir_cache.dump("trie.dot")
drawing = Path("trie.dot").read_text()
assert drawing.startswith("digraph recorded {") and "aten.add" in drawing and "peripheries=2" in drawing
ir_cache.reset()
ir_cache.dump("trie.dot")
assert "aten.add" not in Path("trie.dot").read_text()
assert (one + other).tolist() == [4, 4]

# graphs as text
y = x * 3
assert "aten.mul" in debug.dump_ir([y], "text") and debug.dump_ir([y], "text") == debug.dump_ir([y], "backend")
assert debug.render_ir_graph([x * 3]).startswith("digraph")
with pytest.raises(RuntimeError, match="Unrecognized IR format: other"):
    debug.dump_ir([x * 3], "other")

# settings
config.set_force_fallback("aten::mul")
assert config.get_force_fallback() == "aten::mul"
torch._lazy.metrics.reset()
assert (x * 5).tolist() == [5, 5] and torch._lazy.metrics.counter_value("aten::mul") == 1
config.set_force_fallback("")
config.set_reuse_ir(False)

# a module of the CPU as a graph
class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
    def forward(self, a, b):
        a.add_(1)
        return self.inner(a) * 2, [b + torch.ones(3), b]

torch.manual_seed(0)
module = Twice()
fast = extract_compiled_graph(fx.symbolic_trace(module), [torch.ones(2, 3), torch.ones(3)])
for k in range(2):
    a, b = torch.full((2, 3), float(k)), torch.arange(3.0)
    expected = module(a.clone(), b)
    found = fast(a, b)
    assert a[0, 0] == k + 1 and found[0].device.type == "cpu"
    torch.testing.assert_close(found, expected)
assert module.inner.weight.device.type == "cpu"

# what it writes, into one tensor that is given twice, and through other ways than a method
class Writes(torch.nn.Module):
    def forward(self, a, b, c):
        a[0].mul_(3)
        torch._foreach_add_([c["in"]], 1)
        return a + b, c["not"]
writes = extract_compiled_graph(Writes(), [torch.ones(2), torch.ones(2), {"in": torch.ones(2), "not": torch.ones(2)}])
a, c = torch.ones(2), {"in": torch.ones(2), "not": x}
found, same = writes(a, a, c)
assert a.tolist() == [3, 1] and found.tolist() == [6, 2] and c["in"].tolist() == [2, 2]
assert same.tolist() == [1, 1] and same.device.type == "cpu"

# the rest
context = get_device_context()
assert context is get_device_context("lazy:0") is get_device_context("lazy") and context.device == "lazy:0"
assert get_device_context(x.device) is context is not get_device_context("cpu")
assert torch.randn in tensor_factory_functions
assert torch._lazy.get_tensor_id(x) != torch._lazy.get_tensor_id(one)
called = []
add_step_closure(lambda t: called.append(t.tolist()), args=(x + 7,))
run_step_closures()
assert called == [[8, 8]]
"""
    run(tmp_path, code)


def test_native_functions_of_lazy_tensor_core(tmp_path: Path) -> None:
    """Its scripts begin with `_ltc_init_ts_backend()`."""
    code = """
import lazy_tensor_core
import torch
from lazy_tensor_core import _LAZYC
from lazy_tensor_core.core.extract_compiled_graph import extract_compiled_graph

_LAZYC._ltc_init_ts_backend()
_LAZYC._ltc_enable_reuse_ir()
assert _LAZYC._ltc_get_default_device() == "lazy:0" and _LAZYC._ltc_get_devices() == ["lazy:0", "lazy:1"]
assert _LAZYC._ltc_set_default_device("lazy:1") == "lazy:0" and _LAZYC._ltc_real_devices(["lazy:1"]) == ["CPU:1"]
x = torch.ones(2, device="lazy") + 1
assert x.device.index == 1
assert "aten.add" in _LAZYC._get_ltc_tensors_text([x]) and "aten.add" in _LAZYC._get_ltc_tensors_backend([x])
assert _LAZYC._get_ltc_tensors_dot([x]).startswith("digraph")
assert _LAZYC._get_graph_hash(x) == _LAZYC._get_graph_hash([x])
assert _LAZYC._ltc_get_tensor_id(x) != _LAZYC._ltc_get_tensor_id(x + 1)
_LAZYC._ltc_sync_multi([x], devices=[])
assert "aten.add" not in _LAZYC._get_ltc_tensors_text([x])
_LAZYC._ltc_step_marker("lazy:1", devices=[], wait=True)
_LAZYC._ltc_wait_device_ops(devices=[])
assert _LAZYC._ltc_counter_value("MarkStep") == 1 and "MarkStep" in _LAZYC._ltc_counter_names()
assert _LAZYC._ltc_get_cpu_tensors([x])[0].tolist() == [2, 2]
assert "MarkStep" in _LAZYC._ltc_metrics_report()
"""
    run(tmp_path, code, CPU_NUM_DEVICES="2")
