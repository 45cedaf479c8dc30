"""Random small graphs, each with what eager PyTorch makes of it, for tests of plans and executors.

`random_graph(seed)` draws ops over a few values: pure ones, views, writes through lenses, several
writes in one op, draws from a random state; inputs kept and donated, outputs that descend from one
another. The simulation knows nothing of memory: each value is a packed copy of its own, and a write
through a lens is a write through an index. Integers, so that answers agree to the last bit.
"""

import dataclasses
import random
from typing import Any

import torch

from ltc_core.graph.ir import Graph, Lens, Node, Ref, Scalar, TensorMeta, ViewStep, Write
from ltc_core.graph.passes import prune

__all__ = ["RandomGraph", "random_graph"]

aten = torch.ops.aten
STATE = torch.Generator().manual_seed(7).get_state()
SHAPES = ((4, 4), (4, 4), (4, 4), (2, 4), (8,), (4, 2, 2), ())


@dataclasses.dataclass
class RandomGraph:
    """A graph, the data to run it on, and each value it defines (`values`, by number)."""

    graph: Graph
    inputs: list[torch.Tensor]
    scalars: list[int]
    values: dict[int, torch.Tensor]

    def fresh_inputs(self) -> list[torch.Tensor]:
        return [t.clone() for t in self.inputs]

    @property
    def expected(self) -> list[torch.Tensor]:
        return [self.values[i] for i in self.graph.outputs]


def random_graph(seed: int, num_ops: int = 12) -> RandomGraph:
    return _Maker(random.Random(seed)).make(num_ops)


def _indices(size: torch.Size, lens: Lens) -> torch.Tensor:
    """Give, for each element of the part that `lens` leads to, its place in the packed whole."""
    part = torch.arange(size.numel()).view(size)
    for step in lens:
        part = _step_on_packed(part, step)
    return part


def _step_on_packed(t: torch.Tensor, step: ViewStep) -> torch.Tensor:
    result = step.op(t.clone(memory_format=torch.contiguous_format), *step.args)
    return (result if step.which is None else result[step.which]).contiguous()


