"""A part of a graph, compiled by PyTorch's compiler in this process and run beside its FX graph.

It is the compiler as we use it, but for the wrapper, which is Python: seconds a part, and a kernel that is wrong is
found where it is, in the tensors of one part, not in what a program returns at its end.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.lowering  # decompositions look it up there
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor.virtualized import V

from ltc_core.executors.inductor.compiler.build_artifact import OPTIONS
from ltc_core.executors.inductor.lowering.lower import Lowered
from ltc_core.executors.inductor.lowering.own_memory_lowering import Lowerings
from ltc_core.executors.inductor.lowering.repairs import repaired

__all__ = ["ComparedPart", "PartDiffers"]

_OF_LIBRARIES = ("cpp_wrapper", "aot_inductor.")
# Their results are memory that nobody has written.
_UNWRITTEN = ("empty", "resize", "set_")
_CLOSE = {torch.bfloat16: (3e-2, 3e-2), torch.float16: (3e-2, 3e-2)}  # of roundings in other places
_CLOSE_OF_OTHERS = (1e-4, 1e-5)


class PartDiffers(BaseException):
    """Compiled code of a part gave or wrote other values than its FX graph. After an Exception the ops would run."""


class ComparedPart:
    """In the place of a part's library: what it gives is the FX graph's.

    Not compared is a part that the compiler refuses, or in which there is memory that nobody writes.

    Args:
        lowered: the part.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._inputs = [(tuple(fake.shape), fake.stride(), fake.dtype) for fake in lowered.fakes]
        self._module = copy.deepcopy(lowered.module)
        self._compiled: Callable[[list[Tensor]], Sequence[Any]] | None = None
        targets = [str(node.target) for node in self._module.graph.nodes]
        if not any(word in target for target in targets for word in _UNWRITTEN):
            with contextlib.suppress(Exception):  # it refuses the part
                self._compiled = _compiled(lowered)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run both, each on copies of the inputs.

        Raises:
            PartDiffers: with the part's code, and what differs.
        """
        with torch.no_grad():
            wanted_inputs, inputs = self._copies(tensors), self._copies(tensors)
            wanted = list(self._module(*wanted_inputs))
            if self._compiled is not None:
                results = list(self._compiled([*inputs]))
                different = [
                    *_different("output", results, wanted), *_different("input", inputs, wanted_inputs),
                ]  # fmt: skip
                if different:
                    raise PartDiffers("\n".join([*different, self._module.code]))
            for tensor, value in zip(tensors, wanted_inputs, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        return wanted

    def _copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.empty_strided(shape, strides, dtype=dtype).copy_(tensor)
            for tensor, (shape, strides, dtype) in zip(tensors, self._inputs, strict=True)
        ]


def _compiled(lowered: Lowered) -> Any:
    options = {name: value for name, value in OPTIONS.items() if not name.startswith(_OF_LIBRARIES)}
    Lowerings()
    with (
        tracing(TracingContext(lowered.mode)),
        V.set_fake_mode(lowered.mode),
        inductor_config.patch({**options, "fx_graph_cache": False}),
        repaired(),
    ):
        return compile_fx.compile_fx_inner(lowered.module, lowered.fakes)


def _different(what: str, found: Sequence[Any], wanted: Sequence[Any]) -> Iterator[str]:
    for k, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{what} {k}: {one.dtype}{tuple(one.shape)} instead of {other.dtype}{tuple(other.shape)}"
            continue
        relative, absolute = _CLOSE.get(other.dtype, _CLOSE_OF_OTHERS)
        if not other.is_complex():
            one, other = one.double(), other.double()
        if not torch.allclose(one, other, relative, absolute, equal_nan=True):
            yield f"{what} {k}: {one}\ninstead of {other}"
