"""Programs: what makes a new one, what is found again, what is evicted, what a failed compile leaves."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.errors import SettingsError
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.executors.reference.program import ReferenceProgram
from ltc_core.graph.ir import Graph, TensorMeta
from ltc_core.program.plan import plan
from ltc_core.program.program import Program, Tier, Watch
from ltc_core.runtime import device_context as context_module
from ltc_core.runtime.devices import context
from ltc_core.runtime.program_cache import ProgramCache
from ltc_core.settings import Settings, settings
from tests.core.counting import Counting

pytestmark = pytest.mark.usefixtures("exact_shapes")

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)


class WatchedExecutor(ReferenceExecutor):
    """Knows which of its programs are still there, and the graphs it compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[Graph] = []
        self.programs: list[weakref.ref[Program]] = []
        self.error: Exception | None = None

    def compile(self, graph: Graph) -> Any:
        if self.error is not None:
            raise self.error
        self.graphs.append(graph)
        program = super().compile(graph)
        self.programs.append(weakref.ref(program))
        return program

    @property
    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self.programs)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedExecutor]:
    """A compiler of its own for device 0, with nothing compiled yet."""
    ltc.mark_step(wait=True)
    context(0).trace.forget()
    watched = WatchedExecutor()
    monkeypatch.setattr(context(0), "executor", watched)
    monkeypatch.setattr(context(0), "compiler", ProgramCache(watched))
    yield watched
    ltc.mark_step(wait=True)
    context(0).trace.forget()  # its programs are not the next test's


@pytest.fixture
def x() -> Iterator[Tensor]:
    yield torch.arange(6.0).view(2, 3).to(ltc.lazy_device())


def counted(name: str, counting: Counting) -> int:
    return counting.so_far().get(name, 0)


# -- what makes a program --------------------------------------------------------------------------


def test_the_same_step_is_compiled_once(executor: WatchedExecutor, x: Tensor) -> None:
    with Counting() as counting:
        for _ in range(4):
            y = x * 2
            ltc.mark_step()
    assert torch.equal(y.cpu(), x.cpu() * 2)
    assert len(executor.graphs) == 1
    assert counted("UncachedCompile", counting) == 1
    assert counted("CachedCompile", counting) == 3


def test_what_is_alive_at_the_cut_is_part_of_the_key(executor: WatchedExecutor, x: Tensor) -> None:
    for _ in range(2):
        y = x * 2
        z = y + 1
        ltc.mark_step()
        del y, z
        z = x * 2 + 1
        ltc.mark_step()
        del z
    assert [len(g.outputs) for g in executor.graphs] == [2, 1]


def test_what_is_given_up_is_part_of_the_key(executor: WatchedExecutor) -> None:
    device = ltc.lazy_device()
    for _ in range(2):
        x = torch.ones(3).to(device)
        x.add_(1)
        ltc.mark_step()
        x = torch.ones(3).to(device)
        before = x.clone()
        x.add_(1)
        ltc.mark_step()
        assert torch.equal(before.cpu(), torch.ones(3))
        del before
    assert [len(g.donated) for g in executor.graphs] == [1, 0]


def test_shapes_and_dtypes_are_part_of_the_key(executor: WatchedExecutor) -> None:
    device = ltc.lazy_device()
    for t in (torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2)):
        kept = t.to(device) * 2
        ltc.mark_step()
        assert torch.equal(kept.cpu(), t * 2)
    assert len(executor.graphs) == 3


def test_a_prefix_of_a_known_step_is_another_program(executor: WatchedExecutor, x: Tensor) -> None:
    for _ in range(2):
        y = x * 2
        ltc.mark_step()
        del y
        y = x * 2
        y = y + 1
        ltc.mark_step()
        del y
    assert [len(g.nodes) for g in executor.graphs] == [1, 2]


