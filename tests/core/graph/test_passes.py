"""Passes: what is dead is dropped, and memory is reused where nobody else needs it, and only there.

The plan of each of many random graphs is held against a model of memory written anew here; that the
plans give right answers when they run is held by test_reference.py.
"""

import torch

from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta, Write, references
from ltc_core.graph.passes import count_ops, prune
from ltc_core.program.plan import MemoryPlan, plan
from tests.core.random_graphs import random_graph

aten = torch.ops.aten
SEEDS = range(800)
META = TensorMeta.packed((2, 3), torch.float32)  # 24 bytes
NO_NODE = -1


def add(first: int, a: int, b: int) -> Node:
    return Node(aten.add.Tensor, (Ref(a), Ref(b)), {}, first, (META,), result=0)


def add_in_place(first: int, old: int, other: int) -> Node:
    args = (Write(0, ()), Ref(other))
    return Node(aten.add_.Tensor, args, {}, first, (META,), (old,), result="self")


def transposed(first: int, a: int) -> Node:
    meta = TensorMeta.of((3, 2), (1, 3), 0, torch.float32)
    return Node(aten.t.default, (Ref(a),), {}, first, (meta,), view=True, result=0)


def graph(nodes: list[Node], outputs: tuple[int, ...], inputs: int = 1, donated: int = 0) -> Graph:
    """A graph with this many inputs, of which the first so many are donated."""
    return Graph(
        tuple(nodes), dict.fromkeys(range(inputs), META), outputs, frozenset(range(donated))
    )


# -- prune and count_ops ---------------------------------------------------------------------------


def test_prune_drops_what_no_output_needs() -> None:
    used, dead, last = add(1, 0, 0), add(2, 1, 1), add(3, 1, 0)
    assert prune([used, dead, last], [3]) == (used, last)


def test_prune_of_nothing_wanted_is_empty() -> None:
    assert prune([add(1, 0, 0)], []) == ()


def test_prune_keeps_a_write_whose_new_value_is_wanted() -> None:
    made, written, other = add(1, 0, 0), add_in_place(2, 1, 0), add(3, 1, 1)
    assert prune([made, written, other], [2]) == (made, written)
    assert prune([made, written, other], [3]) == (made, other)


def test_prune_keeps_a_node_one_of_whose_results_is_wanted() -> None:
    outs = (META, META)
    many = Node(aten.split.Tensor, (Ref(0), 1), {}, 1, outs, view=True, result=[0, 1])
    assert prune([many], [2]) == (many,)


def test_prune_finds_operands_in_lists_and_keywords() -> None:
    in_list = Node(aten.cat.default, ([Ref(1), Ref(2)],), {}, 3, (META,), result=0)
    by_name = Node(aten.cat.default, ((),), {"other": [None, Ref(3)]}, 4, (META,), result=0)
    nodes = [add(1, 0, 0), add(2, 0, 0), in_list, by_name]
    assert prune(nodes, [4]) == tuple(nodes)


def test_prune_gives_just_the_nodes_that_outputs_depend_on() -> None:
    """Random graphs, against a search from each output."""
    for seed in SEEDS[:200]:
        found = random_graph(seed).graph
        wanted = found.outputs[:1]
        maker = {node.first + i: node for node in found.nodes for i in range(len(node.outs))}
        needed: set[int] = set()
        stack = [maker[i] for i in wanted]
        while stack:
            node = stack.pop()
            if id(node) not in needed:
                needed.add(id(node))
                stack += [maker[i] for i in references(node) if i in maker]
        assert prune(found.nodes, wanted) == tuple(n for n in found.nodes if id(n) in needed)


def test_count_ops_counts_by_aten_name() -> None:
    nodes = [add(1, 0, 0), add_in_place(2, 1, 0), add(3, 2, 0)]
    assert count_ops(nodes) == {"add": 2, "add_": 1}
    assert count_ops([]) == {}


# -- plan: single facts ----------------------------------------------------------------------------


def test_a_donated_input_is_written_in_place() -> None:
    found = plan(graph([add_in_place(2, 0, 1)], (2,), inputs=2, donated=1))
    assert found.in_place == [(True,)]
    assert found.reuses == {2: 0}
    assert found.copied == frozenset()


def test_a_kept_input_is_not_written_in_place() -> None:
    found = plan(graph([add_in_place(2, 0, 1)], (2,), inputs=2))
    assert found.in_place == [(False,)]
    assert found.reuses == {}


def test_an_old_value_that_is_read_later_is_not_overwritten() -> None:
    nodes = [add_in_place(2, 0, 1), add(3, 0, 1)]
    assert plan(graph(nodes, (2, 3), inputs=2, donated=2)).in_place[0] == (False,)


