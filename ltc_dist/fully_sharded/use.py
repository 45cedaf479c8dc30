"""`Use`: one forward of a unit, from the gathering of its parameters to the scattering of their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ltc_core.graph.lens import Lens, apply_lens
from ltc_core.tensor.handles import base_of, lens_of

__all__ = ["Unit", "Use"]


class Unit(Protocol):
    """What has divided parameters: a `FullyShardedDataParallel`."""

    sharded_params: list[Any]

    def gather(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def frozen(self, whole: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def scatter(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]: ...


class Use:
    """The whole parameters of one forward of a unit.

    Autograd keeps a `_Kept` in the place of a whole parameter, so that it is freed after forward and gathered again
    when backward needs it.

    Args:
        unit: the unit. Its parameters are gathered now.

    Attributes:
        whole: the parameters; None between forward and backward.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._versions = [shard._version for shard in unit.sharded_params]
        self.whole: Sequence[torch.Tensor] | None = _Gather.apply(self, *unit.sharded_params)  # type: ignore[no-untyped-call]
        # Memory of whole parameters -> which ones lie there, and where.
        self._places: dict[int, list[tuple[int, Lens]]] = {}
        # A wrapper that checkpoints this forward keeps its own things in the place of tensors.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def gather(
        self, shards: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The whole parameters, and those of them that are not trained."""
        whole = self._unit.gather(shards)
        return whole, self._unit.frozen(whole)

    def end_of_forward(self) -> None:
        self.whole = None

    def end_of_backward(self, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Free the whole parameters; give the gradients of the shards."""
        self.whole = None
        return self._unit.scatter(gradients)

    # -- what autograd keeps -----------------------------------------------------------------------

    def keeps(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd keeps no whole parameter."""
        assert self.whole is not None
        for index, tensor in enumerate(self.whole):
            handle = tensor._h  # type: ignore[attr-defined]
            self._places.setdefault(id(base_of(handle)), []).append((index, lens_of(handle)))
        return torch.autograd.graph.saved_tensors_hooks(self._keep, self._given)

    def _keep(self, tensor: torch.Tensor) -> Any:
        handle = getattr(tensor, "_h", None)
        if handle is not None:
            lens = lens_of(handle)
            for index, place in self._places.get(id(base_of(handle)), ()):
                if lens[: len(place)] == place:
                    return _Kept(self, index, lens[len(place) :])
        return self._outer[0](tensor) if self._outer else tensor

    def _given(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, _Kept):
            return apply_lens(kept.use.again()[kept.index], kept.views)
        outer: tuple[Callable[..., Any], Callable[..., Any]] | None = self._outer
        return outer[1](kept) if outer else kept  # type: ignore[no-any-return]

    @torch.no_grad()
    def again(self) -> Sequence[torch.Tensor]:
        """The whole parameters in backward. Cost: gathers them, the first time.

        Raises:
            RuntimeError: they have changed since forward.
        """
        if self.whole is None:
            shards = self._unit.sharded_params
            for shard, before in zip(shards, self._versions, strict=True):
                if shard._version != before:
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by an inplace "
                        f"operation: the shard of {', '.join(shard._members)} is at version {shard._version}; "
                        f"expected version {before} instead"
                    )
            self.whole = self._unit.gather(shards)
        return self.whole


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A whole parameter, or a view of one, that autograd asks for in backward."""

    use: Use
    index: int
    views: Lens


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, *shards: torch.Tensor) -> Any:
        ctx.use = use
        ctx.set_materialize_grads(False)
        whole, frozen = use.gather(shards)
        ctx.mark_non_differentiable(*frozen)
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *ctx.use.end_of_backward(gradients)
