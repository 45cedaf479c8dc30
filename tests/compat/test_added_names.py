"""Names that few scripts use: imports of JAX, the state that `_XLAC` tells, modules that refuse."""

from pathlib import Path

from tests.compat.running import run


def test_what_the_lowest_module_tells(tmp_path: Path) -> None:
    code = """
import torch, torch_xla
X = torch_xla._XLAC
X._init_computation_client()
assert (X._xla_get_default_device_ordinal(), X._xla_get_process_index(), X._xla_get_num_processes()) == (0, 0, 1)
X._xla_set_rng_seed(5)
assert X._xla_get_rng_seed() == 5 and X._xla_device_kind("xla:0")
before = X._xla_get_num_cached_compilation_graph()
(torch.ones(2, device="xla") * 3).tolist()
assert X._xla_get_num_cached_compilation_graph() >= before and not X._get_use_eager_mode()
X._set_use_eager_mode(True)
assert X._get_use_eager_mode() and torch_xla.experimental.is_eager_mode()
X._set_use_eager_mode(False)

from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config
get = X._xla_get_enable_alias_with_buffer_donor_config
with alias_with_buffer_donor_config():
    assert get()
    with alias_with_buffer_donor_config(False):
        assert not get()
    assert get()
assert not get()
"""
    run(tmp_path, code)


def test_modules_that_help_or_refuse(tmp_path: Path) -> None:
    code = """
import importlib.util, pytest, torch, torch_xla
import torch_xla._internal.jax_workarounds as jax_workarounds
from torch_xla import save_as_stablehlo, save_torch_model_as_stablehlo, stablehlo
from torch_xla.amp import syncfree
from torch_xla.amp.syncfree.adam import Adam
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call
import torch_xla.experimental.plugins as plugins

assert save_as_stablehlo is stablehlo.save_as_stablehlo and Adam is syncfree.Adam
jax_workarounds.jax_import_guard()
with jax_workarounds.jax_env_context():
    assert jax_workarounds.requires_jax(len)([1]) == 1
for name, found in (("jax", jax_workarounds.maybe_get_jax(False)), ("torchax", jax_workarounds.maybe_get_torchax())):
    assert (found is None) is (importlib.util.find_spec(name) is None)
with pytest.raises(NotImplementedError, match="(?s)is not here: ops are not marked.*Next: write the op"):
    stablehlo_custom_call("name")
with pytest.raises(NotImplementedError, match="devices are not PJRT plugins"):
    plugins.use_dynamic_plugins()
"""
    run(tmp_path, code)


