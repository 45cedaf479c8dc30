"""StableHLO of a function of PyTorch: traced as an FX graph of core ops, and lowered by the rules of this executor.

`portable` returns the portable bytecode, which other programs read. `Compiled` runs such bytecode. `programs` are
those of a recorded graph. Used by `ltc_core.export`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import export
from jax.extend.mlir import refine_polymorphic_shapes
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from ltc_core.executors.jax.arrays import as_array, as_tensor
from ltc_core.executors.jax.composites import call_functions, locate, outline, text_with_names
from ltc_core.executors.jax.free_sizes import FixedSizeError, Sizes, of_each
from ltc_core.executors.jax.launch import OPTIONS
from ltc_core.executors.jax.library import any_device, wide_types
from ltc_core.executors.jax.lowering import LOWERING, function_of, run_graph
from ltc_core.executors.jax.mesh import is_divided, whole_on_mesh
from ltc_core.executors.jax.rules.composite import TARGET, kept_marks
from ltc_core.executors.jax.splats import fold
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

__all__ = ["Compiled", "FixedSizeError", "Program", "portable", "programs", "text_of"]

Tensor = torch.Tensor


def portable(
    function: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    shapes: Sequence[Sequence[int | str]],
    has_no_branches: bool,
) -> tuple[bytes, list[tuple[int | str, ...]]]:
    """Portable bytecode of a function of tensors, for inputs of these dtypes; and the shapes of its results.

    Args:
        shapes: of each input, with names for the sizes that are free.
        has_no_branches: whether the function is a graph, so that its way cannot depend on sizes.

    Raises:
        FixedSizeError: the function depends on a size that is to be free.
        NotImplementedError: an op has no rule.
        Exception: whatever tracing the function raises.
    """
    examples = {
        name: size
        for t, shape in zip(inputs, shapes, strict=True)
        for size, name in zip(t.shape, shape, strict=True)
        if isinstance(name, str)
    }
    sizes = Sizes(examples)
    with sizes.mode:
        fakes = [
            torch.empty(sizes.in_torch(shape), dtype=t.dtype)
            for t, shape in zip(inputs, shapes, strict=True)
        ]
    module = trace(function, fakes, sizes.mode, _decompositions())
    fixed = sizes.fixed(has_no_branches)
    if fixed:
        raise FixedSizeError("; ".join(fixed))
    given = [
        jax.ShapeDtypeStruct(sizes.in_jax(shape), dtype_of(t.dtype))
        for t, shape in zip(inputs, shapes, strict=True)
    ]

    def forward(*arrays: Any) -> list[Any]:
        return run_graph(module, arrays, sizes if examples else None)

    found = _exported(jax.jit(forward, keep_unused=True), given)
    results = [
        tuple(n if isinstance(n, int) else str(n) for n in one.shape) for one in found.out_avals
    ]
    return _bytecode(found), results


def _exported(function: Any, given: Sequence[Any]) -> export.Exported:
    marks = export.DisabledSafetyCheck.custom_call(TARGET)
    with wide_types(), kept_marks():
        return export.export(function, platforms=[any_device().platform], disabled_checks=[marks])(
            *given
        )


def _bytecode(found: export.Exported) -> bytes:
    """Portable bytecode, with composites in place of their marks, names of ops, and constants of whole shapes."""
    written = bytes(found.mlir_module_serialized)
    context = ir.Context()
    stablehlo.register_dialect(context)
    with context:
        module = stablehlo.deserialize_portable_artifact(context, written)
        locate(module)
        if TARGET.encode() in written:
            outline(module)
        fold(module)
        version = stablehlo.get_current_version()
        return bytes(stablehlo.serialize_portable_artifact(module, version))


def _decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """How the ops of a forward pass without a rule are decomposed."""
    aten = torch.ops.aten
    ops = {getattr(aten, name).default: rule for name, rule in FOR_XLA.items()}
    fused = {
        op: _single(rule) if len(op._schema.returns) == 1 else rule for op, rule in ops.items()
    }
    whole = WHOLE_RULES["native_batch_norm"]  # its last results are new running statistics
    norm = {aten.native_batch_norm.default: lambda *args: tuple(whole(*args)[:3])}
    dropout = {aten.native_dropout.default: _dropout}
    return {**LOWERING.nodes.decompositions, **fused, **norm, **dropout}


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """PyTorch's decomposition, which takes None for False; its kernels take it for True."""
    rule = LOWERING.nodes.decompositions[torch.ops.aten.native_dropout.default]
    return rule(x, p, train is not False)  # type: ignore[no-any-return]


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
    """One program of a recorded graph. Its inputs are tensors; the numbers that ops were given are constants.

    Args:
        subgraph: its nodes.
        scalars: the numbers that the ops of the graph were given.
        free: number of a value of the graph -> the dims whose sizes are free.

    Attributes:
        inputs: the values of the graph that are its inputs, in order.

    Raises:
        FixedSizeError: an op needs a free size.
    """

    def __init__(
        self, subgraph: Subgraph, scalars: Sequence[Any], free: Mapping[int, Collection[int]]
    ) -> None:
        self.inputs = subgraph.inputs
        run = function_of(subgraph, ())
        types = subgraph.scalar_types
        own = [(scalars[i], of) for i, of in zip(subgraph.scalars, types, strict=True)]
        vectors = [
            np.array([number for number, of in own if of is kind], dtype_of(meta.dtype))
            for kind, meta in zip(kinds(types), vector_metas(types), strict=True)
        ]

        def graph(*inputs: Any) -> list[Any]:
            return run(*inputs, *vectors)

        metas = list(subgraph.graph.inputs.values())
        own_free = {k: free[i] for k, i in enumerate(subgraph.inputs) if i in free}
        shapes = of_each([tuple(meta.size) for meta in metas], own_free)
        self.has_free_sizes = bool(own_free)
        with wide_types(), kept_marks():
            self._given = [
                jax.ShapeDtypeStruct(shape, dtype_of(meta.dtype))
                for shape, meta in zip(shapes, metas, strict=True)
            ]
            self._function = jax.jit(graph, keep_unused=True)
            if self.has_free_sizes:  # such programs are only exported
                self._exported = _exported(self._function, self._given)
            else:
                self._lowered = self._function.lower(*self._given)

    def text(self) -> str:
        if self.has_free_sizes:
            return text_of(self.bytecode())
        text = str(self._lowered.as_text())
        if TARGET not in text:
            return text
        module = self._lowered.compiler_ir("stablehlo").operation.clone()
        locate(module)
        outline(module)
        return text_with_names(module)

    def hlo(self) -> str:
        """HLO, most often with the types of operands, instructions named after their opcodes, parameters p0, p1."""
        return _hlo_text(self.text()) or str(self._lowered.as_text(dialect="hlo"))

    def bytecode(self) -> bytes:
        """Portable bytecode."""
        if self.has_free_sizes:
            return _bytecode(self._exported)
        return _bytecode(_exported(self._function, self._given))

    def optimized_hlo(self, inputs: Mapping[int, Any]) -> str:
        """HLO after XLA has optimised it, for inputs that lie as these data do. Cost: compiles the program.

        Args:
            inputs: value of the graph -> its data; one that is not there lies as a program makes it.
        """
        divided = [
            data.sharding if isinstance(data, jax.Array) and is_divided(data) else None
            for data in map(inputs.get, self.inputs)
        ]
        whole = whole_on_mesh() if any(divided) else None
        given = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=at or whole)
            for one, at in zip(self._given, divided, strict=True)
        ]
        with wide_types(), kept_marks():
            return str(self._function.lower(*given).compile().as_text())

    def hlo_bytes(self, name: str) -> bytes:
        """HLO of this name, as the bytes of its protocol buffer; its results are one tuple."""
        module = self._lowered.compiler_ir("stablehlo").operation.clone()
        with module.context:
            module.attributes["sym_name"] = ir.StringAttr.get(name)
        return bytes(_computation(str(module)).as_serialized_hlo_module_proto())


