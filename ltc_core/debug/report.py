"""Reports of cuts: `on_cut` is called at each cut, and reports it and saves its graph if the settings ask for that.

The reports have the form that users of torch_xla's PT_XLA_DEBUG know: a block for each graph that is built and, at
level 2, for each run of one, with the user's frames. For scripts of torch_xla (`settings.compat`) they have its words,
too, since tools read them. `frequent` says at the end what was too frequent.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from ltc_core import errors, source
from ltc_core.debug.dump import graph_text
from ltc_core.debug.explain import Cause
from ltc_core.graph.arguments import leaves
from ltc_core.graph.ir import Graph, Scalar, Write
from ltc_core.metrics_report import bytes_text
from ltc_core.program.program import Program
from ltc_core.settings import file_of_rank, settings

__all__ = ["compiling", "graph_hash", "on_cut", "say"]

_WIDTH = 80
_LINE = "-" * _WIDTH

# Why a graph was cut, by the reason that `DeviceContext.cut` is given; any other reason is the op that needed a value.
_CAUSES = {
    "MarkStep": "user {sync}",
    "SyncMulti": "user sync of some tensors",
    "Wait": "user wait for the device",
    "OptimizerStep": "the end of a step that is not marked: optimizer.step()",
    "Upload": "the end of a step that is not marked: the next batch is moved to the device",
    "GraphLimit": "the loop was cut at its head: there was no mark_step for LTC_TRIM_GRAPH_SIZE ops",
    "Collective": "other processes may wait for a collective of the graph",
    "Streaming": "a part of a step begins to run while the rest of the step is recorded",
    "Eager": "LTC_EAGER=1, a graph for each op",
}
_LOOKING = "most likely user code trying to access tensor value before {sync}"

_AFTER_STEP_TRACE = "{sync} when exiting a profiler StepTrace region"

# The same for a mark_step by a part of ours, by its module.
_CALLERS = {
    "ltc_dist.data.loader": "{sync} in parallel loader at step end",
    "ltc_core.profiler": _AFTER_STEP_TRACE,
    "ltc_dist.compat.torch_xla.debug.profiler": _AFTER_STEP_TRACE,
}
_GIB = 1024**3


class _Region(threading.local):
    """What this thread compiles under a name: the graph's name, and why it is cut."""

    name = ""
    cause = ""


_region = _Region()


class CompiledGraph(Protocol):
    """What a report says of a compiled graph; `runtime.program_cache.CompiledGraph` has it."""

    graph: Graph
    program: Program
    cause: Cause | None

    @property
    def runs(self) -> int: ...


def on_cut(device: torch.device, reason: str, compiled: CompiledGraph, elapsed_ns: int) -> None:
    """Report a cut as `settings.debug`, `settings.emit_steplog` and `settings.save_tensors_file` ask."""
    if settings.save_tensors_file is not None:
        _save(device, reason, compiled)
    if settings.emit_steplog:
        print(
            f"[ltc] {device}: {reason}, graph {graph_hash(compiled.graph)}",
            file=sys.stderr,
            flush=True,
        )
    if settings.debug and not (settings.compat and reason == "Eager"):
        _report(device, reason, compiled, elapsed_ns)


def graph_hash(graph: Graph) -> str:
    """Return 32 digits that are the same for the same graph, in every process."""
    return hashlib.sha256(graph.text().encode()).hexdigest()[:32]


