"""StableHLO of a function of PyTorch: traced as an FX graph of core ops, and lowered by the rules of this executor.

`portable` returns the portable bytecode, which other programs read. `Compiled` runs such bytecode. `programs` are
those of a recorded graph. Used by `ltc_core.export`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import export
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from torch._subclasses.fake_tensor import FakeTensorMode

from ltc_core.executors.jax.arrays import as_array, as_tensor
from ltc_core.executors.jax.launch import OPTIONS
from ltc_core.executors.jax.library import any_device, wide_types
from ltc_core.executors.jax.lowering import LOWERING, function_of, run_graph
from ltc_core.executors.jax.table import dtype_of
from ltc_core.graph import collective
from ltc_core.graph.ir import Graph
from ltc_core.graph.manual_sharding import Misused
from ltc_core.program.backend import Backend, divide
from ltc_core.program.lowering.decompositions import FOR_XLA
from ltc_core.program.lowering.functional import trace
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.passes.random_keys import NEXT_KEY, with_keys
from ltc_core.program.scalar_inputs import WHOLE_RULES, kinds, vector_metas
from ltc_core.program.subgraph import Subgraph

__all__ = ["Compiled", "Program", "portable", "programs", "text_of"]

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


class _OnDevice(Backend):
    """What this executor compiles, on any device: all but collectives, keys of draws, and ops without a rule."""

    passes = (lambda graph: with_keys(graph, LOWERING.refused_ops),)

    def refuses(self, graph: Graph, scalars: Sequence[Any]) -> dict[int, str]:
        metas = graph.metas()
        return {
            at: "it runs on the host"
            for at, node in enumerate(graph.nodes)
            if node.op is NEXT_KEY or node.op in collective.OPS or LOWERING.refuses(node, metas)
        }


class Program:
    """One program of a recorded graph. Its inputs are tensors; the numbers that ops were given are constants."""

    def __init__(self, subgraph: Subgraph, scalars: Sequence[Any]) -> None:
        run = function_of(subgraph, ())
        types = subgraph.scalar_types
        own = [(scalars[i], of) for i, of in zip(subgraph.scalars, types, strict=True)]
        vectors = [
            np.array([number for number, of in own if of is kind], dtype_of(meta.dtype))
            for kind, meta in zip(kinds(types), vector_metas(types), strict=True)
        ]

        def graph(*inputs: Any) -> list[Any]:
            return run(*inputs, *vectors)

        with wide_types():
            self._given = [
                jax.ShapeDtypeStruct(tuple(meta.size), dtype_of(meta.dtype))
                for meta in subgraph.graph.inputs.values()
            ]
            self._function = jax.jit(graph, keep_unused=True)
            self._lowered = self._function.lower(*self._given)

    def text(self) -> str:
        return str(self._lowered.as_text())

    def hlo(self) -> str:
        return str(self._lowered.as_text(dialect="hlo"))

    def bytecode(self) -> bytes:
        """Portable bytecode."""
        with wide_types():
            platform = any_device().platform
            found = export.export(self._function, platforms=[platform])(*self._given)
        return bytes(found.mlir_module_serialized)


def programs(graph: Graph, scalars: Sequence[Any]) -> list[Program]:
    """The programs of a graph, in the order in which they would run. Nothing is compiled.

    Args:
        scalars: the numbers that its ops were given.
    """
    backend = _OnDevice()
    while True:
        _, subgraphs = divide(graph, backend, scalars, frozenset())
        try:
            return [Program(each, scalars) for each in subgraphs if each.compiled]
        except Refused:  # its ops are known now, and run on the host
            continue
        except Misused as found:
            raise found.error from None


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