def test_only_what_is_read_is_an_input(executor: WatchedExecutor, x: Tensor) -> None:
    other = torch.ones(2, 3).to(x.device)
    other.exp().sum()  # dead
    y = x + 1
    ltc.mark_step()
    (graph,) = executor.graphs
    assert len(graph.inputs) == 1
    assert [node.op for node in graph.nodes] == [aten.add.Tensor]
    assert torch.equal(y.cpu(), x.cpu() + 1)


def test_inputs_are_given_in_the_graphs_order(executor: WatchedExecutor) -> None:
    device = ltc.lazy_device()
    a, b, c = (torch.full((2,), v).to(device) for v in (1.0, 10.0, 100.0))
    (b * c).sum()  # binds b before the others, and is dead
    d = c - a
    ltc.mark_step()
    assert d.tolist() == [99.0, 99.0]


def test_compiles_are_observed(executor: WatchedExecutor, x: Tensor) -> None:
    before = metrics.metric_data("TensorsGraphSize")
    y = (x * 2 + 1).exp()
    ltc.mark_step(wait=True)
    after = metrics.metric_data("TensorsGraphSize")
    assert after is not None
    count, total = (after[0], after[1]) if before is None else (
        after[0] - before[0], after[1] - before[1],
    )  # fmt: skip
    assert (count, total) == (1, 3)
    assert metrics.metric_data("CompileTime") is not None
    assert y.shape == (2, 3)


# -- eviction --------------------------------------------------------------------------------------


def run_of_size(n: int) -> None:
    """A step that only graphs of this size have."""
    kept = torch.ones(n).to(ltc.lazy_device()) * 3
    ltc.mark_step()
    assert kept.tolist() == [3.0] * n


@pytest.mark.parametrize("size", [1, 2, 5])
def test_at_most_so_many_programs_are_kept(executor: WatchedExecutor, size: int) -> None:
    with settings.override(compilation_cache_size=size), Counting() as counting:
        for n in range(1, 8):
            run_of_size(n)
            assert executor.num_alive <= size
    gc.collect()
    assert executor.num_alive == size
    assert counted("EvictedCompile", counting) == 7 - size
    assert counted("UncachedCompile", counting) == 7


def test_the_longest_unused_goes_first(executor: WatchedExecutor) -> None:
    with settings.override(compilation_cache_size=2), Counting() as counting:
        for n in (1, 2, 1, 3, 1, 2):  # 3 drives out 2, not 1
            run_of_size(n)
    assert counted("UncachedCompile", counting) == 4
    assert counted("CachedCompile", counting) == 2
    assert counted("EvictedCompile", counting) == 2


def test_an_evicted_step_is_compiled_again_and_right(executor: WatchedExecutor, x: Tensor) -> None:
    eager = x.cpu()
    with settings.override(compilation_cache_size=1):
        for k in range(6):
            y = x * 2 if k % 2 else x + k
            ltc.mark_step()
            assert torch.equal(y.cpu(), eager * 2 if k % 2 else eager + k)
            del y
    assert len(executor.graphs) == 6


def test_enough_room_evicts_nothing(executor: WatchedExecutor) -> None:
    with settings.override(compilation_cache_size=8), Counting() as counting:
        for n in (1, 2, 3, 1, 2, 3):
            run_of_size(n)
    assert counted("EvictedCompile", counting) == 0
    assert len(executor.graphs) == 3


def test_a_program_in_flight_may_be_evicted(executor: WatchedExecutor) -> None:
    with settings.override(compilation_cache_size=1):
        kept = []
        for n in range(1, 9):
            kept.append(torch.ones(n).to(ltc.lazy_device()) * n)
            ltc.mark_step()
    assert [t.sum().item() for t in kept] == [n * n for n in range(1, 9)]


def test_the_setting_is_read_from_the_environment() -> None:
    assert Settings.from_environ({}).compilation_cache_size == 1024
    for name in ("LTC_COMPILATION_CACHE_SIZE", "XLA_COMPILATION_CACHE_SIZE"):
        assert Settings.from_environ({name: "7"}).compilation_cache_size == 7
    with pytest.raises(SettingsError, match="LTC_COMPILATION_CACHE_SIZE has an illegal value"):
        Settings.from_environ({"LTC_COMPILATION_CACHE_SIZE": "0"})


