"""Which module of this package stands for which old one. An empty name: a package that has only modules in it."""

from __future__ import annotations

__all__ = ["ABSENT", "SERVED", "STABLEHLO"]

SERVED: dict[str, str] = {
    # torch_xla
    "torch_xla": "torch_xla",
    "torch_xla.torch_xla": "torch_xla",
    "torch_xla.version": "version",
    "torch_xla._XLAC": "native",
    "torch_xla.runtime": "runtime",
    "torch_xla._internal": "",
    "torch_xla._internal.pjrt": "internal_pjrt",
    "torch_xla._internal.tpu": "tpu",
    "torch_xla.amp": "amp",
    "torch_xla.amp.autocast_mode": "amp",
    "torch_xla.amp.grad_scaler": "amp",
    "torch_xla.amp.syncfree": "syncfree",
    "torch_xla.core": "",
    "torch_xla.core.functions": "functions",
    "torch_xla.core.xla_env_vars": "xla_env_vars",
    "torch_xla.core.xla_model": "xla_model",
    "torch_xla.debug": "",
    "torch_xla.debug.graph_saver": "graph_saver",
    "torch_xla.debug.metrics": "metrics",
    "torch_xla.debug.metrics_saver": "metrics_saver",
    "torch_xla.debug.model_comparator": "model_comparator",
    "torch_xla.debug.profiler": "profiler",
    "torch_xla.distributed": "",
    "torch_xla.distributed.data_parallel": "data_parallel",
    "torch_xla.distributed.parallel_loader": "parallel_loader",
    "torch_xla.distributed.xla_backend": "xla_backend",
    "torch_xla.distributed.xla_multiprocessing": "xla_multiprocessing",
    "torch_xla.distributed.zero_redundancy_optimizer": "zero_redundancy_optimizer",
    "torch_xla.experimental": "experimental",
    "torch_xla.experimental.eager": "experimental",
    "torch_xla.experimental.pjrt": "pjrt",
    "torch_xla.experimental.pjrt_backend": "xla_backend",
    "torch_xla.experimental.tpu": "tpu",
    "torch_xla.test": "",
    "torch_xla.test.test_utils": "test_utils",
    "torch_xla.utils": "",
    "torch_xla.utils.checkpoint": "checkpoint",
    "torch_xla.utils.checkpoint_tagger": "checkpoint_tagger",
    "torch_xla.utils.closures": "closures",
    "torch_xla.utils.keyd_queue": "keyd_queue",
    "torch_xla.utils.serialization": "serialization",
    "torch_xla.utils.utils": "utils",
    # its name of 2018 and 2019
    "torch_xla_py": "",
    "torch_xla_py.data_parallel": "data_parallel",
    "torch_xla_py.xla_model": "xla_model",
    # lazy_tensor_core
    "lazy_tensor_core": "version",
    "lazy_tensor_core._LAZYC": "lazy_native",
    "lazy_tensor_core.amp": "amp",
    "lazy_tensor_core.amp.autocast_mode": "amp",
    "lazy_tensor_core.amp.grad_scaler": "amp",
    "lazy_tensor_core.core": "",
    "lazy_tensor_core.core.extract_compiled_graph": "lazy_extract",
    "lazy_tensor_core.core.functions": "functions",
    "lazy_tensor_core.core.lazy_model": "lazy_model",
    "lazy_tensor_core.debug": "",
    "lazy_tensor_core.debug.metrics": "metrics",
    "lazy_tensor_core.debug.metrics_saver": "metrics_saver",
    "lazy_tensor_core.debug.profiler": "profiler",
    "lazy_tensor_core.distributed": "",
    "lazy_tensor_core.distributed.data_parallel": "data_parallel",
    "lazy_tensor_core.distributed.parallel_loader": "parallel_loader",
    "lazy_tensor_core.utils": "",
    "lazy_tensor_core.utils.closures": "closures",
    "lazy_tensor_core.utils.keyd_queue": "keyd_queue",
    "lazy_tensor_core.utils.serialization": "serialization",
    "lazy_tensor_core.utils.utils": "utils",
    # torch._lazy
    "torch._lazy": "torch_lazy",
    "torch._lazy.closure": "torch_lazy",
    "torch._lazy.computation": "lazy_computation",
    "torch._lazy.config": "lazy_config",
    "torch._lazy.debug": "lazy_debug",
    "torch._lazy.device_context": "lazy_device_context",
    "torch._lazy.extract_compiled_graph": "lazy_extract",
    "torch._lazy.ir_cache": "lazy_ir_cache",
    "torch._lazy.metrics": "metrics",
    "torch._lazy.tensor_factory_functions": "lazy_factories",
    "torch._lazy.ts_backend": "ts_backend",
}

_SPMD = "tensors are not sharded over devices by annotation; run a process for each device, with ltc-launch"
_DCP = "no state is sharded by annotation; ltc_dist.Checkpointer and torch.distributed.checkpoint save a whole job"
_PALLAS = "there are no Pallas kernels; use torch.nn.functional.scaled_dot_product_attention"
_FSDP = (
    "parameters are not sharded over processes; torch_xla.distributed.zero_redundancy_optimizer shards the optimizer's "
    "state, DistributedDataParallel and optimizer_step keep whole replicas"
)
_XRT = "there are no XRT workers; start the script with ltc-launch --nnodes N on each host, or with torchrun"
_BUILDER = "XLA computations are not built by hand; write the op with PyTorch's own, or as a torch.library.custom_op"
STABLEHLO = "graphs are not exported as StableHLO; ltc_core.dump_ir writes them as text, torch.export exports a model"

# Modules of what cannot exist here: why, and what to use instead.
ABSENT: dict[str, str] = {
    "lazy_tensor_core.core.lazy_builder": _BUILDER,
    "torch_xla.core.xla_builder": _BUILDER,
    "torch_xla.core.xla_op_registry": _BUILDER,
    "torch_xla.distributed.fsdp": _FSDP,
    "torch_xla.distributed.spmd": _SPMD,
    "torch_xla.distributed.xla_dist": _XRT,
    "torch_xla.experimental.xla_sharding": _SPMD,
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": _SPMD,
    "torch_xla.experimental.distributed_checkpoint": _DCP,
    "torch_xla.experimental.custom_kernel": _PALLAS,
    "torch_xla.experimental.pallas_kernels": _PALLAS,
    "torch_xla.stablehlo": STABLEHLO,
    "torch_xla.tf_saved_model_integration": STABLEHLO,
}