def test_what_is_beneath_torch_compile(tmp_path: Path) -> None:
    code = """
import warnings
import torch, torch_xla
from torch_xla._dynamo import config, dynamo_backend2
from torch_xla._dynamo import dynamo_bridge as bridge
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

warnings.filterwarnings("ignore", message="torch.compile does nothing on xla")
config.skip_input_data_check = True
x = torch.ones(3, device="xla")
for backend in ("openxla", dynamo_backend2.dynamo_backend):
    made = torch.compile(lambda t: t.sin() + 1, backend=backend)
    assert torch.equal(made(x).cpu(), torch.ones(3).sin() + 1)
    assert torch.equal(torch.compile(lambda t: t * 2, backend=backend)(torch.ones(3)), torch.full((3,), 2.0))
made = torch.compile(lambda device: torch.arange(3, device="cpu").to(device), backend="openxla")
assert made(x.device).tolist() == [0, 1, 2]
graph = torch.fx.symbolic_trace(torch.nn.ReLU())
call = bridge.extract_compiled_graph(graph, (x,))
assert call(-x).device == x.device and call(-x).tolist() == [0, 0, 0]
from torch_xla.core import dynamo_bridge
assert dynamo_bridge.extract_compiled_graph is bridge.extract_compiled_graph
layer = torch.nn.Linear(3, 2).to("xla")
torch_xla.sync()
ids, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node([layer(x)])
assert len(inputs) == 3 and {id(t) for t in inputs} == {id(t) for t in (x, layer.weight, layer.bias)}
own = torch_xla._XLAC._xla_get_tensor_id(x)
matcher = bridge.GraphInputMatcher({own: 0}, ids, inputs, {own})
assert matcher.graph_input_xla_values.count(None) == 1
assert [t if t == "x" else id(t) for t in matcher(["x"])] == ["x" if t is x else id(t) for t in inputs]
assert torch_xla._XLAC._get_tensors_xla_device_data_node([x]) == ([], [])
collector = bridge.UnsupportedNodesCollector(torch.fx.symbolic_trace(lambda a, b: a.to("xla") + b.sin()))
collector.run(torch.ones(3), x)
assert [n.target for n in collector.get_unsupported_nodes()] == ["a", "to"]
assert bridge.alias_with_buffer_donor_config is alias_with_buffer_donor_config and not bridge.get_fallback_ops()

for given, rest in ((["a", None, "b", None], ["a", "b"]), (("a", None), ("a",)), ((), ()), ([None], [])):
    remover, kept = bridge.NoneRemover(), list(given)
    found = remover.remove_nones(given)
    assert found == rest and (found is given or isinstance(given, tuple))
    assert list(remover.add_nones(found)) == kept
"""
    run(tmp_path, code)


def test_pictures_of_shardings(tmp_path: Path) -> None:
    code = """
import pytest, torch, torch_xla
from torch_xla.distributed.spmd import debugging

def cells(text):
    table = debugging.visualize_sharding(text, use_color=False)
    return [[cell.renderable.renderable for cell in column._cells] for column in table.columns]

assert cells("{devices=[2,2]0,1,2,3}") == [["CPU 0", "CPU 2"], ["CPU 1", "CPU 3"]]
assert cells("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}") == [["CPU [0, 1]", "CPU [2, 3]"]]
assert cells("{devices=[4]0,1,2,3}") == [["CPU 0", "CPU 1", "CPU 2", "CPU 3"]]
assert cells("{replicated}") == cells("") == [["CPU [0]"]]
assert debugging.visualize_tensor_sharding(torch.ones(2, 2, device="xla")).row_count == 1
for wrong in ("{manual}", "{devices=[2,2]0,1,2}"):
    with pytest.raises(ValueError, match="is not organized as expected"):
        debugging.visualize_sharding(wrong)
with pytest.raises(NotImplementedError, match="the picture shows two dimensions"):
    debugging.visualize_sharding("{devices=[1,1,2]0,1}")
"""
    run(tmp_path, code, PJRT_DEVICE="CPU")


def test_a_mark_as_an_op_on_one_device(tmp_path: Path) -> None:
    code = """
import torch, torch_xla
import torch_xla.distributed.spmd as xs
t, there = torch.ones(4, 2), torch.ones(4, 2, device="xla")
for each in (t, there):
    assert torch.ops.xla.dynamo_mark_sharding(each, [0], [1, 1], "('x', 'y')", "('x', 'y')") is each
assert isinstance(there, xs.XLAShardedTensor) and not isinstance(t, xs.XLAShardedTensor)
X = torch_xla._XLAC
assert X._get_xla_sharding_type(there) == xs.ShardingType.REPLICATED
assert X._get_xla_sharding_type(torch.ones(2, device="xla")) is None
X._ensure_xla_coordinator_initialized(0, 1, "localhost")
(shard,) = there.local_shards
assert (shard.indices, shard.replica_id) == (..., 0) and torch.equal(shard.unpadded_data, t)
w = torch.ones(3, 2, device="xla", requires_grad=True)
xs.XLAPatchedLinear.apply(there, w, None).sum().backward()
assert w.grad.tolist() == [[4.0, 4.0]] * 3
"""
    run(tmp_path, code)
