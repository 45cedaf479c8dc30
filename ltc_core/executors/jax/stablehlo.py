"""StableHLO of a function of PyTorch: traced as an FX graph of core ops, and lowered by the rules of this executor.

`portable` returns the portable bytecode, which other programs read. `Compiled` runs such bytecode. Used by
`ltc_core.export`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax import export
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from torch._subclasses.fake_tensor import FakeTensorMode

from ltc_core.executors.jax.arrays import as_array, as_tensor
from ltc_core.executors.jax.launch import OPTIONS
from ltc_core.executors.jax.library import any_device, wide_types
from ltc_core.executors.jax.lowering import LOWERING, run_graph
from ltc_core.executors.jax.table import dtype_of
from ltc_core.program.lowering.decompositions import FOR_XLA
from ltc_core.program.lowering.functional import trace
from ltc_core.program.scalar_inputs import WHOLE_RULES

__all__ = ["Compiled", "portable", "text_of"]

Tensor = torch.Tensor


def portable(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> bytes:
    """Portable bytecode of a function of tensors, for inputs of these sizes and dtypes.

    Raises:
        NotImplementedError: an op has no rule.
        Exception: whatever tracing the function raises.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty(t.shape, dtype=t.dtype) for t in inputs]
    module = trace(function, fakes, mode, _decompositions())
    given = [jax.ShapeDtypeStruct(tuple(t.shape), dtype_of(t.dtype)) for t in inputs]

    def forward(*arrays: Any) -> list[Any]:
        return run_graph(module, arrays)

    with wide_types():
        found = export.export(
            jax.jit(forward, keep_unused=True), platforms=[any_device().platform]
        )(*given)
    return bytes(found.mlir_module_serialized)


def _decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """How the ops of a forward pass without a rule are decomposed."""
    aten = torch.ops.aten
    ops = {getattr(aten, name).default: rule for name, rule in FOR_XLA.items()}
    fused = {
        op: _single(rule) if len(op._schema.returns) == 1 else rule for op, rule in ops.items()
    }
    whole = WHOLE_RULES["native_batch_norm"]  # its last results are new running statistics
    norm = {aten.native_batch_norm.default: lambda *args: tuple(whole(*args)[:3])}
    return {**LOWERING.nodes.decompositions, **fused, **norm}


def _single(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: rule(*args, **kwargs)[0]


def text_of(bytecode: bytes) -> str:
    """StableHLO as text."""
    context = ir.Context()
    stablehlo.register_dialect(context)
    with context:
        return str(stablehlo.deserialize_portable_artifact(context, bytecode))


class Compiled:
    """A program of StableHLO, compiled for a device of this process.

    Args:
        bytecode: what `portable` returned.
        fixed: its first inputs, which stay on the device.
    """

    def __init__(self, bytecode: bytes, fixed: Sequence[Tensor]) -> None:
        self._device = any_device()
        options = xla_client.CompileOptions()
        options.env_option_overrides = list(OPTIONS.get(self._device.platform, {}).items())
        self._program = self._device.client.compile_and_load(
            bytecode, xla_client.DeviceList((self._device,)), options
        )
        self._fixed = self._send(fixed)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Its results as CPU tensors, from the other inputs."""
        return [
            as_tensor(found) for found in self._program.execute([*self._fixed, *self._send(inputs)])
        ]

    def _send(self, tensors: Sequence[Tensor]) -> list[Any]:
        with wide_types():
            return jax.device_put([as_array(t) for t in tensors], self._device)  # type: ignore[no-any-return]
