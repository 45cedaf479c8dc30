"""The ops that mark where a composite of StableHLO begins and ends, and that name the op which made a tensor.

They compute nothing: the result is a copy of the operand. Where a program is shown or exported,
`executors.jax.composites` makes one `stablehlo.composite` of what lies between the marks of an id, and gives the op
before a `NAME` the name as its location. On any executor that runs them, they are the identity.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

__all__ = ["MARK", "NAME", "Boundary"]


@dataclasses.dataclass(frozen=True)
class Boundary:
    """One tensor at the border of a composite.

    Attributes:
        name: of the composite.
        pos: which input or result of the composite it is.
        id: the composite's own, equal for all its tensors.
        is_input: whether it is an input; else a result.
        attr: the composite's attributes: numbers, strings, truth values, or lists of one kind of them but strings. The
            first result's count.
    """

    name: str
    pos: int
    id: str
    is_input: bool
    attr: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of(text: str) -> Boundary:
        return Boundary(**json.loads(text))


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


_library: Any = torch.library.Library("ltc_composite", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _text in (("mark", "boundary"), ("op_name", "name")):
    _library.define(f"{_name}(Tensor value, str {_text}) -> Tensor")
    _library.impl(_name, lambda value, text: torch.empty_like(value), "Meta")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, lambda value, text: value.clone(), _key)
    torch.library.register_autograd(f"ltc_composite::{_name}", _backward, lib=_library)

MARK: torch._ops.OpOverload = torch.ops.ltc_composite.mark.default
NAME: torch._ops.OpOverload = torch.ops.ltc_composite.op_name.default
