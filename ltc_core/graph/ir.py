"""The IR: a `Graph` is made by one cut of the recorded program.

A `Graph` is a list of `Node`s in recorded order. It is functional: a node maps values to values, and each value is
defined once and named by a small integer. An in-place ATen op stays in place: for each operand it writes
(`Node.writes`) it reads an old value and defines a new one, and an executor may reuse the memory if the old value dies
there. A write through a view has a lens: the view steps from the whole tensor to the written part.
Made from `record.trace`; goes to `passes`, `compile` and the executors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ltc_core.graph.arguments import leaves
from ltc_core.graph.lens import Lens, ViewStep

__all__ = [
    "Graph",
    "Lens",
    "Node",
    "Ref",
    "Scalar",
    "TensorMeta",
    "ViewStep",
    "Write",
    "references",
]


class TensorMeta:
    """Size, stride, storage offset and dtype of a tensor, interned: equal metas are the same object.

    Strides are those of eager PyTorch, so that `reshape` and `contiguous` copy or alias as in eager.
    """

    __slots__ = (
        "_maker", "_wrapper", "contiguous", "dtype", "nbytes", "numel", "offset", "size", "stride",
    )  # fmt: skip
    _interned: dict[tuple[Any, ...], TensorMeta] = {}

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    numel: int
    nbytes: int
    contiguous: bool
    _wrapper: tuple[Any, ...]
    _maker: Any  # set and read by `record/csrc/tensors.h`

    @classmethod
    def of(
        cls, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> TensorMeta:
        key = (tuple(size), tuple(stride), offset, dtype)
        meta = cls._interned.get(key)
        if meta is None:
            meta = cls()
            meta.size, meta.stride, meta.offset, meta.dtype = (
                torch.Size(key[0]),
                key[1],
                offset,
                dtype,
            )
            meta.numel = meta.size.numel()
            meta.nbytes = meta.numel * dtype.itemsize
            meta.contiguous = meta.stride == contiguous_stride(meta.size)
            meta._wrapper = (None,)
            cls._interned[key] = meta
        return meta

    @classmethod
    def like(cls, tensor: torch.Tensor) -> TensorMeta:
        return cls.of(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @classmethod
    def packed(cls, size: Sequence[int], dtype: torch.dtype) -> TensorMeta:
        return cls.of(size, contiguous_stride(size), 0, dtype)

    @property
    def dense(self) -> bool:
        """Whether the elements fill their memory without gaps and without overlap, in any order."""
        step = 1
        for stride, n in sorted(zip(self.stride, self.size, strict=True)):
            if n == 1:
                continue
            if stride != step:
                return False
            step *= n
        return True

    @property
    def overlaps(self) -> bool:
        """Whether several elements have the same address, as in an expanded tensor."""
        return any(s == 0 and n > 1 for n, s in zip(self.size, self.stride, strict=True))

    def with_strides(self, stride: Sequence[int]) -> TensorMeta:
        """This meta with other strides; the same object if they lead to the same addresses."""
        if self._has_strides(tuple(stride)):
            return self
        return TensorMeta.of(self.size, stride, self.offset, self.dtype)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` if it has this dtype and these strides, else a copy that has them.

        A tensor with the conjugate, negative or zero-tensor bit is copied, so that its memory holds its values.
        """
        is_plain = not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
        if is_plain and tensor.dtype is self.dtype and self._has_strides(tensor.stride()):
            return tensor
        copy = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=tensor.device)
        return copy.copy_(tensor.detach())

    def _has_strides(self, stride: tuple[int, ...]) -> bool:
        """Whether these strides lead to the same addresses."""
        if stride == self.stride or not self.numel:
            return True
        rows = zip(self.size, self.stride, stride, strict=True)
        return all(n == 1 or wanted == got for n, wanted, got in rows)

    def meta_tensor(self) -> torch.Tensor:
        """Make a tensor on the device `meta` with this size, stride, offset and dtype."""
        if not self.offset:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        span = (
            self.offset + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        )
        base = torch.empty(max(span, self.offset), dtype=self.dtype, device="meta")
        return base.as_strided(self.size, self.stride, self.offset)

    def wrapper_arguments(self, device: torch.device) -> tuple[Any, ...]:
        """Arguments of `_make_wrapper_subclass` after the class, cached for the last device.

        Strides and offset are passed only if they are not the default: 640 instead of 860 ns a tensor
        (`timeit` of the call alone, torch 2.13).
        """
        known = self._wrapper
        if known[-1] is device:
            return known
        stride, offset = (
            (None, None) if self.contiguous and not self.offset else (self.stride, self.offset)
        )
        self._wrapper = (self.size, stride, offset, None, self.dtype, torch.strided, device)
        return self._wrapper

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"

    def __repr__(self) -> str:
        return f"TensorMeta({self})"


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a packed row-major tensor of `size`."""
    strides: list[int] = []
    step = 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class Ref(int):
    """Stands in a node's arguments for the value with this number."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{int(self)}"


