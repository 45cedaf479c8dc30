"""A subgraph as a function of `jax.Array`s: its nodes as core ops (`functional_nodes`), these by the rules of `table`.

`LOWERING` knows which calls have no rule; they run on the host. Used by `device`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import ltc_core.executors.jax.rules  # noqa: F401 - fills RULES
from ltc_core.executors.inductor import tier_report
from ltc_core.executors.jax import collectives, manual
from ltc_core.executors.jax.collectives import Collectives
from ltc_core.executors.jax.free_operands import broadcast, has_free_size, is_elementwise
from ltc_core.executors.jax.free_sizes import FixedSizeError, Result, Sizes
from ltc_core.executors.jax.table import NOT_ON_HOST, RULES, Array, Call, dtype_of, to_dtype
from ltc_core.executors.noted_calls import NotedCalls
from ltc_core.graph import collective
from ltc_core.graph.ir import Node, TensorMeta
from ltc_core.graph.jax_call import CALL, FUNCTIONS
from ltc_core.graph.loop import BODIES, SCAN, WHILE
from ltc_core.graph.manual_sharding import OPS, manual_values
from ltc_core.program.index_checks import Bound, checks_of
from ltc_core.program.lowering.decompositions import FOR_XLA
from ltc_core.program.lowering.functional import trace
from ltc_core.program.lowering.functional_nodes import FunctionalNodes
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.scalar_inputs import kinds
from ltc_core.program.subgraph import Subgraph
from ltc_core.settings import settings

__all__ = ["LOWERING", "function_of", "run_graph"]

Function = Callable[..., list[Array]]
aten = torch.ops.aten


class _Lowering:
    """What is known of the ops that have no rule; one for the process."""

    def __init__(self) -> None:
        self.nodes = FunctionalNodes(RULES.__contains__)
        self._refused = NotedCalls()

    @property
    def refused_ops(self) -> frozenset[str]:
        """Names of the ops that always run on the host."""
        return frozenset(map(str, self._refused.ops))

    def refuses(self, node: Node, metas: Mapping[int, TensorMeta]) -> bool:
        """Whether a node has to run on the host."""
        return self._refused.has(node, metas)

    def refuse(self, node: Node, metas: Mapping[int, TensorMeta], why: str) -> None:
        """Run calls like this one on the host from now on."""
        self._refused.note_call(node, metas)
        where = f" at {node.line}" if node.line else ""
        tier_report.refuse(
            f"{node.op}{where}: {why}",
            "it runs on the host between two programs, with eager's results",
            is_printed=settings.explain,
        )


LOWERING = _Lowering()


def function_of(
    subgraph: Subgraph,
    checked: Sequence[int],
    joint: Collectives | None = None,
    manual_inputs: frozenset[int] = frozenset(),
) -> Function:
    """Function of the subgraph's inputs and vectors of scalars, to be traced by `jax.jit`.

    It returns the outputs, then, if `checked` is not empty, a vector: for each node at a position in `checked`, whether
    one of its indices is out of range. `joint` traces the collectives among the nodes. `manual_inputs` are the numbers
    of the inputs that are manual tensors.

    Raises:
        Refused: by the function; nodes without a rule. `LOWERING` has noted all of them.
        Misused: a manual tensor cannot be used so; by the function, if an op on it has no rule.
        FixedSizeError: by the function; inputs have free sizes, and an op needs the value of one.
    """
    graph = subgraph.graph
    own = manual_values(graph, manual_inputs)
    metas = graph.metas()
    chosen = set(checked)

    def run(*inputs: Array) -> list[Array]:
        count = len(graph.inputs)
        values: dict[int, Any] = dict(zip(graph.inputs, inputs[:count], strict=True))
        numbers = _unpack(subgraph.scalar_types, inputs[count:])
        has_free_sizes = any(map(has_free_size, inputs))
        refused: list[Refused] = []
        flags = []
        for at, node in enumerate(graph.nodes):
            if at in chosen:
                flags.append(_is_out_of_range(checks_of(node, metas), values))
            try:
                if node.op in collective.OPS:
                    assert joint is not None
                    results = collectives.call(node, values, joint.count, joint.is_cpu)
                elif node.op in OPS:
                    of = int(node.args[0])
                    results = [manual.call(node, values[of], is_whole=of not in own)]
                else:
                    results = _call(subgraph, node, metas, values, numbers, own)
            except FixedSizeError:
                raise
            except Exception as error:  # whatever a rule or a trace raises: the op runs on the host
                if node.op in NOT_ON_HOST:
                    raise RuntimeError(f"{node.op} has no rule for this call") from error
                why = _in_words(error)
                if has_free_sizes:
                    raise FixedSizeError(f"{node.op}: {why}") from error
                if node.first in own:
                    raise manual.no_rule(node, why) from error
                LOWERING.refuse(node, metas, why)
                refused.append(Refused(str(node.op), why))
                # Go on, to find all such nodes at once.
                results = [_stand_in(meta) for meta in node.outs if meta is not None]
            places = [node.first + i for i, meta in enumerate(node.outs) if meta is not None]
            values.update(zip(places, results, strict=True))
        if refused:
            raise refused[0]
        outputs = [values[i] for i in graph.outputs]
        return [*outputs, jnp.stack(flags)] if flags else outputs

    return run


def _in_words(error: Exception) -> str:
    kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
    return f"{kind}{error}".partition("\n")[0]


def _stand_in(meta: TensorMeta) -> Array:
    return jnp.zeros(meta.size, dtype_of(meta.dtype))


def _unpack(types: Sequence[type], vectors: Sequence[Array]) -> list[Array]:
    """The scalars, in order, from the vector of each type."""
    rest = {kind: iter(range(v.shape[0])) for kind, v in zip(kinds(types), vectors, strict=True)}
    of = dict(zip(kinds(types), vectors, strict=True))
    return [of[kind][next(rest[kind])] for kind in types]


def _is_out_of_range(checks: Sequence[Bound], values: Mapping[int, Array]) -> Array:
    found = jnp.zeros((), np.bool_)
    for check in checks:
        index = values[check.value]
        bad = (index < check.low) | (index > check.high)
        if check.also_legal is not None:
            bad &= index != check.also_legal
        found |= jnp.any(bad)
    return found


def _call(
    subgraph: Subgraph,
    node: Node,
    metas: Mapping[int, TensorMeta],
    values: Mapping[int, Array],
    numbers: Sequence[Array],
    manual_numbers: frozenset[int],
) -> list[Array]:
    """Results of a node, those that ATen leaves undefined left out; of a manual one on each device."""
    module, alone = LOWERING.nodes.of(subgraph, node, metas)
    inputs = [values[i] for i in alone.inputs]
    own = [numbers[k] for k in alone.scalars]
    for kind in kinds(alone.scalar_types):
        typed = [x for x, t in zip(own, alone.scalar_types, strict=True) if t is kind]
        inputs.append(jnp.stack(typed))
    if node.first not in manual_numbers:
        return run_graph(module, inputs)
    are_manual = [i in manual_numbers for i in alone.inputs]
    are_manual += [False] * (len(inputs) - len(are_manual))
    return manual.on_each_device(functools.partial(run_graph, module), inputs, are_manual)


_ASSERTIONS = {aten._assert_tensor_metadata.default, aten._assert_scalar.default}


def run_graph(
    module: GraphModule, inputs: Sequence[Array], sizes: Sizes | None = None
) -> list[Array]:
    """Run a functional graph of core ops.

    Args:
        sizes: the free sizes of the graph; None if it has none.

    Raises:
        NotImplementedError: an op has no rule.
    """
    rest = iter(inputs)
    there: dict[torch.fx.Node, Any] = {}

    def value(item: Any) -> Any:
        return there[item] if isinstance(item, torch.fx.Node) else item

    for node in module.graph.nodes:
        if node.op == "placeholder":
            there[node] = next(rest)
        elif node.op == "get_attr":
            constant = getattr(module, str(node.target)).detach()
            there[node] = (
                jnp.asarray(constant.numpy())
                if constant.dtype != torch.bfloat16
                else to_dtype(constant.float().numpy(), dtype_of(torch.bfloat16))
            )
        elif node.op == "output":
            return [there[item] for item in node.args[0]]
        elif node.target is operator.getitem:
            there[node] = there[node.args[0]][node.args[1]]
        elif sizes is not None and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat):
            there[node] = sizes.of(node.meta["val"])
        elif node.target in _ASSERTIONS:
            continue  # of what was true of the trace
        else:
            args, kwargs = pytree.tree_map(value, (list(node.args), dict(node.kwargs)))
            there[node] = _result(node, args, kwargs, sizes)
    raise AssertionError("a graph without output")


@functools.lru_cache(maxsize=256)
def _core_ops(body: str) -> GraphModule:
    """The body of a loop, in ops that have rules."""
    module, mode = BODIES[body], FakeTensorMode()
    with mode:
        fakes = [
            torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            for node in module.graph.find_nodes(op="placeholder")
        ]
    attention = {getattr(aten, name).default: rule for name, rule in FOR_XLA.items()}
    views = {aten.view.default: _view}
    return trace(module, fakes, mode, {**LOWERING.nodes.decompositions, **attention, **views})


def _view(t: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A view of a tensor in any memory order: arrays have none, and decompositions may choose another than ATen."""
    return aten._unsafe_view(t.clone(memory_format=torch.contiguous_format), size)  # type: ignore[no-any-return]