def test_an_old_value_that_is_an_output_is_not_overwritten() -> None:
    nodes = [add(1, 0, 0), add_in_place(2, 1, 0)]
    assert plan(graph(nodes, (1, 2), donated=1)).in_place[1] == (False,)
    assert plan(graph(nodes, (2,), donated=1)).in_place[1] == (True,)


def test_a_view_of_the_old_value_that_is_read_later_protects_it() -> None:
    nodes = [transposed(1, 0), add_in_place(2, 0, 0), add(3, 1, 1)]
    nodes[1] = Node(aten.zero_.default, (Write(0, ()),), {}, 2, (META,), (0,), result="self")
    assert plan(graph(nodes, (2, 3), donated=1)).in_place[1] == (False,)
    assert plan(graph(nodes[:2], (2,), donated=1)).in_place[1] == (True,)


def test_an_op_that_reads_what_it_writes_gets_a_copy() -> None:
    """`x.add_(x.t())` must not see its own writes."""
    nodes = [transposed(1, 0), add_in_place(2, 0, 1)]
    assert plan(graph(nodes, (2,), donated=1)).in_place[1] == (False,)


def test_two_writes_of_one_value_each_get_a_copy() -> None:
    """Two tensors that share a value after `clone`, both updated by one foreach op."""
    args = ([Write(0, ()), Write(1, ())], [Ref(1), Ref(1)])
    node = Node(aten._foreach_add_.List, args, {}, 2, (META, META), (0, 0), result=None)
    assert plan(graph([node], (2, 3), inputs=2, donated=1)).in_place == [(False, False)]


def test_a_result_that_may_be_its_operand_counts_as_the_same_memory() -> None:
    flat = TensorMeta.packed((6,), torch.float32)
    node = Node(aten._unsafe_view.default, (Ref(0), (6,)), {}, 1, (flat,), result=0)
    assert plan(graph([node], (1,))).copied == {1}  # the input is somebody else's
    assert plan(graph([node], (1,), donated=1)).reuses == {1: 0}
    both = [add(1, 0, 0), Node(aten._unsafe_view.default, (Ref(1), (6,)), {}, 2, (flat,), result=0)]
    assert plan(graph(both, (1, 2))).copied == {2}  # one of two outputs in one memory


def test_a_value_nobody_reads_is_freed_where_it_is_made() -> None:
    many = Node(aten.split.Tensor, (Ref(0), 1), {}, 1, (META, META), view=True, result=[0, 1])
    found = plan(graph([many, add(3, 1, 1)], (3,), donated=1))
    assert 2 in found.frees[0]
    assert 1 in found.frees[1]


def test_peak_counts_what_is_held_at_once() -> None:
    """A chain of three holds two at a time, whatever its length; the output is not counted."""
    chain = [add(k + 1, k, k) for k in range(6)]
    assert plan(graph(chain, (6,))).peak_bytes == 2 * META.nbytes
    fan = [add(k + 1, 0, 0) for k in range(4)] + [
        Node(aten.cat.default, ([Ref(k) for k in range(1, 5)],), {}, 5, (META,), result=0)
    ]
    assert plan(graph(fan, (5,))).peak_bytes == 4 * META.nbytes
    assert plan(graph([add(1, 0, 0)], (1,))).peak_bytes == 0


def test_peak_counts_the_copy_a_write_needs() -> None:
    nodes = [add_in_place(1, 0, 0), add(2, 1, 1)]
    assert plan(graph(nodes, (2,))).peak_bytes == META.nbytes
    nodes[0] = Node(aten.zero_.default, (Write(0, ()),), {}, 1, (META,), (0,), result="self")
    assert plan(graph(nodes, (2,), donated=1)).peak_bytes == 0  # in the input's memory


def test_origins_lead_from_an_output_to_the_input_it_was() -> None:
    nodes = [add_in_place(2, 0, 1), add_in_place(3, 2, 1), add(4, 3, 1), add_in_place(5, 4, 1)]
    assert plan(graph(nodes, (3, 5), inputs=2, donated=1)).origins[3] == (2, 0)


def test_a_plan_of_an_empty_graph_is_empty() -> None:
    found = plan(Graph((), {}, ()))
    assert (found.in_place, found.frees, found.peak_bytes) == ([], [], 0)


# -- plan: against a model of memory ---------------------------------------------------------------


