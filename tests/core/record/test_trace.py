"""The trie of what was recorded: what comes again is found, what fails leaves no mark."""

import gc
import random
from collections.abc import Callable, Iterator

import pytest
import torch

import ltc_core as ltc
from ltc_core.errors import LtcError
from ltc_core.graph.ir import Node, Ref, TensorMeta
from ltc_core.record.dynamic_shapes import Call
from ltc_core.record.trace import Step, Trace
from ltc_core.runtime.devices import context
from ltc_core.tensor.buffer import Buffer, MemoryCounter
from ltc_core.tensor.handles import Value
from ltc_core.tensor.lazy_tensor import LazyTensor, make_empty
from tests.core.counting import Counting

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)
OTHER = TensorMeta.packed((4,), torch.float32)


def no_call() -> Call:
    raise AssertionError("asked of dynamic steps alone")


class Recording:
    """A trace of its own, with ops that are nothing but their names."""

    def __init__(self) -> None:
        self.memory = MemoryCounter()
        self.trace = Trace(ltc.lazy_device(), self.memory)
        self.grown: list[str] = []

    def input(self, meta: TensorMeta = META) -> Value:
        return Value.of(Buffer.ready(self.memory, None, meta.nbytes))

    def op(
        self,
        name: str,
        *operands: Value,
        meta: TensorMeta = META,
        numbers: tuple[float, ...] = (),
        fails: str = "",
    ) -> Value:
        """Record an op as the recorder does; `name` stands for its schema.

        It `fails` where its node is made, or ("half") when half of it is recorded.
        """
        trace = self.trace
        try:
            before = trace.count
            key: list[object] = [name]
            for value in operands:
                key.append(value.index if value.epoch == trace.epoch else trace.bind(value, meta))

            def grow() -> Node:
                if fails == "node":
                    raise ValueError(name)
                self.grown.append(name)
                args = tuple(Ref(v.index) for v in operands)
                return Node(aten.relu.default, args, {}, trace.count, (META,), result=0)

            trace.advance(tuple(key), grow, before, list(numbers), no_call)
            if fails == "half":
                raise KeyboardInterrupt
            trace.scalars += numbers
            return trace.define()
        except BaseException:
            trace.rewind()
            raise

    def state(self) -> tuple[object, ...]:
        trace = self.trace
        return trace.cursor, trace.count, len(trace.inputs), len(trace.values), len(trace.scalars)


@pytest.fixture
def recording() -> Recording:
    return Recording()


# -- finding what came before ----------------------------------------------------------------------


def test_what_comes_again_grows_nothing(recording: Recording) -> None:
    x = recording.input()
    for _ in range(3):
        y = recording.op("a", x)
        y = recording.op("b", y, x)
        recording.trace.cut()
    assert recording.grown == ["a", "b"]
    assert recording.trace.steps == 2


def test_branches_are_all_remembered(recording: Recording) -> None:
    """Also those that were left long ago, in whatever order they come back."""
    x = recording.input()
    for order in ("abc", "cab", "bbca"):
        for name in order:
            recording.op(name, x)
            recording.op("then", x)
            recording.trace.cut()
    assert sorted(recording.grown) == ["a", "b", "c", "then", "then", "then"]


def test_operands_are_told_apart_by_number(recording: Recording) -> None:
    x, y = recording.input(), recording.input()
    for first, second in ((x, x), (x, y), (y, x)):
        recording.op("a", first, second)
        recording.op("b", first, second)
        recording.trace.cut()
    # (x, y) and (y, x) are one case where they are first read; the two later ops read 0 and 1.
    assert recording.grown == ["a", "b", "a", "b"]


def test_inputs_are_told_apart_by_meta_where_they_are_first_read(recording: Recording) -> None:
    recording.op("a", recording.input(META), meta=META)
    recording.trace.cut()
    recording.op("a", recording.input(OTHER), meta=OTHER)
    recording.trace.cut()
    recording.op("a", recording.input(META), meta=META)
    assert recording.grown == ["a", "a"]


def test_an_input_is_bound_once(recording: Recording) -> None:
    x = recording.input()
    y = recording.op("a", x, x)
    recording.op("b", y, x)
    assert [index for index, *_ in recording.trace.inputs] == [0]
    assert recording.trace.count == 3


def test_a_path_lists_its_steps_in_order(recording: Recording) -> None:
    x = recording.input()
    recording.op("a", x)
    recording.op("b", x, recording.input())
    end = recording.trace.cursor
    path = recording.trace.path(end)
    assert [step.inputs for step in path] == [((0, META),), ((2, META),)]
    assert path[-1] is end
    assert recording.trace.path(recording.trace.root) == []


def test_a_step_knows_what_its_tensors_are(recording: Recording) -> None:
    recording.op("a", recording.input())
    step = recording.trace.cursor
    assert isinstance(step, Step)
    assert step.node is not None
    (meta,) = step.node.outs
    assert meta is not None
    made = make_empty(meta, recording.trace.device)
    assert type(made) is LazyTensor
    assert (made.shape, made.dtype) == (META.size, META.dtype)
    assert (made.stride(), made.storage_offset()) == (META.stride, 0)
    assert made.device == ltc.lazy_device()


