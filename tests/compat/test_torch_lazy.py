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

# the rest
context = get_device_context()
assert context is get_device_context("lazy:0") and context.device == "lazy:0"
assert torch.randn in tensor_factory_functions
assert torch._lazy.get_tensor_id(x) != torch._lazy.get_tensor_id(one)
called = []
add_step_closure(lambda t: called.append(t.tolist()), args=(x + 7,))
run_step_closures()
assert called == [[8, 8]]
"""
    run(tmp_path, code)
