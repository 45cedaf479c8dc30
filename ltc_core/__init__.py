"""ltc_core: a lazy-tensor training runtime for PyTorch, in one process.

Importing it registers the device. `lazy_device()` returns it, `mark_step()` ends a step:

    import ltc_core as ltc

    device = ltc.lazy_device()
    model = model.to(device)
    for data, target in loader:
        optimizer.zero_grad()
        loss_fn(model(data.to(device)), target.to(device)).backward()
        optimizer.step()
        ltc.mark_step()
"""

import gc
import sys

# Unless the script has imported PyTorch, it is imported here: half a million objects that stay until the end. Without
# the garbage collector that takes two thirds of the time, and frozen they are not looked through at the exit.
_imports_torch = "torch" not in sys.modules
_collects = gc.isenabled()
gc.disable()
try:
    from ltc_core import torch_version  # noqa: F401, I001 - first: it says which versions of PyTorch do
    from ltc_core import errors, export, metrics, profiler, setup
    from ltc_core.api import syncfree
    from ltc_core.api.eager import eager_mode
    from ltc_core.api.grad_scaler import GradScaler
    from ltc_core.api.verbs import (
        add_step_closure,
        check_view_sharing,
        dump_ir,
        fork_rng,
        get_lazy_supported_devices,
        get_memory_info,
        get_rng_state,
        is_lazy_tensor,
        lazy_device,
        lazy_device_hw,
        manual_seed,
        mark_step,
        save,
        send_cpu_data_to_device,
        set_rng_state,
        step,
        sync_multi,
        to_cpu,
        unlazy,
        wait_device_ops,
    )
    from ltc_core.serialization.plain import load
    from ltc_core.settings import settings

    if _imports_torch:
        gc.freeze()
finally:
    if _collects:
        gc.enable()

__all__ = [
    "GradScaler",
    "add_step_closure",
    "check_view_sharing",
    "dump_ir",
    "eager_mode",
    "errors",
    "export",
    "fork_rng",
    "get_lazy_supported_devices",
    "get_memory_info",
    "get_rng_state",
    "is_lazy_tensor",
    "lazy_device",
    "lazy_device_hw",
    "load",
    "manual_seed",
    "mark_step",
    "metrics",
    "profiler",
    "save",
    "send_cpu_data_to_device",
    "set_rng_state",
    "settings",
    "step",
    "sync_multi",
    "syncfree",
    "to_cpu",
    "unlazy",
    "wait_device_ops",
]

__version__ = "0.1.0"

setup.set_up()
