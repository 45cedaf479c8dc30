"""`with tier("lowered"):` a block in which the devices run their graphs in one tier.

- `ops`: op by op, on the reference executor.
- `early`: as `ops`, and whatever came before is expected again, and begins to run while it is recorded.
- `at_once`: ops run where they are called, but for each one's first call, which is recorded.
- `lowered`: partitioned, written down as for the compiler's process, read back and traced to FX graphs,
  which run as ATen: all that a compile does except PyTorch's compiler and g++, in milliseconds a graph.
- `parts`: as `lowered`, and PyTorch's compiler compiles each part in this process; what the compiled code gives is
  compared with what the FX graph does (`compared_part`). Seconds a graph.
- `compiled`: as shared libraries, each compiled before its first run.

Programs that a device has already are dropped at both ends of the block.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch

import ltc_core as ltc
from ltc_core.executors import Executor
from ltc_core.executors.inductor.compiled_subgraph import compiled_program
from ltc_core.executors.inductor.compiler.request import Request, decode, encode
from ltc_core.executors.inductor.executor import InductorExecutor
from ltc_core.executors.inductor.lowering.lower import Lowered, lower
from ltc_core.executors.inductor.numeric_flags import NumericFlags
from ltc_core.executors.inductor.partition import partition
from ltc_core.executors.inductor.tiers import TieredProgram
from ltc_core.graph.ir import Graph
from ltc_core.program.lowering.retrace import Refused
from ltc_core.program.program import Program
from ltc_core.program.subgraph import Subgraph
from ltc_core.runtime import devices, early_run, habit
from ltc_core.runtime.program_cache import ProgramCache
from ltc_core.settings import settings
from tests.core.stand_ins import Interpreted

__all__ = ["TIERS", "tier"]

TIERS = ("ops", "early", "at_once", "lowered", "parts", "compiled")


# FX traces in one thread at a time; the workers of several devices lower at once.
_tracing = threading.Lock()


class Runner(Protocol):
    """What runs a part."""

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


class _LoweredProgram(TieredProgram):
    """A graph whose parts are traced as the compiler's process traces them, and run as ATen.

    Args:
        make: what runs a part, of its FX graph.
    """

    def __init__(
        self,
        graph: Graph,
        reference: Any,
        hardware: torch.device,
        make: Callable[[Lowered], Runner],
    ) -> None:
        super().__init__(graph, reference, hardware)
        self._make = make

    def _start(self, scalars: Sequence[Any], flags: NumericFlags) -> None:
        refused: frozenset[str] = frozenset()
        while True:
            parts = partition(self.graph, scalars, self._programs.varied, refused)
            try:
                models: dict[int, Any] = {
                    k: _lowered(part, self._make) for k, part in enumerate(parts) if part.compiled
                }
            except Refused as error:
                assert error.op not in refused
                refused |= {error.op}
                continue
            program = compiled_program(self.graph, parts, models, self.hardware)
            self._programs.add(program, flags)
            return


def _lowered(part: Subgraph, make: Callable[[Lowered], Runner]) -> tuple[Runner, Sequence[int]]:
    """Lower a part in a thread of its own, which has none of the modes of the thread that asks."""
    request = decode(encode(Request(part, "cpu", torch.get_num_threads(), NumericFlags.now())))
    results: list[tuple[Runner, Sequence[int]]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found = lower(request.subgraph, request.device)
            results.append((make(found), found.returned))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    with _tracing:
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _interpreted(lowered: Lowered) -> Runner:
    return Interpreted(lowered.module)


def _compared(lowered: Lowered) -> Runner:
    from tests.nets.compared_part import ComparedPart  # imports PyTorch's compiler

    return ComparedPart(lowered)


class _LoweredExecutor(InductorExecutor):
    def __init__(self, make: Callable[[Lowered], Runner]) -> None:
        super().__init__()
        self._make = make

    def compile(self, graph: Graph) -> Program:
        return _LoweredProgram(graph, self.interpret(graph), self.hardware, self._make)


_EXECUTORS: dict[str, tuple[str, Callable[[], Executor]]] = {
    "ops": ("off", InductorExecutor),
    "early": ("off", InductorExecutor),
    "at_once": ("off", InductorExecutor),
    "lowered": ("sync", partial(_LoweredExecutor, _interpreted)),
    "parts": ("sync", partial(_LoweredExecutor, _compared)),
    "compiled": ("sync", InductorExecutor),
}


@contextlib.contextmanager
def tier(name: str, num_devices: int = 1) -> Iterator[None]:
    mode, make = _EXECUTORS[name]
    contexts = [devices.context(index) for index in range(num_devices)]
    before = [(context, context.executor) for context in contexts]
    try:
        _use([(context, make()) for context in contexts])
        with (
            settings.override(compile=mode, at_once="always" if name == "at_once" else "never"),
            _early() if name == "early" else contextlib.nullcontext(),
        ):
            yield
    finally:
        for context in contexts:
            context.at_once.end()
        _use(before)


@contextlib.contextmanager
def _early() -> Iterator[None]:
    with (
        mock.patch.object(early_run, "_LEAST_NS", 0),
        mock.patch.object(early_run, "_PART_NS", 1),
        mock.patch.object(early_run, "num_cores", lambda: 2),
        mock.patch.object(habit, "_SURE", 0),
        settings.override(streaming="auto", replay="always", dynamic_shapes="never"),
    ):
        yield


def _use(executors: Sequence[tuple[devices.DeviceContext, Executor]]) -> None:
    with contextlib.suppress(
        RuntimeError
    ):  # an error of the block, which the block has seen or reports
        ltc.wait_device_ops()
    for context, executor in executors:
        with context.trace.lock:
            if context.trace:
                context.trace.cut()
            context.trace.forget()
            context.executor = executor
            context.compiler = ProgramCache(executor)