# -- what fails ------------------------------------------------------------------------------------


def test_an_op_that_fails_leaves_no_mark(recording: Recording) -> None:
    x, y, z = (recording.input() for _ in range(3))
    a = recording.op("a", x)
    before = recording.state()
    with pytest.raises(ValueError, match="bad"):
        recording.op("bad", a, y, z, fails="node")
    assert recording.state() == before
    assert (y.epoch, z.epoch) == (-1, -1)
    assert recording.op("b", z, y).index == 4
    assert (z.index, y.index) == (2, 3)


def test_the_same_loop_with_and_without_a_failing_op(recording: Recording) -> None:
    x, y = recording.input(), recording.input()

    def loop(fails: bool) -> None:
        value = recording.op("a", x)
        if fails:
            with pytest.raises(ValueError, match="bad"):
                recording.op("bad", value, y, fails="node")
        recording.op("b", value, y)
        recording.trace.cut()

    for fails in (False, True, False, True):
        loop(fails)
    assert recording.grown == ["a", "b"]


def test_a_value_that_died_meanwhile_can_be_taken_back(recording: Recording) -> None:
    x = recording.input()
    recording.trace.bind(x, META)
    del x
    recording.trace.rewind()
    assert recording.trace.count == 0
    assert recording.op("a", recording.input()).index == 1


def test_only_what_came_since_the_last_op_is_taken_back(recording: Recording) -> None:
    x, y = recording.input(), recording.input()
    a = recording.op("a", x, numbers=(0.5,))
    recording.trace.bind(y, META)
    recording.trace.scalars.append(7)
    recording.trace.rewind()
    assert (x.index, a.index, y.index, y.epoch) == (0, 1, -1, -1)
    assert recording.trace.count == 2
    assert recording.trace.scalars == [0.5]
    before = recording.state()
    recording.trace.rewind()
    assert recording.state() == before


def test_an_op_that_was_interrupted_is_recorded_with_dead_results(recording: Recording) -> None:
    """Ctrl-C may come at any place. The numbers of what follows are those of an op that was not."""
    x, y = recording.input(), recording.input()

    def loop(fails: str) -> Value:
        recording.op("a", x, numbers=(0.5,))
        if fails:
            with pytest.raises(KeyboardInterrupt):
                recording.op("b", y, numbers=(1.5, 2.5), fails=fails)
        else:
            recording.op("b", y, numbers=(1.5, 2.5))
        return recording.op("c", x, numbers=(3.5,))

    wanted, numbers = loop("").index, list(recording.trace.scalars)
    recording.trace.cut()
    last = loop("half")
    assert last.index == wanted
    assert len(recording.trace.scalars) == len(numbers)
    assert recording.trace.scalars[-1] == 3.5
    assert len(recording.trace.values) == recording.trace.count
    assert recording.trace.cut().alive == [(last.index, last)]
    assert recording.grown == ["a", "b", "c"]


def test_a_value_that_was_lost_raises_where_it_is_read(recording: Recording) -> None:
    lost = recording.input()
    assert lost.buffer is not None
    lost.buffer.fail(LtcError("lost in the background"))
    before = recording.state()
    with pytest.raises(LtcError, match="lost in the background"):
        recording.op("a", lost)
    assert recording.state() == before


# -- cutting ---------------------------------------------------------------------------------------


def test_a_cut_takes_what_is_alive_and_starts_anew(recording: Recording) -> None:
    trace = recording.trace
    x = recording.input()
    assert not trace
    kept = recording.op("a", x)
    recording.op("b", x)  # dies at once
    trace.scalars.append(0.5)
    epoch, end = trace.epoch, trace.cursor
    assert trace
    cut = trace.cut()
    assert cut.path is end
    assert cut.alive == [(kept.index, kept)]
    assert [(index, value) for index, value, _ in cut.inputs] == [(0, x)]
    assert cut.scalars == [0.5]
    assert not trace
    assert trace.epoch != epoch
    assert (trace.count, trace.inputs, trace.scalars) == (0, [], [])


def test_a_cut_tells_which_inputs_nobody_holds_any_more(recording: Recording) -> None:
    x, y = recording.input(), recording.input()
    buffer = x.buffer
    recording.op("a", x, y)
    del x
    cut = recording.trace.cut()
    assert [value for _, value, _ in cut.inputs] == [None, y]
    assert cut.inputs[0][2] is buffer  # the cut holds the memory


def test_a_view_is_no_output(recording: Recording) -> None:
    view = recording.trace.define_view()
    whole = recording.trace.define()
    assert (view.index, whole.index) == (0, 1)
    assert recording.trace.cut().alive == [(1, whole)]


def test_undefined_results_take_a_number(recording: Recording) -> None:
    recording.trace.skip()
    assert recording.trace.define().index == 1
    assert recording.trace.cut().alive == []


def test_forgetting_drops_the_trie(recording: Recording) -> None:
    x = recording.input()
    recording.op("a", x)
    recording.trace.cut()
    recording.trace.forget()
    assert recording.trace.steps == 0
    recording.op("a", x)
    assert recording.grown == ["a", "a"]