def _hlo_text(text: str) -> str:
    """HLO of a module of StableHLO without locations, which would name the instructions; its results are one tuple.

    '' where jaxlib has no options for HLO's text: they are not part of its interface.
    """
    try:
        from jaxlib import _hlo
    except ImportError:
        return ""
    options = _hlo.HloPrintOptions()
    options.print_metadata = False
    options.print_operand_shape = options.print_percent = options.print_program_shape = True
    found = str(_computation(text).get_hlo_module().to_string(options))
    return re.sub(r"\bArg_(\d+)\.", r"p\1.", found)


def _computation(text: str) -> Any:
    """A module of StableHLO as XLA's computation, whose results are one tuple."""
    return xla_client._xla.mlir.mlir_module_to_xla_computation(
        text, use_tuple_args=False, return_tuple=True
    )


def programs(
    graph: Graph, scalars: Sequence[Any], free: Mapping[int, Collection[int]]
) -> list[Program]:
    """The programs of a graph, in the order in which they would run. Nothing is compiled.

    Args:
        scalars: the numbers that its ops were given.
        free: number of an input of the graph -> the dims whose sizes are free.

    Raises:
        FixedSizeError: an op needs a free size.
    """
    backend = _OnDevice()
    while True:
        _, subgraphs = divide(graph, backend, scalars, frozenset())
        try:
            return [Program(each, scalars, free) for each in subgraphs if each.compiled]
        except Refused:  # its ops are known now, and run on the host
            continue
        except Misused as found:
            raise found.error from None


