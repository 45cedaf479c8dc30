"""Functions of a script as bodies of loops: traced once, on fake tensors, into FX graphs that an op names.

What a function uses beside its arguments, such as weights, is found by a first call, and each iteration gets all of it.
Called by `pure_scan` and `pure_while`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ltc_core.graph.loop import add_body
from ltc_core.program.index_checks import INDEXED_OPS
from ltc_core.program.lowering.functional import trace
from ltc_core.program.lowering.retrace import Refused
from ltc_core.runtime.devices import contexts
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["BodyTracer", "NoLoop", "Structure", "WritesOutside", "refuse_ops"]

Tensor = torch.Tensor


class NoLoop(Exception):
    """A function cannot be the body of a loop; the text says why."""


class WritesOutside(NoLoop):
    """A function writes to a tensor that it uses beside its arguments."""


class Structure:
    """A structure of tensors and None, and where in it the tensors are."""

    def __init__(self, found: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(found)
        self.tensors: list[Tensor] = [leaf for leaf in leaves if leaf is not None]
        self._is_there = [leaf is not None for leaf in leaves]
        if not all(isinstance(leaf, Tensor) for leaf in self.tensors):
            raise NoLoop("it takes or returns something that is no tensor")

    def filled(self, tensors: Sequence[Tensor | None]) -> Any:
        """The structure with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if is_there else None for is_there in self._is_there]
        return pytree.tree_unflatten(leaves, self._spec)

    def picked(self, found: Any) -> list[Any]:
        """The leaves of a structure like this one, or None, at the places of the tensors."""
        leaves = pytree.tree_leaves(found)
        return [t for t, is_there in zip(leaves, self._is_there, strict=True) if is_there]

    @property
    def key(self) -> tuple[Any, ...]:
        kinds = ((t.shape, t.dtype, t.requires_grad) for t in self.tensors)
        return self._spec, tuple(self._is_there), *kinds


class _Besides(TorchFunctionMode):
    """Lets a function that is traced see fake tensors in place of the device's, and the CPU in place of the device."""

    def __init__(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._replaced, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def _replaced(self, item: Any) -> Any:
        if isinstance(item, LazyTensor):
            return self._stand_in(item)
        if isinstance(item, torch.device) and item.type == settings.device_name:
            return torch.device("cpu")
        return item


class BodyTracer:
    """Traces functions of one loop into bodies, which see the same stand-ins for the same tensors."""

    def __init__(self) -> None:
        for ctx in contexts():  # their workers trace programs, by the same variable of `torch.fx`
            ctx.worker.drain()
        self.mode = FakeTensorMode()
        self._besides: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the tensor, its stand-in

    @property
    def besides(self) -> tuple[Tensor, ...]:
        """What the functions use beside their arguments."""
        return tuple(tensor for tensor, _ in self._besides.values())

    @property
    def stand_ins(self) -> list[Tensor]:
        """The fake tensors of `besides`."""
        return [fake for _, fake in self._besides.values()]

    @property
    def has_written(self) -> bool:
        """Whether a function wrote to one of them."""
        return any(fake._version for fake in self.stand_ins)

    def fake(self, like: Tensor, needs_grad: bool) -> Tensor:
        """A contiguous fake tensor on the CPU."""
        with self.mode, torch.no_grad(), disable_proxy_modes_tracing():  # it is no op of a graph
            return torch.empty(like.shape, dtype=like.dtype).requires_grad_(needs_grad)

    def find(self, run: Callable[[], Any]) -> Any:
        """Call a function for the first time; the tensors that it uses besides are noted."""
        with self.mode:
            return self._called(run, self._found)

    def call(self, run: Callable[[], Any], besides: Sequence[Tensor]) -> Any:
        """Call a function again, with these in the place of the tensors that it uses besides."""
        stand_ins = dict(zip(self._besides, besides, strict=True))

        def known(tensor: Tensor) -> Tensor:
            if id(tensor) not in stand_ins:
                raise NoLoop("each call uses other tensors beside its arguments")
            return stand_ins[id(tensor)]

        return self._called(run, known)

    def _found(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._besides:
            fake = self.fake(tensor, tensor.requires_grad and torch.is_grad_enabled())
            self._besides[id(tensor)] = tensor, fake
        return self._besides[id(tensor)][1]

    @staticmethod
    def _called(run: Callable[[], Any], stand_in: Callable[[Tensor], Tensor]) -> Any:
        try:
            with _Besides(stand_in):
                return run()
        except NoLoop:
            raise
        except Exception as error:  # whatever PyTorch raises for what fake tensors cannot do
            reason = str(error).strip().partition("\n")[0]
            raise NoLoop(f"it cannot be traced ({type(error).__name__}: {reason})") from error

    def body(self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> str:
        """Name of the body of a function of tensors, which are contiguous in each iteration."""
        fakes = [self.fake(t, False) for t in inputs]
        try:
            module = trace(lambda *own: list(run(*own)), fakes, self.mode, {})
        except Refused as refused:
            raise NoLoop(str(refused)) from refused
        refuse_ops(module)
        return add_body(module)


def refuse_ops(module: GraphModule) -> None:
    """Raise `NoLoop` for an op that no loop may have."""
    for node in module.graph.nodes:
        op = node.target
        if not isinstance(op, torch._ops.OpOverload):
            continue
        if _draws(op, node.args):
            raise NoLoop(f"it draws random numbers ({op})")
        if op._opname.rstrip("_") in INDEXED_OPS:
            raise NoLoop(f"indices are not checked within a loop ({op})")


def _draws(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether a call draws random numbers. Attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
    return not (op._opname.startswith("_scaled_dot_product") and named.get("dropout_p", 0) == 0)