def test_a_program_that_never_repeats_itself_forgets(
    executor: WatchedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trie and its programs are dropped when there are too many steps, and all goes on."""
    monkeypatch.setattr(context_module, "_TRIE_STEPS", 10)
    x = torch.ones(3).to(ltc.lazy_device())
    with Counting() as counting:
        for n in range(1, 30):
            run_of_size(n)
            x.add_(1)
            ltc.mark_step()
            assert context(0).trace.steps <= 12
    assert counted("TrieForgotten", counting) >= 2
    assert x.tolist() == [30.0] * 3
    gc.collect()  # a step and its parent refer to each other
    assert executor.num_alive <= 12


# -- small programs --------------------------------------------------------------------------------


def test_small_and_large_programs_run_in_the_order_of_their_cuts(executor: WatchedExecutor) -> None:
    """Small ones run where they are cut, but never before what was handed over earlier."""
    device = ltc.lazy_device()
    small = torch.ones(2).to(device)
    large = torch.ones(300, 300).to(device) / 300
    for _ in range(5):
        small.add_(1)
        ltc.mark_step()
    for k in range(20):
        large = large @ large * 300 / 300
        small.mul_(1 + large[0, 0])
        ltc.mark_step()
        small.add_(k)
        ltc.mark_step()
    wanted = torch.full((2,), 6.0)
    host = torch.ones(300, 300) / 300
    for k in range(20):
        host = host @ host * 300 / 300
        wanted.mul_(1 + host[0, 0]).add_(k)
    assert torch.allclose(small.cpu(), wanted)


class FreeProgram(ReferenceProgram):
    """Says of itself that it leaves Python's lock free, and notes the threads it runs in."""

    tier = Tier.COMPILED  # type: ignore[assignment]
    native = None  # type: ignore[assignment]
    threads: list[str] = []

    def run(self, inputs: Any, scalars: Any, watch: Watch | None = None) -> list[Any]:
        self.threads.append(threading.current_thread().name)
        return super().run(inputs, scalars, watch)


def test_native_programs_are_tried_here_and_in_the_worker_in_the_order_of_their_cuts(
    executor: WatchedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(graph: Graph) -> FreeProgram:
        return FreeProgram(graph, plan(graph), None)

    monkeypatch.setattr(executor, "compile", compile)
    monkeypatch.setattr(FreeProgram, "threads", [])
    device = ltc.lazy_device()
    x, y = torch.ones(3).to(device), torch.zeros(3).to(device)
    for k in range(60):
        x.mul_(-1).add_(k)
        ltc.mark_step()
        y.add_(x)
        ltc.mark_step()
    here = threading.current_thread().name
    assert {here} < set(FreeProgram.threads)
    wanted, total = torch.ones(3), torch.zeros(3)
    for k in range(60):
        wanted.mul_(-1).add_(k)
        total.add_(wanted)
    assert torch.equal(x.cpu(), wanted) and torch.equal(y.cpu(), total)


# -- a compile that fails --------------------------------------------------------------------------


def test_a_graph_that_cannot_be_compiled_loses_no_parameter(
    executor: WatchedExecutor, x: Tensor
) -> None:
    eager = x.cpu()
    x.mul_(2)
    y = x + 1
    executor.error = RuntimeError("no compiler today")
    with pytest.raises(RuntimeError, match="no compiler today"):
        ltc.mark_step(wait=True)
    executor.error = None
    assert torch.equal(x.cpu(), eager)  # as before the step, not zeros
    with pytest.raises(RuntimeError, match="no compiler today"):
        y.cpu()
    x.add_(1)
    ltc.mark_step(wait=True)
    assert torch.equal(x.cpu(), eager + 1)