def say(title: str, lines: Iterable[str]) -> None:
    """Write a block of a report to stderr, or to `settings.debug_file`; each line bears the title."""
    text = "".join(f"{title}: {line}\n" for line in ("=" * _WIDTH, *lines, "=" * _WIDTH))
    if settings.debug_file is None:
        sys.stderr.write(text)
        sys.stderr.flush()
        return
    try:
        with open(file_of_rank(settings.debug_file), "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        path, settings.debug_file = settings.debug_file, None
        raise errors.SettingsError(
            f"the reports cannot be written to {path}: {error.strerror}",
            where="LTC_DEBUG_FILE",
            next="name a file that can be written; this run goes on with stderr",
        ) from None


def _report(device: torch.device, reason: str, compiled: CompiledGraph, elapsed_ns: int) -> None:
    is_new = compiled.runs == 1
    cause, facts = _cause(reason), _facts(compiled, reason)
    if is_new:
        why = [f"  {compiled.cause.sentence}"] if compiled.cause is not None else []
        say("Compilation Analysis", ["Compilation Cause", f"  {cause}", *why, *facts])
        say("Post Compilation Analysis", _sizes(compiled))
    if settings.debug >= 2:
        took = f"  Handed over in {elapsed_ns / 1e6:.2f} ms to {device}, run {compiled.runs} of this graph"
        say("Execution Analysis", ["Execution Cause", f"  {cause}", *facts, took])
    if settings.debug >= 3:
        say("Graph", compiled.graph.text(lines=True).splitlines())


def _cause(reason: str) -> str:
    if reason == "MarkStep":
        found = _region.cause or _CALLERS.get(source.called_module(), _CAUSES[reason])
    else:
        found = _CAUSES.get(reason) or f"{_LOOKING} ({reason})"
    return found.format(sync="torch_xla.sync" if settings.compat else "mark_step")


def _facts(compiled: CompiledGraph, reason: str) -> list[str]:
    graph = compiled.graph
    arguments = [item for node in graph.nodes for item in leaves(node.args, *node.kwargs.values())]
    numbers = {int(item) for item in arguments if type(item) is Scalar}
    drawn_from = {
        node.first_write + given.base
        for node in graph.nodes
        if isinstance(given := node.kwargs.get("generator"), Write)
    }
    return [
        "Graph Info:",
        *([f"  Graph Name: {_region.name}"] if _region.name else []),
        f"  Graph Hash: {graph_hash(graph)}",
        f"  Number of Graph Inputs: {len(graph.inputs) + len(numbers)}",
        f"  Number of Graph Outputs: {len(set(graph.outputs) - drawn_from)}",
        f"  Number of Graph Ops: {len(graph.nodes)}",
        "Python Frame Triggered Execution:",
        *(f"  {frame}" for frame in _frames(reason) or ["(none of yours)"]),
        *([_LINE] if settings.compat else []),
    ]


def _frames(reason: str) -> list[str]:
    """The user's frames, innermost first; for a script of torch_xla below its function that cuts."""
    most = settings.debug_frames
    found = source.user_frames(most + 1)
    if not settings.compat:
        return found[:most]
    if reason == "MarkStep":
        found.insert(0, "sync (torch_xla/torch_xla.py)")
    return [*found[:most], ".........."] if len(found) > most else found


def _sizes(compiled: CompiledGraph) -> list[str]:
    graph, program = compiled.graph, compiled.program
    metas = graph.metas()
    aliased = set(program.reuses.values())
    sizes = {
        "Graph input size": sum(meta.nbytes for meta in graph.inputs.values()),
        "Graph output size": sum(metas[number].nbytes for number in graph.outputs),
        "Aliased Input size": sum(graph.inputs[number].nbytes for number in aliased),
        "Intermediate tensor size": program.peak_bytes,
    }
    if not settings.compat:
        return [f"{name}: {bytes_text(size)}" for name, size in sizes.items()]
    sizes["Compiled program size"] = 0  # compiled code comes later, if it does
    return [*(f"{name}: {size / _GIB:.6f} GB" for name, size in sizes.items()), _LINE]


@contextlib.contextmanager
def compiling(name: str, cause: str) -> Iterator[None]:
    """Let the reports of this thread's cuts within a `with` block bear a name and a cause."""
    _region.name, _region.cause = name, cause
    try:
        yield
    finally:
        _region.name, _region.cause = "", ""


def _save(device: torch.device, reason: str, compiled: CompiledGraph) -> None:
    path = settings.save_tensors_file
    assert path is not None
    texts = _texts(compiled)
    if not texts:
        return
    header = f"[GraphInfo; device={device}; sync={reason}; run={compiled.runs}]"
    try:
        with open(file_of_rank(path), "a", encoding="utf-8") as file:
            file.writelines(f"{header}\n{text}\n\n" for text in texts)
    except OSError as error:
        settings.save_tensors_file = None
        raise errors.SettingsError(
            f"the graphs cannot be written to {path}: {error.strerror}",
            where="LTC_SAVE_TENSORS_FILE",
            next="name a file that can be written; this run goes on without",
        ) from None


def _texts(compiled: CompiledGraph) -> list[str]:
    """The graph of a run as text; as HLO, the programs that were compiled since the last cut."""
    if settings.save_tensors_fmt != "hlo":
        return [graph_text(compiled.graph, settings.save_tensors_fmt, lines=settings.ir_debug)]
    found = compiled.program.take_hlo()
    if found is None:
        settings.save_tensors_fmt = "text"
        print(
            f"ltc: LTC_SAVE_TENSORS_FMT=hlo: the executor {settings.executor} has no HLO, graphs are written as text. "
            "Next: LTC_EXECUTOR=jax",
            file=sys.stderr,
        )
        return _texts(compiled)
    return found
