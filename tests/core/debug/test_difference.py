"""Aligning two graphs, what is found to differ, and which known graph is the nearest."""

import random

import pytest
import torch

from ltc_core.debug import explain as explain_module
from ltc_core.debug import nearest as nearest_module
from ltc_core.debug.difference import Hunk, align, compare
from ltc_core.debug.explain import KINDS, explain
from ltc_core.debug.nearest import Known, KnownGraphs, common_prefix, common_suffix
from ltc_core.graph.ir import Graph, Node, Ref, Scalar, TensorMeta, Write
from tests.core.random_graphs import random_graph

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)
OPS = {"a": aten.add.Tensor, "m": aten.mul.Tensor, "s": aten.sub.Tensor, "d": aten.div.Tensor}


def chain(ops: str, *, start: int = 0, line: str = "train.py", meta: TensorMeta = META) -> Graph:
    """Each op reads the one before and input `start`."""
    nodes = []
    for k, letter in enumerate(ops):
        args = (Ref(start + k), Ref(start))
        nodes.append(Node(OPS[letter], args, {}, start + k + 1, (meta,), line=f"{line}:{k}"))
    return Graph(tuple(nodes), {start: meta}, (start + len(ops),))


def known(graph: Graph, number: int = 1, path: object = None) -> Known:
    return Known(graph, number, "MarkStep", "train.py:9", path or object())


# -- strings ---------------------------------------------------------------------------------------


def test_common_ends() -> None:
    draw = random.Random(1)
    for _ in range(300):
        a, b = ("".join(draw.choices("xy", k=draw.randrange(9))) for _ in range(2))
        end = min(len(a), len(b))
        assert common_prefix(a, b) == max(n for n in range(end + 1) if a[:n] == b[:n])
        assert common_suffix(a, b) == max(
            n for n in range(end + 1) if a[len(a) - n :] == b[len(b) - n :]
        )


def edited(draw: random.Random, text: str) -> str:
    for _ in range(draw.randrange(4)):
        i = draw.randrange(len(text) + 1)
        new = "".join(draw.choices("pqrst", k=draw.randrange(6)))
        text = text[:i] + new + text[min(len(text), i + draw.randrange(6)) :]
    return text


def test_blocks_and_hunks_cover_both_strings() -> None:
    """In order, without a gap, blocks equal on both sides, and most of what is equal found."""
    draw = random.Random(2)
    for _ in range(300):
        a = "".join(draw.choices("abcdefghijklmno", k=draw.randrange(200)))
        b = edited(draw, a)
        i, j = draw.randrange(2), draw.randrange(2)
        i, j = min(i, len(a)), min(j, len(b))
        blocks, hunks = align(a, b, i, j)
        for block_i, block_j, n in blocks:
            assert n > 0 and a[block_i : block_i + n] == b[block_j : block_j + n]
        spans = [(x, x + n, y, y + n) for x, y, n in blocks] + [tuple(h) for h in hunks]
        for from_i, to_i, from_j, to_j in sorted(spans):
            assert (from_i, from_j) == (i, j) and (to_i, to_j) > (i, j)
            i, j = to_i, to_j
        assert (i, j) == (len(a), len(b))
        assert sum(n for _, _, n in blocks) >= len(a) - 80


@pytest.mark.parametrize(("a", "b", "hunks"), [
    ("abcdefgh" * 4, "abcdefgh" * 4, []),
    ("abcdefghijklmnop", "abcdXfghijklmnop", [(4, 5, 4, 5)]),
    ("abcdefghijklmnop", "abcdefghXYijklmnop", [(8, 8, 8, 10)]),
    ("abcdefghijklmnop", "abcdijklmnop", [(4, 8, 4, 4)]),
    ("abcdefghijklmnop", "ijklmnop", [(0, 8, 0, 0)]),
    ("abcdefghijklmnop", "abcdefgh", [(8, 16, 8, 8)]),
    ("abcdefgh", "ijklmnop", [(0, 8, 0, 8)]),
    ("abcdefgh", "ijklmnoph", [(0, 7, 0, 8)]),
    ("abcdefghijklmnopqrstuvwx", "aXcdefghijklYZnopqrstuvwx", [(1, 2, 1, 2), (12, 13, 12, 14)]),
])  # fmt: skip
def test_hunks(a: str, b: str, hunks: list[tuple[int, ...]]) -> None:
    assert align(a, b)[1] == [Hunk(*h) for h in hunks]


def test_strings_that_differ_everywhere_end_in_one_hunk() -> None:
    a = "".join(chr(200 + k) + "bcdefg" for k in range(40))
    b = "".join(chr(900 + k) + "bcdefg" for k in range(40))
    blocks, hunks = align(a, b)
    assert len(hunks) == 17 and hunks[-1].old_to == len(a) and hunks[-1].new_to == len(b)


