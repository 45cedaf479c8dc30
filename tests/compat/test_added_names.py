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
from torch_xla.experimental.mark_pattern_utils import StableHLOCompositeBuilder
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call
import torch_xla.experimental.plugins as plugins

assert save_as_stablehlo is stablehlo.save_as_stablehlo and Adam is syncfree.Adam
jax_workarounds.jax_import_guard()
with jax_workarounds.jax_env_context():
    assert jax_workarounds.requires_jax(len)([1]) == 1
for name, found in (("jax", jax_workarounds.maybe_get_jax(False)), ("torchax", jax_workarounds.maybe_get_torchax())):
    assert (found is None) is (importlib.util.find_spec(name) is None)
for use in (StableHLOCompositeBuilder, stablehlo_custom_call):
    with pytest.raises(NotImplementedError, match="(?s)is not here: ops are not marked.*Next: write the op"):
        use("name")
with pytest.raises(NotImplementedError, match="devices are not PJRT plugins"):
    plugins.use_dynamic_plugins()
"""
    run(tmp_path, code)