def _scan(
    call: Call,
    carry: list[Array],
    xs: list[Array],
    whole: list[Array],
    body: str,
    length: int,
    reverse: bool,
) -> list[Array]:
    module = _core_ops(body)

    def step(state: Sequence[Array], x: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        found = run_graph(module, [*state, *x, *whole])
        return found[: len(carry)], found[len(carry) :]

    last, stacked = lax.scan(step, list(carry), list(xs), length=length, reverse=reverse)
    return [*last, *stacked]


RULES[SCAN] = _scan


def _while(call: Call, carry: list[Array], whole: list[Array], cond: str, body: str) -> list[Array]:
    holds, goes_on = _core_ops(cond), _core_ops(body)

    def is_true(state: Sequence[Array]) -> Array:
        return run_graph(holds, [*state, *whole])[0].reshape(()).astype(bool)

    last: list[Array] = lax.while_loop(
        is_true, lambda state: run_graph(goes_on, [*state, *whole]), list(carry)
    )
    return last


RULES[WHILE] = _while


def _call_jax(call: Call, operands: list[Array], function: str) -> list[Array]:
    return FUNCTIONS[function].trace(*operands)


RULES[CALL] = _call_jax


def _result(
    node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any], sizes: Sizes | None
) -> Any:
    op = node.target
    assert isinstance(op, torch._ops.OpOverload)
    rule = RULES.get(op)
    if rule is None:
        raise NotImplementedError(f"no rule for {op}")
    wanted = node.meta["val"]
    if sizes is not None:
        wanted = pytree.tree_map_only(torch.Tensor, sizes.result, wanted)
    elif any(map(has_free_size, pytree.tree_leaves((args, kwargs)))):
        args, kwargs, wanted = _in_shape_of_result(op, args, kwargs, wanted)
    call = Call(op, wanted, node.args)
    found = rule(call, *args, **kwargs)
    if isinstance(wanted, torch.Tensor | Result):
        return _checked(found, wanted)
    return [
        None if w is None or f is None else _checked(f, w)
        for f, w in zip(found, wanted, strict=True)
    ]


def _in_shape_of_result(
    op: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any], wanted: Any
) -> tuple[list[Any], dict[str, Any], Any]:
    """The arguments of an op of a recorded graph, which has one shape, where operands have free sizes; and its result.

    Raises:
        FixedSizeError: the op is not elementwise.
    """
    if not (is_elementwise(op) and isinstance(wanted, torch.Tensor)):
        raise FixedSizeError(f"{op} is not elementwise")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    own = [leaves[k] for k in at]
    whole = broadcast(own) if len(own) > 1 else own
    for k, x in zip(at, whole, strict=True):
        leaves[k] = x
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs, Result(tuple(whole[0].shape), wanted.dtype)


def _checked(found: Any, wanted: torch.Tensor | Result) -> Array:
    """`found` in the dtype that it has in PyTorch.

    Raises:
        TypeError: it has another shape.
    """
    result = to_dtype(found, dtype_of(wanted.dtype))
    if result.shape != tuple(wanted.shape):
        raise TypeError(f"a result of shape {result.shape}, expected {tuple(wanted.shape)}")
    return result