# -- graphs ----------------------------------------------------------------------------------------


def test_a_graph_and_itself() -> None:
    for seed in range(50):
        graph = random_graph(seed).graph
        found = compare(known(graph), known(graph))
        assert found.is_same_code and found.num_aligned == len(graph.nodes)
        assert not (any(found.outputs) or any(found.donated) or found.extra_inputs)


def test_value_numbers_do_not_matter() -> None:
    found = compare(known(chain("amsd")), known(chain("amsd", start=7)))
    assert found.is_same_code and found.num_aligned == 4 and not any(found.outputs)


def test_changed_inputs_are_named_once() -> None:
    small = TensorMeta.packed((1, 3), torch.float32)
    found = compare(known(chain("amsd")), known(chain("amsd", start=7, meta=small)))
    ((at, reader, old, new, number),) = found.inputs
    assert (at, number, old, new, reader.line) == (0, 7, META, small, "train.py:0")
    assert len(found.results) == 4


def test_what_two_graphs_share_is_not_looked_at() -> None:
    """Nodes of one recording are the same objects; a list without `args` shows that nobody reads them."""
    old = chain("amsdam")
    tail = Node(aten.sub.Tensor, (Ref(4), Ref(0)), {}, 5, (META,))
    new = Graph((*old.nodes[:4], tail), old.inputs, (5,))
    for node in old.nodes[:4]:
        node.args = None  # type: ignore[assignment]
    found = compare(known(old), known(new))
    assert found.num_aligned == 4 and found.hunks == [Hunk(4, 6, 4, 5)]


def test_ops_that_only_one_set_of_outputs_needs() -> None:
    """In one recording, what is between shared nodes is no hunk: it was dead in the other graph."""
    whole = chain("ams")
    middle = Node(aten.div.Tensor, (Ref(1), Ref(1)), {}, 9, (META,))
    new = Graph((whole.nodes[0], middle, *whole.nodes[1:]), whole.inputs, (9, 3))
    found = compare(known(whole), known(new))
    assert found.is_same_code and found.outputs == ([9], [])
    back = compare(known(new), known(whole))
    assert back.is_same_code and back.outputs == ([], [9])


def one(
    *args: object, inputs: int = 2, outs: tuple[TensorMeta, ...] = (META,), **kwargs: object
) -> Graph:
    node = Node(aten.add.Tensor, args, kwargs, 10, outs, line="train.py:1")
    return Graph((node,), dict.fromkeys(range(inputs), META), (10,))


LONG = tuple(range(40))


@pytest.mark.parametrize(("old", "new", "name", "change"), [
    (one(Ref(0), 1), one(Ref(0), 2), "other", "1 -> 2"),
    (one(Ref(0), 1), one(Ref(0), Scalar(0)), "other", "1 -> a number"),
    (one(Ref(0), None), one(Ref(0), Ref(1)), "other", "None -> a tensor"),
    (one(Ref(0), (1, 2)), one(Ref(0), (1, 2, 3)), "other", "[1, 2] -> [1, 2, 3]"),
    (one(Ref(0), (1, 2)), one(Ref(0), LONG), "other", f"[1, 2] -> {str(list(LONG))[:60]}..."),
    (one([Ref(0)], 1), one([Ref(0), Ref(1)], 1), "self", "a list of 1 -> a list of 2"),
    (one(Ref(0), 1, alpha=1), one(Ref(0), 1, alpha=2), "alpha", "1 -> 2"),
    (one(Ref(0), 1, alpha=1), one(Ref(0), 1), "alpha", "1 -> None"),
    (one(Ref(0)), one(Ref(0), 2), "other", "None -> 2"),
    (one(Write(0, ()), 1), one(Ref(0), 1), "self", "a tensor -> a tensor"),
])  # fmt: skip
def test_structural_arguments(old: Graph, new: Graph, name: str, change: str) -> None:
    found = compare(known(old), known(new))
    assert [argument.key for argument in found.arguments] == [name]
    assert not found.is_same_code
    graphs = KnownGraphs()
    explain(old, graphs, "MarkStep", object())
    cause = explain(new, graphs, "MarkStep", object())
    assert cause.sentence.endswith(f"argument: aten::add at train.py:1: {name} {change}")


def test_numbers_are_no_structure() -> None:
    found = compare(known(one(Ref(0), Scalar(0))), known(one(Ref(0), Scalar(5))))
    assert found.is_same_code


def test_operands() -> None:
    same_twice, two = one(Ref(0), Ref(0)), one(Ref(0), Ref(1))
    assert [c.at for c in compare(known(same_twice), known(two)).operands] == [0]
    assert [c.at for c in compare(known(two), known(same_twice)).operands] == [0]
    assert compare(known(two), known(one(Ref(1), Ref(0)))).is_same_code


