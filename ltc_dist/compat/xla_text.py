"""Pending graphs and shardings as torch_xla writes them: `%0 = f32[4,2]{1,0} xla::device_data(), device=CPU:0`.

In: a `Graph` and the tensors that were asked for, or a marked tensor. Out: text for `_XLAC`; tools search it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from ltc_core.api.sharding import Sharding, num_mesh_devices, parts_of
from ltc_core.api.verbs import pending_graph
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Graph, Node, Scalar, TensorMeta, references
from ltc_core.graph.sharding import SHARD
from ltc_core.settings import settings
from ltc_core.tensor.handles import Cell
from ltc_core.tensor.lazy_tensor import LazyTensor
from ltc_dist.spmd import is_manual, sharding_of

__all__ = [
    "KINDS",
    "division_of",
    "graph_text",
    "op_text",
    "shape_text",
    "sharding_text",
    "tiles_of",
    "values_text",
]

# XLA's names of dtypes.
KINDS = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.bool: "pred",
    torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64", torch.int8: "s8",
    torch.int16: "s16", torch.int32: "s32", torch.int64: "s64", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def shape_text(meta: TensorMeta | torch.Tensor) -> str:
    """A shape without its layout: 'f32[4,2]'."""
    size = meta.size if isinstance(meta, TensorMeta) else meta.shape
    kind = KINDS.get(meta.dtype) or str(meta.dtype).removeprefix("torch.")
    return f"{kind}[{','.join(map(str, size))}]"


def graph_text(graph: Graph, ready: Mapping[int, torch.Tensor], device: str) -> str:
    """The numbers that ops were given, then inputs and nodes, in the order in which they were recorded.

    Args:
        ready: those of the tensors that have values: no node of the graph makes them. The others are its outputs.
        device: where the inputs are, as 'CPU:0'.
    """
    roots = [k for k in range(len(graph.outputs) + len(ready)) if k not in ready]
    root_of = {number: f", ROOT={k}" for number, k in zip(graph.outputs, roots, strict=True)}
    rows: list[str] = []
    shown: dict[int, str] = {}
    reads = {number for node in graph.nodes for number in references(node)} | set(graph.outputs)
    data = f"xla::device_data(), device={device}"
    metas = graph.metas()
    constants: dict[int, list[str]] = {}
    for node in graph.nodes:
        for _ in _scalars(node):
            constants.setdefault(node.first, []).append(f"%{len(rows)}")
            rows.append(f"{_scalar_kind(node, metas)}[] prim::Constant()")
    for number, meta in graph.inputs.items():
        if number in reads:
            shown[number] = f"%{len(rows)}"
            rows.append(f"{_shaped(meta)} {data}{root_of.get(number, '')}")
    rows += [f"{shape_text(t)}{_layout(t.dim())} {data}, ROOT={k}" for k, t in ready.items()]
    for node in graph.nodes:
        outs = {node.first + k: meta for k, meta in enumerate(node.outs) if meta is not None}
        here = f"%{len(rows)}"
        shown |= {n: here if len(outs) == 1 else f"{here}.{k}" for k, n in enumerate(outs)}
        name = _name(node)
        tensors = (shown[number] for number in references(node))
        operands = ", ".join([*tensors, *constants.get(node.first, ())])
        root = "".join(root_of.get(number, "") for number in outs)
        rows.append(f"{_results(outs)} {name}({operands}){root}")
    return "\n".join(["IR {", *(f"  %{k} = {row}" for k, row in enumerate(rows)), "}", ""])


def _scalars(node: Node) -> list[Scalar]:
    return [item for item in leaves(node.args, *node.kwargs.values()) if type(item) is Scalar]


def _scalar_kind(node: Node, metas: Mapping[int, TensorMeta]) -> str:
    """XLA's name of the dtype of an op's numbers: that of its first tensor, for a factory that of the result."""
    found = [metas[number] for number in references(node)] + [m for m in node.outs if m is not None]
    return KINDS.get(found[0].dtype, "f32") if found else "f32"


def values_text(tensors: Sequence[torch.Tensor]) -> str:
    """HLO of a program that returns tensors which have their values: its parameters, and how each is divided."""
    shapes = [_shaped(t) for t in tensors]
    kinds = [shape_text(t) for t in tensors]
    result = f"({', '.join(shapes)})"
    rows = []
    for k, t in enumerate(tensors):
        division = sharding_text(t)
        sharding = f", sharding={division}" if division else ""
        rows.append(f"  %p{k}.1 = {shapes[k]} parameter({k}){sharding}")
    given = ", ".join(f"p{k}.1: {kind}" for k, kind in enumerate(kinds))
    names = ", ".join(f"{shape} %p{k}.1" for k, shape in enumerate(shapes))
    return "\n".join(
        [
            f"HloModule values, entry_computation_layout={{{result}->{result}}}",
            "",
            f"ENTRY %values.1 ({given}) -> ({', '.join(kinds)}) {{",
            *rows,
            f"  ROOT %tuple.1 = {result} tuple({names})",
            "}",
            "",
        ]
    )


def op_text(node: Node) -> str:
    """An op by itself, as torch_xla writes it in errors."""
    outs = {k: meta for k, meta in enumerate(node.outs) if meta is not None}
    return f"{_name(node)}, xla_shape={_results(outs)}, dynamic_dims: ()"


def _name(node: Node) -> str:
    return str(node.op).replace(".", "::", 1).partition(".")[0]


def _results(outs: Mapping[int, TensorMeta]) -> str:
    shapes = [_shaped(meta) for meta in outs.values()]
    return shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"


def _shaped(meta: TensorMeta | torch.Tensor) -> str:
    num_dims = len(meta.size) if isinstance(meta, TensorMeta) else meta.dim()
    return f"{shape_text(meta)}{_layout(num_dims)}"


def _layout(num_dims: int) -> str:
    return f"{{{','.join(map(str, reversed(range(num_dims))))}}}" if num_dims else ""


def sharding_text(t: torch.Tensor) -> str:
    """How a tensor is divided, such as '{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}'; '' if nobody knows.

    A tensor that was not marked itself is shown as `division_of` finds it; with `use_spmd` what a program has computed
    and not divided is '{replicated}'.
    """
    if is_manual(t):
        return "{manual}"
    found = sharding_of(t)
    sharding = found[0].sharding(found[1]) if found is not None else division_of(t)
    if sharding is None:
        return "{replicated}" if _is_computed_for_all(t) else ""
    shape, devices = tiles_of(sharding)
    if math.prod(shape[: t.ndim]) == 1:
        return "{replicated}"
    numbers = ",".join(map(str, devices))
    copies = " last_tile_dim_replicate" if len(shape) > t.ndim else ""
    return f"{{devices=[{','.join(map(str, shape))}]{numbers}{copies}}}"


def _is_computed_for_all(t: torch.Tensor) -> bool:
    """Whether a program of all devices has computed the tensor's memory."""
    if not settings.peek("spmd") or not isinstance(t, LazyTensor) or type(t._h) is not Cell:
        return False
    buffer = t._h.value.buffer
    return buffer is not None and buffer.error is None and not buffer.is_given


