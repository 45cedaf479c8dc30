"""Calls of a pure function that is traced once: later calls record the ops of its graph.

In: a function of structures of tensors, and a dict that keeps its graphs. Out: its results, without gradients. Called
by `torch_xla.experimental.assume_pure` of compat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ltc_core.api.loop_bodies import BodyTracer, NoLoop, Structure
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = ["traced_call"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Traced:
    """A graph of a function for some arguments.

    Attributes:
        graph: takes the tensors of the arguments, returns a list. What the function uses besides are its buffers.
        result: structure of what it returns.
    """

    graph: GraphModule
    result: Structure


def traced_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], graphs: dict[Any, Any]
) -> Any:
    """Call a function, by its graph if it can be traced.

    Args:
        args, kwargs: structures of tensors of the device and other values, which belong to the graph.
        graphs: its graphs, which are added to. None stands for arguments with which it cannot be traced.

    Raises:
        Exception: whatever the function raises.

    Cost: the first call with such arguments traces, tenths of a second.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
    key = spec, others, tuple((t.shape, t.dtype) for t in tensors)
    if not tensors or not all(isinstance(t, LazyTensor) for t in tensors):
        return fn(*args, **kwargs)
    try:
        is_known = key in graphs
    except TypeError:  # a value that cannot be a key
        return fn(*args, **kwargs)
    if not is_known:

        def run(own: Sequence[Tensor]) -> Any:
            rest = iter(own)
            filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            given, named = pytree.tree_unflatten(filled, spec)
            return fn(*given, **named)

        try:
            graphs[key] = _trace(run, tensors)
        except NoLoop:  # it looks at values
            graphs[key] = None
    traced: _Traced | None = graphs[key]
    if traced is None:
        return fn(*args, **kwargs)
    found = traced.graph(*tensors)
    return traced.result.filled(found)


def _trace(run: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> _Traced:
    tracer, device = BodyTracer(), tensors[0].device
    fakes = [tracer.fake(t, False) for t in tensors]
    results: list[Structure] = []

    def flat(*own: Tensor) -> list[Tensor]:
        results.append(Structure(tracer.find(lambda: run(own))))
        return results[0].tensors

    with tracer.mode:
        graph: GraphModule = make_fx(flat, tracing_mode="real")(*fakes)
    found = dict(zip(map(id, tracer.stand_ins), tracer.besides, strict=True))
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            if isinstance(constant, FakeTensor) and id(constant) not in found:
                raise NoLoop("it makes a tensor of values")
            delattr(graph, node.target)
            graph.register_buffer(node.target, found.get(id(constant), constant).to(device))
    graph.recompile()
    return _Traced(graph, results[0])
