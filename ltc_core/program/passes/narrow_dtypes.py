"""Storage dtypes: float32 and float64 stored and computed in a narrower dtype, as LTC_USE_BF16 or the hardware asks.

Tensors still report their PyTorch dtype; only executors see the stored one. `StorageTypes` maps dtypes, rewrites the
dtypes in nodes' arguments, and runs an op that has no kernel for the narrow dtype in float32. Used by `reference` and
`executors.device_program`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ltc_core.graph.arguments import leaves, map_leaves
from ltc_core.graph.ir import Graph, Node, TensorMeta
from ltc_core.settings import settings

__all__ = ["StorageTypes"]

_BITS = torch.ops.aten.view.dtype


class StorageTypes:
    """Map of dtypes: reported -> stored.

    Source: the documents of torch_xla on XLA_USE_BF16 (float32, float64 -> bfloat16) and XLA_DOWNCAST_BF16
    (float32 -> bfloat16, float64 -> float32).
    """

    def __init__(self, stored: dict[torch.dtype, torch.dtype]) -> None:
        self.stored = stored

    @classmethod
    def from_settings(cls) -> StorageTypes | None:
        """Map that the settings ask for; None if tensors are stored in the dtype they report."""
        if settings.use_bf16:
            return cls({torch.float32: torch.bfloat16, torch.float64: torch.bfloat16})
        if settings.downcast_bf16:
            return cls({torch.float32: torch.bfloat16, torch.float64: torch.float32})
        return None

    @classmethod
    def for_xla(cls) -> StorageTypes:
        """Map for XLA: float64 is float32 (a TPU has no float64) unless the settings ask for less.

        All complex dtypes are complex64, the only one that XLA has on all devices.
        """
        asked = cls.from_settings()
        stored = {
            torch.float64: torch.float32,
            torch.complex128: torch.complex64,
            torch.complex32: torch.complex64,
        }
        return cls({**stored, **(asked.stored if asked is not None else {})})

    def of(self, dtype: torch.dtype) -> torch.dtype:
        return self.stored.get(dtype, dtype)

    def rewrite_all(self, graph: Graph) -> Graph:
        """The graph with stored dtypes in arguments, metas and inputs, for an executor with kernels for all of them."""
        graph = self.rewrite(graph)
        nodes = (
            dataclasses.replace(node, outs=tuple(map(self._meta, node.outs)))
            for node in graph.nodes
        )
        inputs = {i: self.stored_meta(meta) for i, meta in graph.inputs.items()}
        return dataclasses.replace(graph, nodes=tuple(nodes), inputs=inputs)

    def stored_meta(self, meta: TensorMeta) -> TensorMeta:
        dtype = self.of(meta.dtype)
        if dtype is meta.dtype:
            return meta
        return TensorMeta.of(meta.size, meta.stride, meta.offset, dtype)

    def _meta(self, meta: TensorMeta | None) -> TensorMeta | None:
        return None if meta is None else self.stored_meta(meta)

    def rewrite(self, graph: Graph) -> Graph:
        """The graph with stored dtypes in the arguments of its nodes."""
        return dataclasses.replace(graph, nodes=tuple(self._rewrite(node) for node in graph.nodes))

    def _rewrite(self, node: Node) -> Node:
        if node.op is _BITS:
            return node
        return dataclasses.replace(
            node,
            args=tuple(self._map(a) for a in node.args),
            kwargs={k: self._map(v) for k, v in node.kwargs.items()},
        )

    def _map(self, item: Any) -> Any:
        return self.stored.get(item, item) if type(item) is torch.dtype else item

    def call(
        self,
        op: torch._ops.OpOverload,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The result of `call`, which calls an op: in float32 if it has no kernel for the stored dtype."""
        if op is _BITS:
            return self.view_bits(call, *args, **kwargs)
        try:
            return call(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            wide = _Wide()
            if not any(wide.is_narrow(a) for a in (*args, *kwargs.values())):
                raise
            widened = {k: wide.widen(v) for k, v in kwargs.items()}
            return wide.narrow(call(*map(wide.widen, args), **widened))

    def view_bits(self, call: Callable[..., Any], t: torch.Tensor, dtype: torch.dtype) -> Any:
        """`view.dtype` on the bits of the reported dtype, which differ from the stored ones."""
        reported = {stored: dtype for dtype, stored in reversed(self.stored.items())}
        bits = call(t.to(reported.get(t.dtype, t.dtype)), dtype)
        return bits.to(self.of(dtype))


class _Wide:
    """One call in float32: bfloat16 operands are widened to copies, and written copies are copied back."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_narrow(self, item: Any) -> bool:
        return any(isinstance(i, torch.Tensor) and i.dtype is torch.bfloat16 for i in leaves(item))

    def widen(self, item: Any) -> Any:
        return map_leaves(self._widened, item)

    def _widened(self, item: Any) -> Any:
        if item is torch.bfloat16:
            return torch.float32
        if not self.is_narrow(item):
            return item
        for narrow, wide in self._copies:
            if narrow is item:
                return wide
        wide = item.float()
        self._copies.append((item, wide))
        return wide

    def narrow(self, result: Any) -> Any:
        for narrow, wide in self._copies:
            if wide.dtype is torch.float32 and wide._version:
                narrow.copy_(wide)
        return map_leaves(self._narrowed, result)

    def _narrowed(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            for narrow, wide in self._copies:
                if wide is item:
                    return narrow
            return item.bfloat16() if item.dtype is torch.float32 else item
        return item