def tiles_of(sharding: Sharding) -> tuple[list[int], list[int]]:
    """Parts of each dimension, then the number of copies if it is not one; and the devices in that order."""
    tiles = [sharding.parts(dim) for dim in range(len(sharding.spec))]
    dividing = list(chain(*sharding.spec))
    copying = [axis for axis in range(len(sharding.mesh)) if axis not in dividing]
    devices = torch.tensor(sharding.devices).reshape(sharding.mesh).permute(*dividing, *copying)
    copies = math.prod(sharding.mesh[axis] for axis in copying)
    return tiles if copies == 1 else [*tiles, copies], devices.flatten().tolist()


def division_of(t: torch.Tensor) -> Sharding | None:
    """How the memory of a tensor is divided, or will be as its last recorded op says; None if no op says so.

    Nothing is run; a value that is being computed is waited for.
    """
    if not isinstance(t, LazyTensor) or type(t._h) is not Cell:
        return None
    graph = pending_graph([t])
    made = {node.first: node for node in graph.nodes}
    if graph.outputs:
        node = made.get(graph.outputs[0])
        if node is not None and node.op is torch.ops.aten.copy_.default:
            node = made.get(int(node.args[1]))
        return Sharding.of(node.args[1]) if node is not None and node.op is SHARD else None
    parts = parts_of(t) if num_mesh_devices(t.device) > 1 else []
    starts = [sorted({part.offsets[dim] for part in parts}) for dim in range(t.ndim)]
    tiles = list(map(len, starts))
    count = math.prod(tiles)
    if count <= 1 or len(parts) != num_mesh_devices(t.device):
        return None
    devices = [part.device for part in sorted(parts, key=lambda part: (part.offsets, part.device))]
    spec = tuple((dim,) for dim in range(t.ndim))
    return Sharding(tuple(devices), (*tiles, len(parts) // count), spec)
