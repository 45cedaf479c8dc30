"""Which module of this package stands for which old one. An empty name: a package that has only modules in it."""

from __future__ import annotations

__all__ = ["ABSENT", "SERVED"]

SERVED: dict[str, str] = {
    # torch_xla
    "torch_xla": "torch_xla",
    "torch_xla.torch_xla": "torch_xla",
    "torch_xla.version": "version",
    "torch_xla._XLAC": "native",
    "torch_xla.runtime": "runtime",
    "torch_xla.core": "",
    "torch_xla.core.functions": "functions",
    "torch_xla.core.xla_model": "xla_model",
    "torch_xla.debug": "",
    "torch_xla.debug.metrics": "metrics",
    "torch_xla.distributed": "",
    "torch_xla.distributed.data_parallel": "data_parallel",
    "torch_xla.distributed.parallel_loader": "parallel_loader",
    "torch_xla.distributed.xla_multiprocessing": "xla_multiprocessing",
    "torch_xla.experimental": "",
    "torch_xla.experimental.pjrt": "pjrt",
    "torch_xla.utils": "",
    "torch_xla.utils.serialization": "serialization",
    "torch_xla.utils.utils": "utils",
    # its name of 2018 and 2019
    "torch_xla_py": "",
    "torch_xla_py.data_parallel": "data_parallel",
    "torch_xla_py.xla_model": "xla_model",
    # lazy_tensor_core
    "lazy_tensor_core": "version",
    "lazy_tensor_core.core": "",
    "lazy_tensor_core.core.functions": "functions",
    "lazy_tensor_core.core.lazy_model": "lazy_model",
    "lazy_tensor_core.debug": "",
    "lazy_tensor_core.debug.metrics": "metrics",
    "lazy_tensor_core.distributed": "",
    "lazy_tensor_core.distributed.data_parallel": "data_parallel",
    "lazy_tensor_core.distributed.parallel_loader": "parallel_loader",
    "lazy_tensor_core.utils": "",
    "lazy_tensor_core.utils.serialization": "serialization",
    "lazy_tensor_core.utils.utils": "utils",
    # torch._lazy
    "torch._lazy": "torch_lazy",
    "torch._lazy.closure": "torch_lazy",
    "torch._lazy.config": "lazy_config",
    "torch._lazy.debug": "lazy_debug",
    "torch._lazy.metrics": "metrics",
    "torch._lazy.ts_backend": "ts_backend",
}

_SPMD = "tensors are not sharded over devices by annotation; run a process for each device, with ltc-launch"
_PALLAS = "there are no Pallas kernels; use torch.nn.functional.scaled_dot_product_attention"
_STABLEHLO = "graphs are not exported as StableHLO; ltc_core.dump_ir writes them as text, torch.export exports a model"

# Modules of what cannot exist here: why, and what to use instead.
ABSENT: dict[str, str] = {
    "torch_xla.distributed.spmd": _SPMD,
    "torch_xla.experimental.xla_sharding": _SPMD,
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": _SPMD,
    "torch_xla.experimental.custom_kernel": _PALLAS,
    "torch_xla.experimental.pallas_kernels": _PALLAS,
    "torch_xla.stablehlo": _STABLEHLO,
    "torch_xla.tf_saved_model_integration": _STABLEHLO,
}