def test_other_results_alone() -> None:
    """No op is known that does this; the cause has a name all the same."""
    wider = TensorMeta.packed((2, 9), torch.float32)
    graphs = KnownGraphs()
    explain(one(Ref(0)), graphs, "MarkStep", object())
    cause = explain(one(Ref(0), outs=(wider,)), graphs, "MarkStep", object())
    assert cause.sentence == (
        "other results: aten::add at train.py:1 makes float32[2, 9] where it made float32[2, 3]"
    )
    two = explain(one(Ref(0), outs=(META, META)), graphs, "MarkStep", object())
    assert two.sentence.endswith("aten::add at train.py:1 makes another number of values")


def test_any_two_graphs_have_a_cause() -> None:
    kinds = set()
    for seed in range(300):
        graphs = KnownGraphs()
        draw = random.Random(seed)
        for other in (seed, draw.choice((seed, seed + 1)), seed + 2):
            graph = random_graph(other, draw.choice((3, 12, 40))).graph
            if graph.nodes:
                cause = explain(graph, graphs, draw.choice(("MarkStep", "Item")), object())
                kinds.add(cause.kind)
                assert cause.sentence.startswith(f"{cause.kind}: ") and "\n" not in cause.sentence
    assert kinds <= set(KINDS) - {"unknown"} and len(kinds) > 5


# -- the nearest -----------------------------------------------------------------------------------


def nearest_of(new: str, *olds: str) -> str:
    graphs = KnownGraphs()
    for number, ops in enumerate(olds):
        graphs.add(known(chain(ops), number))
    return olds[graphs.nearest(known(chain(new))).number]


@pytest.mark.parametrize(("new", "olds", "wanted"), [
    ("amsd" * 9, ("amsd" * 9, "amsd" * 8, "dddd"), "amsd" * 9),
    ("amsd" * 9, ("dddd", "amsd" * 8, "sm" * 18), "amsd" * 8),
    ("amsd" * 9, ("dsma" * 9, "amsd" * 6 + "aaa" + "amsd" * 3), "amsd" * 6 + "aaa" + "amsd" * 3),
    ("am" * 4, ("amsd" * 2, "am" * 4 + "sd" * 30), "am" * 4 + "sd" * 30),
])  # fmt: skip
def test_the_nearest(new: str, olds: tuple[str, ...], wanted: str) -> None:
    assert nearest_of(new, *olds) == wanted
    assert nearest_of(new, *olds[::-1]) == wanted


def test_graphs_of_one_recording_are_nearest() -> None:
    graphs, path = KnownGraphs(), object()
    graph = chain("amsd")
    part = Graph(graph.nodes[:2], graph.inputs, (2,))
    graphs.add(known(chain("am", start=5), 1))
    graphs.add(known(graph, 2, path))
    assert graphs.nearest(known(part, 3, path)).number == 2
    assert graphs.nearest(known(part, 3)).number == 1


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_module, "_MAX_GRAPHS", 3)
    graphs = KnownGraphs()
    for number in range(5):
        graphs.add(known(chain("amsd"[: number + 1] if number < 4 else "dd"), number))
    assert len(graphs) == 3
    monkeypatch.setattr(nearest_module, "_MAX_NODES", 9)
    graphs.add(known(chain("amsdams"), 9))
    assert [k.number for k in graphs._graphs.values()] == [4, 9]
    graphs.add(known(chain("amsdamsdamsd"), 10))
    assert [k.number for k in graphs._graphs.values()] == [10]
    graphs.forget()
    assert len(graphs) == 0 and graphs.last is None and graphs._num_nodes == 0


def test_a_graph_that_is_compared_with_is_kept_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_module, "_MAX_GRAPHS", 2)
    graphs = KnownGraphs()
    for number, ops in enumerate(("amsd" * 3, "dd", "amsd" * 2)):
        new = known(chain(ops), number)
        if number == 2:
            assert graphs.nearest(new).number == 0
        graphs.add(new)
    assert [k.number for k in graphs._graphs.values()] == [0, 2]


def test_letters_leave_out_what_is_no_character() -> None:
    """An op's letter must be writable: half of a surrogate pair is not."""
    assert known(chain("amsd")).ops.encode()
    assert all(ord(letter) >= 0xE000 for letter in nearest_module._letters.values())


def test_one_graph_is_looked_at_however_many_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        explain_module, "compare", lambda old, new: compared.append(old) or compare(old, new)
    )
    graphs = KnownGraphs()
    draw = random.Random(3)
    for _ in range(40):
        explain(chain("".join(draw.choices("amsd", k=20))), graphs, "MarkStep", object())
    assert len(compared) == 39 and len(graphs) == 40
