"""The op that marks where a composite of StableHLO begins and ends.

The op `MARK` computes nothing: its result is a copy of its operand. Where a program is shown or exported,
`executors.jax.composites` makes one `stablehlo.composite` of what lies between the marks of an id. On any executor that
runs it, it is the identity.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

__all__ = ["MARK", "Boundary"]


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
_library.define("mark(Tensor value, str boundary) -> Tensor")
_library.impl("mark", lambda value, boundary: torch.empty_like(value), "Meta")
for _key in ("CPU", "CUDA"):
    _library.impl("mark", lambda value, boundary: value.clone(), _key)
torch.library.register_autograd("ltc_composite::mark", _backward, lib=_library)

MARK: torch._ops.OpOverload = torch.ops.ltc_composite.mark.default
