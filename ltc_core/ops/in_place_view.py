"""`t_`, `transpose_`, `squeeze_`, `unsqueeze_`: the tensor becomes a view of its own memory.

Autograd makes a view of a lazy tensor again, by its view op, when the view's base was written. What such an op changes
in place, that view op has to follow: `v = x[0]; v.t_(); v.mul_(2)` would else give `x` a transposed gradient. Eager
PyTorch has strides for this. The C++ part changes the view op (`record/csrc/view_function.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc_core import errors, source
from ltc_core.graph.op_schema import OpSchema
from ltc_core.record import fast_path
from ltc_core.record.recorder import recorder
from ltc_core.tensor.alive import alive
from ltc_core.tensor.lazy_tensor import LazyTensor, has_no_other_reference, set_handle

__all__ = ["IN_PLACE_VIEWS"]

aten = torch.ops.aten
Handler = Callable[[Any, Any], Any]
Sizes = tuple[int, ...]


def _in_place_view(op: torch._ops.OpOverload) -> Handler:
    """Return the handler of the op that gives a tensor the sizes that `op` gives its view."""
    record = recorder(OpSchema.of(op))

    def handle(args: Any, kwargs: Any) -> Any:
        t = args[0]
        before = tuple(t._h.meta.size)
        views = [t] if t._is_view() else _views_of(t)
        rename = _rename_view(t) if views else None
        set_handle(t, record(args, kwargs)._h)
        if rename is None:
            return t
        after = tuple(t._h.meta.size)
        dims = _transposed(op, args, len(before))
        there, back = (dims, dims) if dims else (after, before)
        for view in views:
            if view is t:
                rename(view, False, bool(dims), there, back)
            else:
                rename(view, True, bool(dims), back, there)
        return t

    return handle


def _transposed(op: torch._ops.OpOverload, args: Any, rank: int) -> Sizes:
    """The dims that the op transposes, if it is one that transposes two."""
    if op is aten.t.default and rank == 2:
        return 0, 1
    if op is aten.transpose.int and rank > 0:
        return args[1] % rank, args[2] % rank
    return ()


def _views_of(t: LazyTensor) -> list[LazyTensor]:
    """The views of a base that autograd may make again.

    Cost: 3 us if only `t` refers to its memory; else it looks at every object of the process (`alive`).
    """
    if not t.requires_grad or has_no_other_reference(t):
        return []
    return [other for other in alive(LazyTensor) if other is not t and other._base is t]


def _rename_view(t: LazyTensor) -> Callable[..., None] | None:
    """The C++ function; None if there is no C++ part and no gradient yet.

    Raises:
        UnsupportedOpError: there is no C++ part, and there are gradients, which would be wrong.
    """
    if not t.requires_grad:
        native = fast_path.extension.loaded
        return None if native is None else native.rename_view
    native = fast_path.extension.load()
    if native is not None:
        return native.rename_view  # type: ignore[no-any-return]
    raise errors.UnsupportedOpError(
        "sizes of a view, or of a tensor with views, cannot change in place where gradients are recorded, without the "
        "C++ part",
        got=f"{t._h.meta}; {fast_path.extension.unavailable_reason}",
        where=source.user_line(),
        next="x = x.unsqueeze(0), and the like, in its place; or install a C++ compiler",
    )


IN_PLACE_VIEWS: dict[torch._ops.OpOverload, Handler] = {
    aten.t_.default: _in_place_view(aten.t.default),
    aten.transpose_.default: _in_place_view(aten.transpose.int),
    aten.squeeze_.default: _in_place_view(aten.squeeze.default),
    aten.squeeze_.dim: _in_place_view(aten.squeeze.dim),
    aten.squeeze_.dims: _in_place_view(aten.squeeze.dims),
    aten.unsqueeze_.default: _in_place_view(aten.unsqueeze.default),
}
