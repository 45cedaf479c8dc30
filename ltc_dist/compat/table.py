"""Which modules serve the old import paths.

The folders here are the old packages: `torch_xla.core.xla_model` is torch_xla/core/xla_model.py, `torch._lazy.config`
is torch_lazy/config.py. `ALIASES` has the paths that another module serves, `ABSENT` the paths that only raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["ABSENT", "PALLAS", "PLUGINS", "REPLACEABLE", "SERVED", "TF", "Served"]

# Old package -> its folder.
_FOLDERS = {
    "torch_xla": "torch_xla",
    "lazy_tensor_core": "lazy_tensor_core",
    "torch._lazy": "torch_lazy",
}
_HERE = Path(__file__).parent
_OURS = __name__.rpartition(".")[0]


class Served(NamedTuple):
    """The module that serves an old import path, and which of its names; by default all of `__all__`."""

    module: str
    names: tuple[str, ...] = ()


# Old import path -> one that has a file here, or one of our own modules and its names.
ALIASES: dict[str, str | Served] = {
    "torch_xla.torch_xla": "torch_xla",
    "torch_xla.amp.autocast_mode": "torch_xla.amp",
    "torch_xla.amp.grad_scaler": "torch_xla.amp",
    "torch_xla.amp.syncfree": Served("ltc_core.api.syncfree", ("SGD", "Adam", "AdamW")),
    **{
        f"torch_xla.amp.syncfree.{name.lower()}": Served("ltc_core.api.syncfree", (name,))
        for name in ("Adam", "AdamW", "SGD")
    },
    "torch_xla.core.dynamo_bridge": "torch_xla._dynamo.dynamo_bridge",
    "torch_xla.distributed.parallel_loader": Served("ltc_dist.parallel_loader"),
    "torch_xla.distributed.xla_multiprocessing": Served(
        "ltc_dist.multiprocessing", ("MpModelWrapper", "MpSerialExecutor", "spawn")
    ),
    "torch_xla.distributed.zero_redundancy_optimizer": Served(
        "ltc_dist.train.zero_redundancy_optimizer", ("ZeroRedundancyOptimizer",)
    ),
    "torch_xla.experimental.distributed_checkpoint._helpers": "torch_xla.experimental.distributed_checkpoint",
    "torch_xla.experimental.distributed_checkpoint.manager": "torch_xla.experimental.distributed_checkpoint",
    "torch_xla.experimental.distributed_checkpoint.planners": "torch_xla.experimental.distributed_checkpoint",
    "torch_xla.experimental.distributed_checkpoint.util": "torch_xla.experimental.distributed_checkpoint",
    "torch_xla.experimental.eager": "torch_xla.experimental",
    "torch_xla.experimental.gradient_accumulation": Served(
        "ltc_core.api.loops", ("gradient_accumulation",)
    ),
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": Served(
        "ltc_dist.spmd.fully_sharded", ("SpmdFullyShardedDataParallel",)
    ),
    "torch_xla.distributed.spmd.api": "torch_xla.distributed.spmd",
    "torch_xla.experimental.xla_sharding": "torch_xla.distributed.spmd.xla_sharding",
    "torch_xla.distributed.fsdp.wrap": Served(
        "torch.distributed.fsdp.wrap",
        (
            "always_wrap_policy",
            "lambda_auto_wrap_policy",
            "size_based_auto_wrap_policy",
            "transformer_auto_wrap_policy",
        ),
    ),
    "torch_xla.distributed.fsdp.state_dict_utils": Served(
        "ltc_dist.fully_sharded.consolidate",
        ("consolidate_sharded_model_checkpoints", "consolidate_sharded_state_dicts"),
    ),
    "torch_xla.experimental.pjrt_backend": "torch_xla.distributed.xla_backend",
    "torch_xla.experimental.tpu": "torch_xla._internal.tpu",
    "torch_xla.utils.serialization": Served("ltc_dist.serialization"),
    # its name of 2018 and 2019
    "torch_xla_py": "torch_xla.core",
    "torch_xla_py.data_parallel": "torch_xla.distributed.data_parallel",
    "torch_xla_py.xla_model": "torch_xla.core.xla_model",
    "lazy_tensor_core.amp": "torch_xla.amp",
    "lazy_tensor_core.amp.autocast_mode": "torch_xla.amp",
    "lazy_tensor_core.amp.grad_scaler": "torch_xla.amp",
    "lazy_tensor_core.core.extract_compiled_graph": "torch._lazy.extract_compiled_graph",
    "lazy_tensor_core.core.functions": "torch_xla.core.functions",
    "lazy_tensor_core.debug": "torch_xla.debug",
    "lazy_tensor_core.debug.metrics": "torch_xla.debug.metrics",
    "lazy_tensor_core.debug.metrics_saver": "torch_xla.debug.metrics_saver",
    "lazy_tensor_core.debug.profiler": "torch_xla.debug.profiler",
    "lazy_tensor_core.distributed": "torch_xla.distributed",
    "lazy_tensor_core.distributed.data_parallel": "torch_xla.distributed.data_parallel",
    "lazy_tensor_core.distributed.parallel_loader": Served("ltc_dist.parallel_loader"),
    "lazy_tensor_core.utils": "torch_xla.utils",
    "lazy_tensor_core.utils.closures": "torch_xla.utils.closures",
    "lazy_tensor_core.utils.keyd_queue": "torch_xla.utils.keyd_queue",
    "lazy_tensor_core.utils.serialization": Served("ltc_dist.serialization"),
    "lazy_tensor_core.utils.utils": "torch_xla.utils.utils",
    "torch._lazy.closure": "torch._lazy",
    "torch._lazy.metrics": "torch_xla.debug.metrics",
}


def _with_files() -> Iterator[tuple[str, Served]]:
    for old, folder in _FOLDERS.items():
        for path in sorted((_HERE / folder).rglob("*.py")):
            parts = path.relative_to(_HERE / folder).with_suffix("").parts
            below = "".join(f".{part}" for part in parts if part != "__init__")
            yield f"{old}{below}", Served(f"{_OURS}.{folder}{below}")


def _served() -> dict[str, Served]:
    found = dict(_with_files())
    aliases = {old: found[to] if isinstance(to, str) else to for old, to in ALIASES.items()}
    return {**found, **aliases}


# Old import path -> what serves it.
SERVED: dict[str, Served] = _served()

# Modules whose functions find each other in the served module: a script may replace one of them for all.
REPLACEABLE = frozenset({"torch_xla._internal.tpu", "torch_xla.experimental.tpu"})

PALLAS = "there are no Pallas kernels; use torch.nn.functional.scaled_dot_product_attention"
_XRT = "there are no XRT workers; start the script with ltc-launch --nnodes N on each host, or with torchrun"
_BUILDER = (
    "computations of this package are not built by hand; write the op with PyTorch's own, or with "
    "torch_xla.core.xla_builder"
)

_MARKS = "ops are not marked for XLA's compiler; write the op with PyTorch's own, or as a torch.library.custom_op"
PLUGINS = (
    "devices are not PJRT plugins; choose what the graphs run on with LTC_DEVICE and LTC_EXECUTOR"
)

TF = "nothing is written for TensorFlow; torch_xla.stablehlo.save_as_stablehlo writes a model as StableHLO"

# Modules that cannot exist here -> why, and what to use instead.
ABSENT: dict[str, str] = {
    "lazy_tensor_core.core.lazy_builder": _BUILDER,
    "torch_xla.distributed.xla_dist": _XRT,
    "torch_xla.experimental.pallas_kernels": PALLAS,
    "torch_xla.experimental.plugins": PLUGINS,
    "torch_xla.experimental.splash_attention": PALLAS,
    "torch_xla.experimental.stablehlo_custom_call": _MARKS,
    "torch_xla.tf_saved_model_integration": TF,
}