class Scalar(int):
    """Stands in a node's arguments for the scalar at this position of the run's scalars."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"${int(self)}"


class Write(NamedTuple):
    """Stands in a node's arguments for an operand that the op writes.

    `base` indexes `Node.writes`; `lens` leads from that whole tensor to the part the op sees.
    """

    base: int
    lens: Lens

    def __repr__(self) -> str:
        return f"&{self.base}" + "".join(f".{step}" for step in self.lens)


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One recorded op. `outs` describes the values it defines, numbered from `first`.

    The first values are the op's own results (None where ATen returns an undefined tensor). The last `len(writes)`
    values are the new values of the operands it wrote: value `writes[k]` becomes value `first_write + k`.
    `result` says what the op returns: positions in `outs`, names of written arguments, or lists of these.
    `uses_default_dtype` says that the dtypes of the results depend on torch.get_default_dtype(). `module` is the path
    of the `nn.Module` that called the op, while a report is recorded.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int
    outs: tuple[TensorMeta | None, ...]
    writes: tuple[int, ...] = ()
    view: bool = False
    result: Any = None
    line: str = ""
    uses_default_dtype: bool = False
    module: str = ""
    _reads: tuple[int, ...] | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def first_write(self) -> int:
        return self.first + len(self.outs) - len(self.writes)

    def __str__(self) -> str:
        outs = ", ".join(
            f"%{self.first + i}: {meta}" for i, meta in enumerate(self.outs) if meta is not None
        )
        args = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        wrote = f"  writes {', '.join(f'%{w}' for w in self.writes)}" if self.writes else ""
        return f"{outs} = {self.op}({', '.join(args)}){wrote}"


def references(node: Node) -> tuple[int, ...]:
    """Number of each value that a node reads; the old values of its writes come first.

    Cost: 0.1 us after the first call: each pass over a graph asks.
    """
    if node._reads is None:
        items = leaves(node.args, *node.kwargs.values())
        node._reads = (*node.writes, *(int(item) for item in items if type(item) is Ref))
    return node._reads


@dataclasses.dataclass(slots=True, eq=False)
class Graph:
    """Nodes in order, the inputs they read (number -> meta) and the outputs (numbers).

    `donated` are the inputs that nothing reads after this graph: their memory may be reused. With `dynamic`, it serves
    calls of many sizes: sizes among the arguments are scalars, and each meta is that of one call.
    """

    nodes: tuple[Node, ...]
    inputs: dict[int, TensorMeta]
    outputs: tuple[int, ...]
    donated: frozenset[int] = frozenset()
    dynamic: bool = False

    def metas(self) -> dict[int, TensorMeta]:
        """Map each value's number to its meta."""
        metas = dict(self.inputs)
        for node in self.nodes:
            for i, meta in enumerate(node.outs):
                if meta is not None:
                    metas[node.first + i] = meta
        return metas

    def sized(self, metas: Mapping[int, TensorMeta]) -> Graph:
        """This graph with the metas of another run of it (`dynamic`)."""
        nodes = tuple(
            dataclasses.replace(
                node,
                outs=tuple(metas.get(node.first + k, meta) for k, meta in enumerate(node.outs)),
            )
            for node in self.nodes
        )
        inputs = {number: metas.get(number, meta) for number, meta in self.inputs.items()}
        return dataclasses.replace(self, nodes=nodes, inputs=inputs)

    def __str__(self) -> str:
        return self.text()

    def text(self, lines: bool = True) -> str:
        """The graph as text, one node a line; `lines` appends the user's line that recorded the node."""
        rows = ["# sizes of one run; it serves others, too"] if self.dynamic else []
        rows += [
            f"%{i}: {meta} = input{' (donated)' if i in self.donated else ''}"
            for i, meta in self.inputs.items()
        ]
        for node in self.nodes:
            rows.append(f"{node}  # {node.line}" if lines and node.line else str(node))
        rows.append("return " + ", ".join(f"%{i}" for i in self.outputs))
        return "\n".join(rows)