def text_of(bytecode: bytes) -> str:
    """StableHLO as text."""
    context = ir.Context()
    stablehlo.register_dialect(context)
    with context:
        return text_with_names(stablehlo.deserialize_portable_artifact(context, bytecode))


class Compiled:
    """A program of StableHLO, compiled for a device of this process.

    Args:
        bytecode: what `portable` returned. One with free sizes is compiled for each set of sizes.
        fixed: its first inputs, which stay on the device.
        is_free: whether it has free sizes.
    """

    def __init__(self, bytecode: bytes, fixed: Sequence[Tensor], is_free: bool = False) -> None:
        self._device = any_device()
        self._bytecode = bytecode
        self._is_free = is_free
        self._programs: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._fixed = self._send(fixed)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Its results as CPU tensors, from the other inputs."""
        shapes = tuple(tuple(t.shape) for t in inputs)
        if shapes not in self._programs:
            self._programs[shapes] = self._compiled(shapes)
        found = self._programs[shapes].execute([*self._fixed, *self._send(inputs)])
        return [as_tensor(array) for array in found]

    def _compiled(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        options = xla_client.CompileOptions()
        options.env_option_overrides = list(OPTIONS.get(self._device.platform, {}).items())
        whole = [*(tuple(x.shape) for x in self._fixed), *shapes]
        return self._device.client.compile_and_load(
            _of_sizes(self._bytecode, whole) if self._is_free else self._bytecode,
            xla_client.DeviceList((self._device,)),
            options,
        )

    def _send(self, tensors: Sequence[Tensor]) -> list[Any]:
        with wide_types():
            return jax.device_put([as_array(t) for t in tensors], self._device)  # type: ignore[no-any-return]


def _of_sizes(bytecode: bytes, shapes: Sequence[Sequence[int]]) -> bytes:
    """A program with free sizes, for inputs of these shapes: its `main` is called by one of static types."""
    context = ir.Context()
    stablehlo.register_dialect(context)
    with context, ir.Location.unknown():
        module = stablehlo.deserialize_portable_artifact(context, bytecode)
        call_functions(module)
        main = ir.SymbolTable(module.operation)["main"]
        types = main.type
        given = [
            ir.RankedTensorType.get(list(shape), free.element_type)
            for shape, free in zip(shapes, types.inputs, strict=True)
        ]
        ir.SymbolTable(module.operation).set_symbol_name(main, "free_main")
        main.attributes["sym_visibility"] = ir.StringAttr.get("private")
        ks = range(len(given))
        lines = [
            f"%x{k} = stablehlo.convert %arg{k} : ({given[k]}) -> {types.inputs[k]}" for k in ks
        ]
        parameters = ", ".join(f"%arg{k}: {given[k]}" for k in ks)
        operands = ", ".join(f"%x{k}" for k in ks)
        results = ", ".join(map(str, types.results))
        count = len(types.results)
        names = ", ".join(f"%r#{k}" for k in range(count)) if count > 1 else "%r"
        lines += [
            f"%r:{count} = func.call @free_main({operands}) : "
            f"({', '.join(map(str, types.inputs))}) -> ({results})",
            f"func.return {names} : {results}",
        ]
        text = str(module).rstrip().removesuffix("}")
        body = "\n".join(lines)
        whole = ir.Module.parse(
            f"{text}\nfunc.func public @main({parameters}) -> ({results}) {{\n{body}\n}}\n}}"
        )
        written = io.BytesIO()
        whole.operation.write_bytecode(written)
    return bytes(refine_polymorphic_shapes(written.getvalue()))