class _Maker:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.values: dict[int, torch.Tensor] = {}
        self.whole: list[int] = []  # values that a tensor may hold as a whole: no views
        self.inputs: dict[int, TensorMeta] = {}
        self.nodes: list[Node] = []
        self.scalars: list[int] = []
        self.count = 0
        self.state: int | None = None  # the newest state of the random stream
        self.packed: set[int] = set()  # values whose real tensor is surely packed: draws fill those
        self.expanded: set[int] = set()  # views that are one element several times
        for _ in range(2):
            self.add_input()

    def make(self, num_ops: int) -> RandomGraph:
        kinds = [
            (self.add_input, 1),
            (self.add_pure, 3),
            (self.add_cat, 1),
            (self.add_view, 4),
            (self.add_split, 1),
            (self.add_unsafe_view, 1),
            (self.add_write, 7),
            (self.add_foreach, 2),
            (self.add_out, 1),
            (self.add_random, 1),
        ]
        for _ in range(num_ops):
            self.draw.choices([k for k, _ in kinds], [w for _, w in kinds])[0]()
        return self.finish()

    def finish(self) -> RandomGraph:
        made = [i for i in self.whole if i not in self.inputs]
        if not made:
            self.add_pure()
            made = [self.whole[-1]]
        wanted = self.draw.sample(made, self.draw.randint(1, len(made)))
        nodes = prune(self.nodes, wanted)
        read = {i for node in nodes for i in _operands(node)}
        inputs = {i: meta for i, meta in self.inputs.items() if i in read}
        donated = frozenset(i for i in inputs if self.draw.random() < 0.6)
        graph = Graph(nodes, inputs, tuple(sorted(wanted)), donated)
        return RandomGraph(graph, [self.values[i] for i in inputs], self.scalars, self.values)

    # -- values ----------------------------------------------------------------------------------

    def define(self, *results: torch.Tensor, whole: bool = True) -> int:
        """Number the results of a node; gives the first number."""
        first = self.count
        for result in results:
            self.values[self.count] = result.clone(memory_format=torch.contiguous_format)
            if whole:
                self.whole.append(self.count)
            self.count += 1
        return first

    def add_input(self) -> None:
        shape = self.draw.choice(SHAPES)
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        number = self.define(torch.randint(-9, 9, shape, generator=generator))
        self.inputs[number] = TensorMeta.like(self.values[number])
        self.packed.add(number)

    def pick(self, shape: torch.Size | None = None) -> int:
        """Pick a value to read, of this shape if there is one (0-dim values fit any)."""
        fit = [i for i, t in self.values.items() if t.dtype is torch.int64]
        if shape is not None:
            fit = [i for i in fit if self.values[i].shape in (shape, torch.Size())]
        if shape is not None and not fit:
            return -1
        return self.draw.choice(fit)

    def pick_whole(self) -> int:
        return self.draw.choice([i for i in self.whole if self.values[i].dtype is torch.int64])

    def scalar(self) -> tuple[Scalar, int]:
        self.scalars.append(self.draw.randint(-3, 3))
        return Scalar(len(self.scalars) - 1), self.scalars[-1]

    def other(self, shape: torch.Size) -> tuple[Any, Any]:
        """Give a second operand for a tensor of `shape`: (in the node, in the simulation)."""
        number = self.pick(shape)
        if number < 0 or self.draw.random() < 0.25:
            return self.scalar()
        return Ref(number), self.values[number]

    def add_node(
        self, op: Any, args: tuple[Any, ...], results: list[torch.Tensor], **more: Any
    ) -> None:
        whole = not more.get("view", False)
        metas = tuple(TensorMeta.packed(t.shape, t.dtype) for t in results)
        first = self.define(*results, whole=whole)
        kwargs = more.pop("kwargs", {})
        writes = more.get("writes", ())
        for k, old in enumerate(writes):
            if old in self.packed:
                self.packed.add(first + len(results) - len(writes) + k)
        if not whole and (op is aten.expand.default or int(args[0]) in self.expanded):
            self.expanded.update(range(first, first + len(results)))
        self.nodes.append(Node(op, args, kwargs, first, metas, **more))

    # -- ops -------------------------------------------------------------------------------------

    def add_pure(self) -> None:
        a = self.pick()
        op = self.draw.choice([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor])
        b, b_value = self.other(self.values[a].shape)
        self.add_node(op, (Ref(a), b), [op(self.values[a], b_value)], result=0)

    def add_cat(self) -> None:
        a = self.pick()
        if self.values[a].dim() == 0 or self.values[a].numel() > 64:
            return
        b = self.pick(self.values[a].shape)
        if self.values[b].dim() == 0:
            b = a
        result = aten.cat.default([self.values[a], self.values[b]], 0)
        self.add_node(aten.cat.default, ([Ref(a), Ref(b)], 0), [result], result=0)

    def view_step(self, shape: torch.Size) -> ViewStep | None:
        """Draw one view step that fits a tensor of this shape."""
        if len(shape) == 0 or 0 in shape:
            return None
        d = self.draw.randrange(len(shape))
        n = shape[d]
        first = self.draw.randrange(n)
        steps = [
            ViewStep(aten.slice.Tensor, (d, first, self.draw.randint(first + 1, n))),
            ViewStep(aten.slice.Tensor, (d, 0, n, 2)),
            ViewStep(aten.select.int, (d, first)),
            ViewStep(aten.transpose.int, (0, len(shape) - 1)),
            ViewStep(aten.view.default, ((-1,),)),
            ViewStep(aten.unsqueeze.default, (d,)),
            ViewStep(aten.unbind.int, (d,), first),
            ViewStep(aten.as_strided.default, ((shape.numel() // 2,), (2,), shape.numel() % 2)),
        ]
        if len(shape) > 1:
            steps.append(ViewStep(aten.diagonal.default, (0, 0, 1)))
        return self.draw.choice(steps)

    def lens(self, shape: torch.Size) -> Lens:
        lens: list[ViewStep] = []
        for _ in range(self.draw.choice((0, 0, 0, 1, 1, 2, 3))):
            step = self.view_step(shape)
            if step is None:
                break
            part = _indices(shape, (step,))
            if part.numel() == 0:
                break
            lens.append(step)
            shape = part.shape
        return tuple(lens)

    def add_view(self) -> None:
        a = self.pick()
        t = self.values[a]
        step = self.view_step(t.shape)
        if step is None or step.which is not None:
            step = ViewStep(aten.expand.default, ((3, *t.shape),))
        if t.numel() > 64:
            return
        result = step.op(t, *step.args)
        self.add_node(step.op, (Ref(a), *step.args), [result], view=True, result=0)

    def add_split(self) -> None:
        a = self.pick()
        t = self.values[a]
        if t.dim() == 0 or t.shape[0] % 2:
            return
        parts = list(aten.split.Tensor(t, t.shape[0] // 2 or 1, 0))
        args = (Ref(a), t.shape[0] // 2 or 1, 0)
        spec = list(range(len(parts)))
        self.add_node(aten.split.Tensor, args, parts, view=True, result=spec)

    def add_unsafe_view(self) -> None:
        a = self.pick()
        if a in self.expanded:
            return
        result = self.values[a].reshape(-1)
        self.add_node(aten._unsafe_view.default, (Ref(a), (-1,)), [result], result=0)

    def write(self, old: int, lens: Lens, change: Any) -> torch.Tensor:
        """Give the whole after `change` was made to the part of value `old`."""
        t = self.values[old]
        where = _indices(t.shape, lens)
        part = t.reshape(-1)[where].clone()
        change(part)
        flat = t.reshape(-1).clone()
        flat[where] = part
        return flat.view(t.shape)

    def add_write(self) -> None:
        old = self.pick_whole()
        lens = self.lens(self.values[old].shape)
        part_shape = _indices(self.values[old].shape, lens).shape
        name = self.draw.choice(("add", "mul", "copy", "fill", "zero"))
        target = Write(0, lens)
        if name == "zero":
            new = self.write(old, lens, lambda part: part.zero_())
            args: tuple[Any, ...] = (target,)
            op = aten.zero_.default
        elif name == "fill":
            scalar, number = self.scalar()
            new = self.write(old, lens, lambda part: part.fill_(number))
            args, op = (target, scalar), aten.fill_.Scalar
        else:
            b, b_value = self.other(part_shape)
            if name == "copy" and not isinstance(b, Ref):
                return
            ops = {"add": aten.add_.Tensor, "mul": aten.mul_.Tensor, "copy": aten.copy_.default}
            op = ops[name]
            new = self.write(old, lens, lambda part: op(part, b_value))
            args = (target, b)
        self.add_node(op, args, [new], writes=(old,), result="self")

    def add_foreach(self) -> None:
        """Write several values in one op; two of them may be the same value (after a clone)."""
        olds = [self.pick_whole() for _ in range(self.draw.randint(1, 3))]
        others = [self.pick(self.values[old].shape) for old in olds]
        if min(others) < 0:
            return
        new = [
            self.values[a] + self.values[b].expand_as(self.values[a])
            for a, b in zip(olds, others, strict=True)
        ]
        args = ([Write(k, ()) for k in range(len(olds))], [Ref(b) for b in others])
        self.add_node(aten._foreach_add_.List, args, new, writes=tuple(olds), result=None)

    def add_out(self) -> None:
        old = self.pick_whole()
        shape = self.values[old].shape
        a, b = self.pick(shape), self.pick(shape)
        if min(a, b) < 0:
            return
        new = (self.values[a] + self.values[b]).expand(shape)
        if (self.values[a] + self.values[b]).shape != shape:
            return
        args, kwargs = (Ref(a), Ref(b)), {"out": Write(0, ())}
        self.add_node(aten.add.out, args, [new], kwargs=kwargs, writes=(old,), result="out")

    def add_random(self) -> None:
        """Draw numbers into a value: the state of the stream is read and written too."""
        if self.state is None:
            self.state = self.define(STATE, whole=False)
            self.inputs[self.state] = TensorMeta.like(STATE)
        old = self.draw.choice(sorted(self.packed))
        generator = torch.Generator()
        generator.set_state(self.values[self.state])
        new = self.values[old].clone().random_(0, 9, generator=generator)
        self.add_node(
            getattr(aten.random_, "from"),
            (Write(0, ()), 0, 9),
            [new, generator.get_state()],
            kwargs={"generator": Write(1, ())},
            writes=(old, self.state),
            result="self",
        )
        self.state = self.count - 1


def _operands(node: Node) -> list[int]:
    found = list(node.writes)
    stack = [*node.args, *node.kwargs.values()]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, Ref):
            found.append(int(item))
    return found