def test_epochs_are_never_used_twice() -> None:
    """A value of one device's trace is never taken for one of another's."""
    first, second = Recording().trace, Recording().trace
    epochs = {first.epoch, second.epoch}
    first.cut()
    second.cut()
    assert len(epochs | {first.epoch, second.epoch}) == 4


# -- the default dtype -----------------------------------------------------------------------------


@pytest.fixture
def integers() -> Iterator[torch.Tensor]:
    before = torch.get_default_dtype()
    yield torch.arange(4).view(2, 2).to(ltc.lazy_device())
    torch.set_default_dtype(before)


def test_the_default_dtype_may_change_between_steps(integers: torch.Tensor) -> None:
    for dtype in (torch.float32, torch.float64, torch.float64, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        half = integers / 2
        assert half.dtype == dtype
        ltc.mark_step()
        assert torch.equal(half.cpu(), torch.arange(4).view(2, 2) / 2)


def test_the_default_dtype_may_change_within_a_step(integers: torch.Tensor) -> None:
    for _ in range(2):
        torch.set_default_dtype(torch.float32)
        first = integers / 2
        torch.set_default_dtype(torch.float64)
        second = integers / 2
        assert (first.dtype, second.dtype) == (torch.float32, torch.float64)
        ltc.mark_step()
        assert (first.cpu().dtype, second.cpu().dtype) == (torch.float32, torch.float64)


def test_the_default_dtype_may_change_before_the_step_is_run(integers: torch.Tensor) -> None:
    ones = torch.ones(2, 2).to(ltc.lazy_device())
    product = (integers / 2) @ ones
    torch.set_default_dtype(torch.float64)
    ltc.mark_step(wait=True)
    assert torch.equal(product.cpu(), torch.tensor([[0.5, 0.5], [2.5, 2.5]], dtype=torch.float32))


def test_the_default_dtype_makes_no_difference_to_floats() -> None:
    x = torch.ones(2).to(ltc.lazy_device())

    def step() -> torch.Tensor:
        return (x * 2 + 1).sum()

    step()
    ltc.mark_step()
    before = context(0).trace.steps
    torch.set_default_dtype(torch.float64)
    try:
        assert step().dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert context(0).trace.steps == before


# -- whole programs --------------------------------------------------------------------------------

Program = list[Callable[[list[torch.Tensor]], None]]


def draw_program(draw: random.Random) -> Program:
    """Some ops over three tensors of 4x4, from so few kinds that programs share their beginnings."""

    def one() -> Callable[[list[torch.Tensor]], None]:
        a, b, c = (draw.randrange(3) for _ in range(3))
        n = draw.choice((0, 1))
        number = draw.randint(-3, 3)

        def binary(t: list[torch.Tensor]) -> None:
            t[c] = t[a] + t[b]

        def scaled(t: list[torch.Tensor]) -> None:
            t[c] = t[a] * number

        def in_place(t: list[torch.Tensor]) -> None:
            t[a].sub_(t[b].clone())

        def part(t: list[torch.Tensor]) -> None:
            t[a][n].add_(number)

        def view(t: list[torch.Tensor]) -> None:
            t[c] = t[a].transpose(0, 1)

        def copy(t: list[torch.Tensor]) -> None:
            t[c] = t[a].clone()

        def column(t: list[torch.Tensor]) -> None:
            t[a][:, n] = t[b][n].clone()

        def cut(t: list[torch.Tensor]) -> None:
            ltc.mark_step()

        def wrong(t: list[torch.Tensor]) -> None:
            with pytest.raises(RuntimeError):
                t[a].add(t[b][0, :3])

        kinds = [binary, scaled, in_place, part, view, copy, column, cut, wrong]
        return draw.choices(kinds, [4, 3, 4, 3, 2, 2, 2, 2, 1])[0]

    return [one() for _ in range(draw.randint(3, 9))]


def run_program(program: Program, device: torch.device) -> list[torch.Tensor]:
    tensors = [(torch.arange(16) * (k + 1)).view(4, 4).to(device) for k in range(3)]
    ltc.mark_step()
    for op in program:
        op(tensors)
    ltc.mark_step()
    return [t.cpu() for t in tensors]


def test_random_programs_in_random_order_give_eagers_answers() -> None:
    """Programs that begin alike, some with ops that fail; what came once grows nothing new."""
    draw = random.Random(0)
    programs = [draw_program(draw) for _ in range(250)]
    expected = [run_program(p, torch.device("cpu")) for p in programs]
    order = list(range(len(programs)))
    for repeat in range(2):
        draw.shuffle(order)
        gc.collect()
        before = context(0).trace.steps
        with Counting() as counted:
            for k in order:
                for got, wanted in zip(
                    run_program(programs[k], ltc.lazy_device()), expected[k], strict=True
                ):
                    assert torch.equal(got, wanted), f"program {k}, time {repeat}"
        if repeat:
            assert context(0).trace.steps == before
            assert counted.compiles == 0