class Memory:
    """Walks a graph as a plan says and knows which values are in which piece of memory."""

    def __init__(self, found: Graph, planned: MemoryPlan) -> None:
        self.graph, self.planned = found, planned
        self.place = {i: i for i in found.inputs}  # value -> the first value in this memory
        self.last_read = {i: len(found.nodes) for i in found.outputs}
        for at, node in reversed(list(enumerate(found.nodes))):
            for i in references(node):
                self.last_read.setdefault(i, at)

    def others_later(self, place: int, at: int) -> list[int]:
        """Values in this memory that somebody reads after node `at`."""
        return [v for v, p in self.place.items() if p == place and self.last_read.get(v, -1) > at]

    def must_copy(self, at: int, old: int) -> bool:
        """Tell, from scratch, whether a write of `old` by node `at` may not run in its memory."""
        node, place = self.graph.nodes[at], self.place[old]
        if place in self.graph.inputs and place not in self.graph.donated:
            return True
        operands = list(references(node))
        in_same_memory = [i for i in operands if self.place[i] == place]
        return len(in_same_memory) > 1 or bool(self.others_later(place, at))

    def walk(self) -> None:
        """Check each decision, then place what the node defines."""
        for at, node in enumerate(self.graph.nodes):
            wanted = [not self.must_copy(at, old) for old in node.writes]
            assert list(self.planned.in_place[at]) == wanted, f"node {at}: {node}"
            self.define(node, self.planned.in_place[at])

    def define(self, node: Node, in_place: tuple[bool, ...]) -> None:
        results = range(node.first, node.first + len(node.outs) - len(node.writes))
        for value in results:
            aliases = node.view or node.op is aten._unsafe_view.default
            self.place[value] = self.place[references(node)[0]] if aliases else value
        for k, (old, reuse) in enumerate(zip(node.writes, in_place, strict=True)):
            new = node.first_write + k
            self.place[new] = self.place[old] if reuse else new


def test_a_write_runs_in_place_exactly_when_nobody_else_needs_the_memory() -> None:
    in_place = copied = 0
    for seed in SEEDS:
        found = random_graph(seed).graph
        planned = plan(found)
        Memory(found, planned).walk()
        decided = [reuse for writes in planned.in_place for reuse in writes]
        in_place += sum(decided)
        copied += len(decided) - sum(decided)
    assert min(in_place, copied) > 500  # both were put to the test


def test_each_value_is_freed_once_after_its_last_use() -> None:
    for seed in SEEDS:
        found = random_graph(seed).graph
        planned = plan(found)
        freed_at = {}
        for at, values in enumerate(planned.frees):
            for value in values:
                assert value not in freed_at
                freed_at[value] = at
        memory = Memory(found, planned)
        for at, node in enumerate(found.nodes):
            for value in range(node.first, node.first + len(node.outs)):
                if value not in found.outputs:
                    assert freed_at[value] == memory.last_read.get(value, at)
        assert not set(found.outputs) & freed_at.keys()
        for value in found.inputs:
            assert freed_at[value] == memory.last_read[value]


def test_outputs_never_share_memory_nor_lie_in_a_kept_input() -> None:
    for seed in SEEDS:
        found = random_graph(seed).graph
        planned = plan(found)
        memory = Memory(found, planned)
        memory.walk()
        places = [memory.place[o] for o in found.outputs if o not in planned.copied]
        assert len(set(places)) == len(places)
        assert not set(places) & (found.inputs.keys() - found.donated)
        reused = {o: memory.place[o] for o in found.outputs if o not in planned.copied}
        assert planned.reuses == {o: p for o, p in reused.items() if p in found.donated}


def test_peak_bytes_is_the_most_that_lives_at_once() -> None:
    for seed in SEEDS:
        found = random_graph(seed).graph
        planned = plan(found)
        memory = Memory(found, planned)
        memory.walk()
        last = len(found.nodes)
        outside = {memory.place[o] for o in found.outputs} | found.inputs.keys()
        sizes = {i: meta.nbytes for i, meta in found.metas().items()}
        made = {
            node.first + i: at for at, node in enumerate(found.nodes) for i in range(len(node.outs))
        }
        peak = 0
        for at in range(last):
            alive = {
                memory.place[v]
                for v, born in made.items()
                if born <= at <= memory.last_read.get(v, born)
            }
            peak = max(peak, sum(sizes[p] for p in alive - outside))
        assert planned.peak_bytes == peak, f"seed {seed}\n{found}"


def test_origins_of_random_graphs_are_whole_chains_of_writes() -> None:
    """Down to an input, or to the op that made the first version."""
    for seed in SEEDS[:300]:
        found = random_graph(seed).graph
        before = {n.first_write + k: old for n in found.nodes for k, old in enumerate(n.writes)}
        origins = plan(found).origins
        assert origins.keys() == set(found.outputs)
        for output, versions in origins.items():
            chain = [output, *versions]
            assert chain[1:] == [before[version] for version in chain[:-1]]
            assert chain[-1] not in before
