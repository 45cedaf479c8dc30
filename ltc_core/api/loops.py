"""Loops of a script as one call: `scan`, `scan_layers`, `fori_loop`, `while_loop`, `gradient_accumulation`; and `cond`.

Each loop calls its function once an iteration, and the calls are recorded one after the other: a step's graph has the
ops of all iterations. So gradients are eager's, random numbers differ from iteration to iteration, and any executor
runs the loop. Where the executor has loops, a function that can be traced becomes a loop of the program (`pure_scan`,
`pure_while`, `pure_accumulation`); a `scan` only if its function is said to be pure, or may be traced at each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ltc_core import metrics, source
from ltc_core.errors import OutsideWriteError
from ltc_core.runtime.devices import context_of
from ltc_core.settings import settings
from ltc_core.tensor.lazy_tensor import LazyTensor

__all__ = [
    "cond",
    "fori_loop",
    "gradient_accumulation",
    "scan",
    "scan_layers",
    "while_loop",
]

Partition = Callable[..., Any] | None

# The partition functions of PyTorch that recompute activations in backward.
_RECOMPUTING = ("min_cut_rematerialization_partition",)


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Partition = None,
    is_fn_pure: bool = False,
    is_traced: bool = False,
) -> tuple[Any, Any]:
    """Call `carry, y = fn(carry, x)` for each slice of `xs` along its first dimension.

    Args:
        fn: takes and returns structures of tensors. It may not write to its arguments.
        init: the first carry.
        xs: a tensor, or a structure of tensors whose first dimensions have one size, at least 1.
        partition_fn: with `functorch.compile.min_cut_rematerialization_partition`, backward calls `fn` again, as
            `torch.utils.checkpoint` does. Any other function changes nothing, and is not called.
        is_fn_pure: with LTC_EXECUTOR=jax `fn` is traced once for its sizes, and becomes a loop of the program. If it
            cannot, because it draws random numbers, looks at values or uses indices, the counter `LoopUnrolled` counts
            the call, and LTC_EXPLAIN=1 says why.
        is_traced: the same for a function that is not said to be pure, which is traced at each call: tenths of a
            second. Where it cannot be a loop because it writes to a tensor that it uses besides, that is an error.

    Returns:
        The last carry, and the structure of the `y`, stacked. A leaf that is None stays None.

    Raises:
        ValueError: `fn` cannot be called, or `xs` has no tensor, no slice, or slices of several numbers.
        OutsideWriteError: `fn` writes to a tensor that it uses besides, see `is_traced`.

    Source: `torch_xla.experimental.scan`.
    """
    if not callable(fn):
        raise ValueError(f"`fn` {fn} must be callable.")
    leaves, structure = pytree.tree_flatten(xs)
    sizes = [len(leaf) for leaf in leaves if leaf is not None]
    if not sizes:
        raise ValueError(f"`xs` {xs} is an empty PyTree.")
    for size in sizes:
        if size != sizes[0]:
            raise ValueError(
                "The leaves of the `xs` input PyTree must have the same leading dimension size. "
                f"Got {sizes[0]} and {size}"
            )
    if sizes[0] == 0:
        raise ValueError(
            "The leaves of `xs` have no slice; scan needs one to know what `fn` returns."
        )
    if (is_fn_pure or is_traced) and _has_loops((init, xs)):
        found = _as_loop(is_traced, fn, init, xs, sizes[0], partition_fn, fn, None, is_fn_pure)
        if found is not None:
            return found
    # One op for all slices: the gradient of `unbind` is one stack, that of n slices is n tensors of full size.
    slices = [[None] * sizes[0] if leaf is None else leaf.unbind(0) for leaf in leaves]
    call = _recomputed(fn, partition_fn)
    carry, ys = init, []
    for x in zip(*slices, strict=True):
        carry, y = call(carry, pytree.tree_unflatten(list(x), structure))
        ys.append(y)
    return carry, pytree.tree_map(_stacked, *ys)


def _has_loops(operands: Any) -> bool:
    """Whether the executor of the operands makes loops of its programs."""
    lazy = (t for t in pytree.tree_leaves(operands) if isinstance(t, LazyTensor))
    return any(context_of(t._h).executor.has_loops for t in lazy)


def _as_loop(is_traced: bool, *args: Any) -> tuple[Any, Any] | None:
    """What `pure_scan` returns, None if the function cannot be the body of a loop."""
    from ltc_core.api.loop_bodies import WritesOutside
    from ltc_core.api.pure_scan import pure_scan  # imports PyTorch's compiler: seconds

    def call() -> tuple[Any, Any]:
        try:
            return pure_scan(*args)
        except WritesOutside:
            if not is_traced:
                raise
        raise OutsideWriteError(
            "the function of a scan writes to a tensor that is not its argument",
            got="a FakeTensor, which stands for the tensor while the function is traced",
            where=source.user_line(),
            next="make the tensor a part of the carry, and return its new value",
        )

    found: tuple[Any, Any] | None = _unless_unrolled(call)
    return found


def _unless_unrolled(pure: Callable[..., Any], *args: Any) -> Any:
    from ltc_core.api.loop_bodies import NoLoop

    try:
        return pure(*args)
    except NoLoop as why:
        metrics.count("LoopUnrolled")
        if settings.explain:
            print(
                f"[ltc] loop at {source.user_line()}: not a loop of the program: {why}",
                file=sys.stderr,
            )
        return None


def _stacked(*leaves: Any) -> Any:
    return None if leaves[0] is None else torch.stack(leaves)


def _recomputed(fn: Callable[..., Any], partition_fn: Partition) -> Callable[..., Any]:
    if getattr(partition_fn, "__name__", None) not in _RECOMPUTING:
        return fn
    return lambda *args: checkpoint(fn, *args, use_reentrant=False)


def scan_layers(
    layers: Iterable[nn.Module],
    input_data: Any,
    partition_fn: Partition = None,
    is_layer_pure: bool = False,
    is_traced: bool = False,
) -> Any:
    """Call layers one after the other, each with the output of the one before.

    Args:
        layers: layers with the same names and shapes of parameters and buffers.
        input_data: input of the first layer. A tuple becomes its arguments.
        partition_fn: as in `scan`.
        is_layer_pure: as `is_fn_pure` in `scan`. Parameters and buffers are stacked for that, which copies them.
        is_traced: as in `scan`.

    Raises:
        ValueError: a layer has other names or shapes than the first.

    Source: `torch_xla.experimental.scan_layers`.
    """
    called = list(layers)
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        _require_same([dict(kind(layer)) for layer in called])
    is_loop = is_layer_pure or is_traced
    if is_loop and called and _has_loops((input_data, dict(called[0].named_parameters()))):
        found = _layers_as_loop(called, input_data, partition_fn, is_layer_pure)
        if found is not None:
            return found[0]
    data = input_data
    for layer in called:
        args = data if isinstance(data, tuple) else (data,)
        data = _recomputed(layer, partition_fn)(*args)
    return data


def _layers_as_loop(
    layers: Sequence[nn.Module], data: Any, partition_fn: Partition, is_pure: bool
) -> tuple[Any, Any] | None:
    first = layers[0]
    modes = [tuple(module.training for module in layer.modules()) for layer in layers]
    if any(mode != modes[0] for mode in modes):  # a loop has one body
        return None

    def call(carry: Any, own: dict[str, torch.Tensor]) -> tuple[Any, None]:
        args = carry if isinstance(carry, tuple) else (carry,)
        return torch.func.functional_call(first, own, args), None

    states = [{**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in layers]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    count = len(layers)
    return _as_loop(False, call, data, stacked, count, partition_fn, first, modes[0], is_pure)


def _require_same(found: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for number, own in enumerate(found):
        first = found[0]
        if own.keys() != first.keys():
            raise ValueError(
                f"Layer {number} has mismatched keys. Missing keys: {sorted(first.keys() - own.keys())}. "
                f"Extra keys: {sorted(own.keys() - first.keys())}."
            )
        for name, t in own.items():
            if t.shape != first[name].shape:
                raise ValueError(
                    f"Shape mismatch for '{name}' in layer {number}: expected {first[name].shape}, got {t.shape}."
                )


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    """Call `true_fn(*operands)` if `pred` is true, else `false_fn(*operands)`.

    Cost: waits for the condition.

    Source: `torch.cond`.
    """
    return (true_fn if bool(pred) else false_fn)(*operands)


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] | None = None,
) -> Any:
    """Call `values = body_fn(*values)` while `cond_fn(*values)` is true; return the last values as a tuple.

    With LTC_EXECUTOR=jax the functions are traced once, and become a loop of the program. If they cannot, for the
    reasons that `scan` names, or because a gradient flows through the loop, the counter `LoopUnrolled` counts the call.

    Args:
        carried_inputs: the first values.
        additional_inputs: more arguments of both functions, the same in each iteration. They are not returned.

    Cost: waits for each condition, unless it is a loop of the program.

    Source: `torch._higher_order_ops.while_loop`.
    """
    values, rest = tuple(carried_inputs), tuple(additional_inputs or ())
    body = _returning_tuple(body_fn)
    if _has_loops((values, rest)):
        from ltc_core.api.pure_while import pure_while  # imports PyTorch's compiler: seconds

        found: tuple[Any, ...] | None = _unless_unrolled(pure_while, cond_fn, body, values, rest)
        if found is not None:
            return found
    while bool(cond_fn(*values, *rest)):
        values = body(*values, *rest)
    return values


def _returning_tuple(fn: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """A function that returns a tuple, also where `fn` returns a list or one value."""

    def call(*args: Any) -> tuple[Any, ...]:
        found = fn(*args)
        return tuple(found) if isinstance(found, tuple | list) else (found,)

    return call


def fori_loop(lower: Any, upper: Any, body_fun: Callable[..., Any], *input_value: Any) -> Any:
    """Call `values = body_fun(*values)` `upper - lower` times.

    Args:
        lower, upper: numbers, or tensors of one element.
        input_value: the first values.

    Returns:
        The number of iterations that are left, 0, then the last values.

    With LTC_EXECUTOR=jax it is a loop of the program, as `while_loop`, and with gradients as `scan`.

    Raises:
        ValueError: `upper` is below `lower`. A loop of the program does nothing then, if they are tensors.

    Cost: waits for `lower` and `upper` where they are tensors, once; a loop of the program only with gradients.

    Source: `torch_xla.experimental.fori_loop`.
    """
    difference = upper - lower
    body = _returning_tuple(body_fun)
    is_upwards = isinstance(difference, torch.Tensor) or difference >= 0
    if is_upwards and _has_loops((difference, input_value)):
        from ltc_core.api.pure_while import pure_fori

        leaves = pytree.tree_leaves((difference, input_value))
        device = next(t.device for t in leaves if isinstance(t, LazyTensor))
        left = torch.as_tensor(difference, device=device)
        found: tuple[Any, ...] | None = _unless_unrolled(
            pure_fori, left, body, input_value, body_fun
        )
        if found is not None:
            return found
    count = int(difference)
    if count < 0:
        raise ValueError(f"upper must not be below lower: {int(upper)}, {int(lower)}")
    values = input_value
    for _ in range(count):
        values = body(*values)
    return (difference - count, *values)


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: nn.Module,
    *carried_tensors: torch.Tensor,
) -> Any:
    """Accumulate the gradients of a mean loss over slices of a batch.

    With LTC_EXECUTOR=jax it is a loop of the program, forward and backward of a slice in one iteration, if `train_step`
    can be traced as the `fn` of a `scan`, and the gradients are those of all parameters of the model and of nothing
    else. Else the counter `LoopUnrolled` counts the call.

    Args:
        train_step: called as `train_step(*slices, *carried)` for each slice. Returns the loss, or the loss and the next
            carried tensors. No gradient flows from one slice to the next.
        iterable_tensors: tensors with one size of the first dimension, the number of slices.
        model: the module whose parameters get gradients. They are added to gradients that are there.
        carried_tensors: the first carried tensors.

    Returns:
        The mean loss without its graph, or a tuple of it and the last carried tensors.

    Raises:
        ValueError: `iterable_tensors` is empty, or its elements do not fit each other.
        AssertionError: `train_step` changed a tensor that it was given in place.

    Source: `torch_xla.experimental.gradient_accumulation`.
    """
    if not iterable_tensors:
        raise ValueError("iterable_tensors cannot be empty")
    for k, t in enumerate(iterable_tensors):
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"Element {k} of iterable_tensors is not a tensor")
        if t.numel() == 0:
            raise ValueError(f"Element {k} of iterable_tensors is empty")
        if t.size(0) != iterable_tensors[0].size(0):
            raise ValueError(f"Element {k} of iterable_tensors has inconsistent first dimension")
    if _has_loops(iterable_tensors):
        from ltc_core.api.pure_accumulation import pure_accumulation

        looped = _unless_unrolled(
            pure_accumulation, train_step, iterable_tensors, model, carried_tensors
        )
        if looped is not None:
            return looped
    count = iterable_tensors[0].size(0)
    total = torch.zeros((), device=iterable_tensors[0].device)
    carried: Sequence[torch.Tensor] = carried_tensors
    for slices in zip(*(t.unbind(0) for t in iterable_tensors), strict=True):
        given = (*slices, *carried)
        versions = [t._version for t in given]
        found = train_step(*given)
        for k, (t, version) in enumerate(zip(given, versions, strict=True)):
            if t._version != version:
                raise AssertionError(
                    f"train_step changed its argument {k} in place; return a new tensor"
                )
        loss, carried = (found[0], found[1:]) if carried_tensors else (found, ())
        loss = loss / count
        loss.backward()
        total = total + loss.detach()
        carried = [t.detach() for t in carried]
    return (total, *carried) if carried else total
