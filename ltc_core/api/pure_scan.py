"""`scan` of a pure function as one op: its iterations are a loop of the program, not ops one after the other.

The function is traced once, on fake tensors, into the bodies of two loops (`graph.loop`): forward and backward of one
iteration are one FX graph, which a partition function divides as it does for `torch.compile`. Called by `loops` where
the executor has loops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ltc_core.api.loop_bodies import BodyTracer, NoLoop, Structure, WritesOutside, refuse_ops
from ltc_core.graph.loop import LOOPS, SCAN
from ltc_core.settings import settings

__all__ = ["pure_scan", "traced_parts"]

Tensor = torch.Tensor
Fn = Callable[[Any, Any], tuple[Any, Any]]

# What a function that is traced at each call belongs to -> why it cannot be a loop, by what that depends on.
_REFUSED: MutableMapping[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Loop:
    """The loops of a function.

    The inputs of an iteration are the carry, a slice of each of `xs`, and what the function uses besides.

    Attributes:
        carry, y: structures of what the function returns.
        x: structure of a slice.
        besides: tensors that the function uses beside its arguments.
        needed: which of them needed a gradient.
        forward: name of the body. Its results are the next carry, `y`, and what backward needs.
        backward: name of the body, "" if no gradient is wanted. It carries the gradients of the carry, then the sums of
            those of `besides`; its results are the gradients of a slice.
        differentiable: positions of the inputs that get a gradient.
        grown: positions of the results of the function that a gradient flows through.
        kept: where backward finds what it needs of an iteration: position of an input of it that is sliced, or
            -1 - position among forward's results. In the order of the graph.
        whole: positions of the inputs that backward's iterations get whole.
    """

    carry: Structure
    y: Structure
    x: Structure
    besides: tuple[Tensor, ...]
    needed: tuple[bool, ...]
    forward: str
    backward: str = ""
    differentiable: tuple[int, ...] = ()
    grown: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def has_changed(self) -> bool:
        """Whether a tensor that the function uses was frozen, or no longer is."""
        return tuple(t.requires_grad for t in self.besides) != self.needed

    @property
    def num_carry(self) -> int:
        return len(self.carry.tensors)

    @property
    def num_xs(self) -> int:
        return len(self.x.tensors)

    @property
    def num_results(self) -> int:
        return self.num_carry + len(self.y.tensors)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        """Forward, what completes the activations, and backward of one iteration."""
        return iter((self.call, self.activations, self.gradients))

    def call(self, carry: Any, x: Any) -> tuple[Any, tuple[Any, tuple[Tensor, ...]]]:
        """One iteration, without a gradient: the next carry, then `y` and the activations that are no slices."""
        rows = [t[None] for t in Structure(x).tensors]
        with torch.no_grad():
            found = _run(self, 1, [*Structure(carry).tensors, *rows, *self.besides])
        state, of_y = found[: self.num_carry], found[self.num_carry :]
        made = tuple(found[-1 - at][0] for at in self.kept if at < 0)
        y = self.y.filled([t[0] for t in of_y[: len(self.y.tensors)]])
        return self.carry.filled(state), (y, made)

    def activations(self, made: Sequence[Tensor], x: Any) -> tuple[Tensor, ...]:
        """What backward needs: what `call` made, and the tensors of `x` themselves. `x` may be all slices."""
        rows, own = Structure(x).tensors, iter(made)
        return tuple(rows[at - self.num_carry] if at >= 0 else next(own) for at in self.kept)

    def gradients(self, grad_carry: Any, of_y: tuple[Any, Sequence[Tensor]]) -> tuple[Any, Any]:
        """Gradients of the carry and of the slice of one iteration.

        Args:
            grad_carry: gradients of the next carry.
            of_y: gradients of `y`, and the activations.
        """
        grad_y, activations = of_y
        of_state = self.carry.picked(grad_carry)
        of_rows = [None if t is None else t[None] for t in self.y.picked(grad_y)]
        end = self.num_carry + self.num_xs
        whole = [self.besides[at - end] for at in self.whole]
        of: dict[int, Tensor] = {}
        if self.backward:
            with torch.no_grad():
                rows = [t[None] for t in activations]
                of = _run_backward(self, 1, [*of_state, *of_rows], rows, whole)
        return (
            self.carry.filled([of.get(at) for at in range(self.num_carry)]),
            self.x.filled([of[at][0] if at in of else None for at in range(self.num_carry, end)]),
        )


def pure_scan(
    fn: Fn,
    init: Any,
    xs: Any,
    length: int,
    partition_fn: Any,
    known_by: Any,
    variant: Hashable = None,
    is_kept: bool = True,
) -> tuple[Any, Any]:
    """Return the last carry, and the structure of the `y`, stacked.

    Args:
        partition_fn: of `torch._functorch.partitioners`, or None for its default.
        known_by: what `fn` belongs to; its loops are kept as long as this lives.
        variant: what else its loops depend on.
        is_kept: False for a function that may be another one at each call: it is traced at each. Only that it cannot
            be a loop is kept.

    A gradient of the results reaches the operands, and what `fn` uses besides. `fn` may also compute gradients itself,
    of what it uses besides, and return them detached.

    Raises:
        NoLoop: `fn` draws random numbers, writes to what it is given, looks at values, uses indices, or returns a carry
            of another size.
        WritesOutside: `fn` writes to a tensor that it uses besides.

    Cost: the first time with these sizes traces `fn`, tenths of a second; then one op is recorded.
    """
    if torch.is_autocast_enabled(settings.device_name):
        raise NoLoop("autocast is on")
    carry, rows = Structure(init), Structure(xs)
    try:
        of_fn = (LOOPS if is_kept else _REFUSED).setdefault(known_by, {})
    except TypeError:  # nothing can be told of the end of such a function
        of_fn = {}
    key = (carry.key, rows.key, torch.is_grad_enabled(), partition_fn, variant)
    loop = of_fn.get(key)
    if loop is None or (isinstance(loop, _Loop) and loop.has_changed):
        try:
            loop = _Tracing(fn, carry, rows).loop(partition_fn or default_partition)
        except NoLoop as reason:
            loop = type(reason)(str(reason))  # without the frames of the tracing
        if is_kept or isinstance(loop, NoLoop):
            of_fn[key] = loop
    if isinstance(loop, NoLoop):
        raise type(loop)(str(loop))
    operands = (*carry.tensors, *rows.tensors, *loop.besides)
    if loop.backward:
        found = _Differentiable.apply(loop, length, *operands)  # type: ignore[no-untyped-call]
    else:
        found = _run(loop, length, operands)[: loop.num_results]
    return loop.carry.filled(found[: loop.num_carry]), loop.y.filled(found[loop.num_carry :])


def traced_parts(fn: Fn, init: Any, xs: Any, partition_fn: Any = None) -> Iterator[Any]:
    """Three functions of one iteration of a scan: forward, what completes the activations, and backward.

    Forward takes a carry and a slice, and returns the next carry, then `y` and the activations that are no tensors of
    the slice. The second takes these and the slice, and returns all activations. Backward takes the gradients of the
    next carry, then those of `y` and all activations; it returns the gradients of the carry and of the slice, None for
    a tensor that needs none.

    Args:
        fn, init, xs, partition_fn: as in `pure_scan`.

    Raises:
        NoLoop: as `pure_scan`.
    """
    tracing = _Tracing(fn, Structure(init), Structure(xs))
    return iter(tracing.loop(partition_fn or default_partition))


def _run(loop: _Loop, length: int, operands: Sequence[Tensor]) -> list[Tensor]:
    end = loop.num_carry + loop.num_xs
    carry, rows, besides = (
        operands[: loop.num_carry],
        operands[loop.num_carry : end],
        operands[end:],
    )
    found: list[Tensor] = SCAN(carry, rows, besides, loop.forward, length, False)
    return found


def _run_backward(
    loop: _Loop,
    length: int,
    grads: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    whole: Sequence[Tensor],
) -> dict[int, Tensor]:
    """Gradients by the positions of the inputs: of the carry, stacked ones of the slices, and of what is used besides.

    Args:
        grads: of the results, those of `y` stacked.
        kept, whole: what backward's iterations get.
    """
    given = {at: t for at, t in enumerate(grads) if at in loop.grown and t is not None}
    device = next(t.device for t in (*given.values(), *kept, *whole))

    def zeros(like: Tensor, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, *like.shape, dtype=like.dtype, device=device)

    start, end = loop.num_carry, loop.num_carry + loop.num_xs
    state = []
    for at in loop.differentiable:
        if at < start:
            state.append(given[at] if at in given else zeros(loop.carry.tensors[at]))
        elif at >= end:
            state.append(zeros(loop.besides[at - end]))
    of_y = (
        given[at] if at in given else zeros(loop.y.tensors[at - start], length)
        for at in loop.grown
        if at >= start
    )
    found = SCAN(state, [*kept, *of_y], whole, loop.backward, length, True)
    carried, sliced = iter(found[: len(state)]), iter(found[len(state) :])
    return {at: next(sliced) if start <= at < end else next(carried) for at in loop.differentiable}


class _Differentiable(torch.autograd.Function):
    """The loop of forward, whose gradient is the loop of backward."""

    @staticmethod
    def forward(ctx: Any, loop: _Loop, length: int, *operands: Tensor) -> tuple[Tensor, ...]:
        found = _run(loop, length, operands)
        kept = [operands[at] if at >= 0 else found[-1 - at] for at in loop.kept]
        ctx.save_for_backward(*kept, *(operands[at] for at in loop.whole))
        ctx.loop, ctx.length = loop, length
        results = found[: loop.num_results]
        ctx.mark_non_differentiable(*(t for at, t in enumerate(results) if at not in loop.grown))
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        loop: _Loop = ctx.loop
        saved = ctx.saved_tensors
        kept, whole = saved[: len(loop.kept)], saved[len(loop.kept) :]
        of = _run_backward(loop, ctx.length, grads, kept, whole)
        count = loop.num_carry + loop.num_xs + len(loop.besides)
        return None, None, *(of.get(at) for at in range(count))


class _Tracing:
    """Traces a function into the bodies of its loops."""

    def __init__(self, fn: Fn, carry: Structure, rows: Structure) -> None:
        self._fn, self._carry, self._rows = fn, carry, rows
        self._tracer = BodyTracer()
        with_grad = torch.is_grad_enabled()
        operands = (*carry.tensors, *(t[0] for t in rows.tensors))
        needed = [t.requires_grad for t in (*carry.tensors, *rows.tensors)]
        # A carry that needs no gradient at first may need one after an iteration.
        needed[: len(carry.tensors)] = [t.is_floating_point() for t in carry.tensors]
        self._inputs = [
            self._tracer.fake(t, with_grad and need)
            for t, need in zip(operands, needed, strict=True)
        ]

    def _call(self, inputs: Sequence[Tensor]) -> tuple[Structure, Structure]:
        """What `fn` returns: structures of the next carry and of `y`."""
        count = len(self._carry.tensors)
        found = self._fn(self._carry.filled(inputs[:count]), self._rows.filled(inputs[count:]))
        if not isinstance(found, tuple) or len(found) != 2:
            raise NoLoop("it does not return a carry and a y")
        return Structure(found[0]), Structure(found[1])

    def loop(self, partition_fn: Any) -> _Loop:
        carry, y = self._tracer.find(lambda: self._call(self._inputs))
        if self._tracer.has_written:
            raise WritesOutside("it writes to a tensor that is not its argument")
        return self._bodies(carry, y, partition_fn)

    def _bodies(self, carry: Structure, y: Structure, partition_fn: Any) -> _Loop:
        for before, after in zip(self._carry.tensors, carry.tensors, strict=True):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise NoLoop("the carry that it returns has other sizes or dtypes")
        results = [*carry.tensors, *y.tensors]
        inputs = [*self._inputs, *self._tracer.stand_ins]
        besides = self._tracer.besides
        differentiable = tuple(at for at, t in enumerate(inputs) if t.requires_grad)
        grown = tuple(at for at, t in enumerate(results) if t.requires_grad)
        needed = tuple(t.requires_grad for t in besides)
        x = Structure(self._rows.filled(self._inputs[len(self._carry.tensors) :]))
        common = (carry, y, x, besides, needed)
        if not grown:
            run = self._detached(inputs) if differentiable else self._flat
            return _Loop(*common, self._tracer.body(run, inputs))
        joint = self._joint(inputs, results, grown, differentiable)
        tangents = [results[at] for at in grown]
        forward, backward = partition_fn(joint, (inputs, tangents), num_fwd_outputs=len(results))
        return self._divided(
            _Loop(*common, "", "", differentiable, grown), forward, backward, inputs
        )

    def _flat(self, *inputs: Tensor) -> list[Tensor]:
        """The tensors that `fn` returns, from all inputs of an iteration."""
        count = len(self._inputs)
        carry, y = self._tracer.call(lambda: self._call(inputs[:count]), inputs[count:])
        return [*carry.tensors, *y.tensors]

    def _detached(self, inputs: Sequence[Tensor]) -> GraphModule:
        """An iteration that may compute gradients, and returns results without any."""

        def run(*given: Tensor) -> list[Tensor]:
            return [t.detach() for t in self._flat(*_leaves(given, inputs))]

        with self._tracer.mode:
            module: GraphModule = make_fx(run, tracing_mode="real")(*(t.detach() for t in inputs))
        return module

    def _joint(
        self,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        grown: Sequence[int],
        differentiable: Sequence[int],
    ) -> GraphModule:
        """Forward and backward of an iteration, from `primals` and `tangents`."""

        def run(primals: list[Tensor], tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            own = _leaves(primals, inputs)
            found = self._flat(*own)
            plain = [t.detach() for t in found]  # recorded before the gradients: a part of forward
            wanted = [own[at] for at in differentiable]
            grads = torch.autograd.grad(
                [found[at] for at in grown], wanted, tangents, allow_unused=True
            )
            zeros = (
                torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True)
            )
            return plain, list(zeros)

        with self._tracer.mode:
            primals = [t.detach() for t in inputs]
            tangents = [torch.empty_like(results[at]).detach() for at in grown]
            joint: GraphModule = make_fx(run, tracing_mode="real")(primals, tangents)
        refuse_ops(joint)  # a partition function may fail on a random number
        # Under their own names backward finds the inputs that it needs, and takes no copies of them.
        for node in joint.graph.find_nodes(
            op="call_function", target=torch.ops.aten.detach.default
        ):
            node.replace_all_uses_with(node.args[0])
        joint.graph.eliminate_dead_code()
        joint.recompile()
        _tag_forward(joint, len(results))
        return joint

    def _divided(
        self, loop: _Loop, forward: GraphModule, backward: GraphModule, inputs: Sequence[Tensor]
    ) -> _Loop:
        """The loop with bodies: forward returns what backward needs, backward adds up what is not sliced."""
        num_results, end = loop.num_results, loop.num_carry + loop.num_xs
        (output,) = forward.graph.find_nodes(op="output")
        outputs = pytree.tree_leaves(output.args[0])
        names = [node.name for node in forward.graph.find_nodes(op="placeholder")]
        saved = {node.name: node for node in outputs[num_results:]}
        takes = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        whole = [n for n in takes if n in names and names.index(n) >= end]
        sliced = [n for n in takes if n in names and loop.num_carry <= names.index(n) < end]
        made = [n for n in saved if n in takes and n not in whole and n not in sliced]
        of_made = {n: -1 - num_results - k for k, n in enumerate(made)}
        positions = {node.name: at for at, node in enumerate(outputs) if at >= num_results}

        def run_forward(*own: Tensor) -> list[Tensor]:
            found = pytree.tree_leaves(forward(*own))
            return [*found[:num_results], *(found[positions[n]] for n in made)]

        grown_y = [at for at in loop.grown if at >= loop.num_carry]
        grown_carry = [at for at in loop.grown if at < loop.num_carry]
        carried = [at for at in loop.differentiable if not loop.num_carry <= at < end]
        kept = [n for n in saved if n in made or n in sliced]

        def run_backward(*own: Tensor) -> list[Tensor]:
            state = dict(zip(carried, own, strict=False))
            rows = own[len(carried) : len(carried) + len(kept)]
            of_y = own[len(carried) + len(kept) :][: len(grown_y)]
            besides = own[len(carried) + len(kept) + len(grown_y) :]
            given = dict(zip((*kept, *whole), (*rows, *besides), strict=True))
            given.update((n, _laid_out(given[n], of_saved[n])) for n in made)
            grads_of = [*(state[at] for at in grown_carry), *of_y]
            tangents = map(_laid_out, grads_of, (results[at] for at in (*grown_carry, *grown_y)))
            found = backward(*(given[n] if n in given else next(tangents) for n in takes))
            grads = dict(zip(loop.differentiable, pytree.tree_leaves(found), strict=True))
            next_state = [
                grads[at] if at < loop.num_carry else state[at] + grads[at] for at in carried
            ]
            return [*next_state, *(g for at, g in grads.items() if at not in carried)]

        of_saved = {n: saved[n].meta["val"] for n in made}
        results = [*loop.carry.tensors, *loop.y.tensors]
        for_backward = [
            *(inputs[at] for at in carried),
            *(of_saved[n] if n in made else inputs[names.index(n)] for n in kept),
            *(results[at] for at in grown_y),
            *(inputs[names.index(n)] for n in whole),
        ]
        return _Loop(
            *(loop.carry, loop.y, loop.x, loop.besides, loop.needed),
            self._tracer.body(run_forward, inputs),
            self._tracer.body(run_backward, for_backward),
            loop.differentiable,
            loop.grown,
            tuple(of_made[n] if n in made else names.index(n) for n in kept),
            tuple(names.index(n) for n in whole),
        )


def _tag_forward(joint: GraphModule, num_results: int) -> None:
    """Tag the nodes that the results are made of: partition functions take them, and what lies before, for forward."""
    (output,) = joint.graph.find_nodes(op="output")
    waiting = pytree.tree_leaves(output.args[0])[:num_results]
    while waiting:
        node = waiting.pop()
        if node.meta.get("partitioner_tag") != "is_forward":
            node.meta["partitioner_tag"] = "is_forward"
            waiting += node.all_input_nodes


def _leaves(given: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The same values as leaves, which need gradients where `like` does."""
    pairs = zip(given, like, strict=True)
    return [t.detach().requires_grad_(other.requires_grad) for t, other in pairs]


def _laid_out(t: Tensor, like: Tensor) -> Tensor:
    """A contiguous tensor in the memory order of another one, for which a graph was traced."""
    if like.is_contiguous():
        return t
    order = sorted(range(t.dim()), key=like.stride().__getitem__, reverse=True)
    back = sorted(range(t.dim()), key=order.__getitem__)
    return t.permute(order).contiguous().permute(back)
