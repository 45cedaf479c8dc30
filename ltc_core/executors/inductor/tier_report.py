"""What `metrics.summary` and LTC_EXPLAIN say of the tiers: how graphs run now, what they wait for, what was refused.

`refuse` gathers the reasons why something is not compiled: each is printed once, and counted. `tiers` adds each of its
programs here, as a weak reference; a report reads them when it is asked for, so a launch pays only for its counters.
`setup` registers `sentences` with the metrics. Called by `tiers`, `compiled_subgraph` and `executor`.
"""

from __future__ import annotations

import abc
import enum
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ltc_core.errors import listed
from ltc_core.graph.ir import Node
from ltc_core.settings import settings

__all__ = [
    "COMPILED_RUNS",
    "OP_BY_OP_RUNS",
    "REPLAYED_RUNS",
    "Reported",
    "State",
    "graph_lines",
    "recorded_at",
    "refuse",
    "sentences",
]

# Names of the counters; each launch adds one to one of the first two. The third counts launches of whole graphs in C++.
OP_BY_OP_RUNS = "OpByOpRun"
COMPILED_RUNS = "CompiledRun"
REPLAYED_RUNS = "ReplayedRun"

_MAX_REASONS = 100  # reasons that are kept apart
_MAX_QUOTED = 5
_OTHER = "other reasons, which are not kept apart"


class State(enum.Enum):
    """How a graph runs now, and why; `{after}` says when it is compiled."""

    COMPILED = "compiled"
    BUILDING = "op by op while it is compiled in the background"
    NEW = "op by op, to be compiled {after}"
    OFF = "op by op, because of LTC_COMPILE=off"
    NOTHING = "op by op, none of its ops can be compiled"
    DYNAMIC = "op by op for inputs of all sizes, so it is not compiled"
    OTHER_VALUES = (
        "op by op, it is compiled for other values of its numbers or of PyTorch's numeric flags"
    )
    SLOWER = "op by op in C++, which was quicker than compiled code in steps of the script"
    SHORT = "op by op in C++, so short that a launch of compiled code would take longer"
    REFUSED = "op by op, it was refused (the reason is below)"
    DROPPED = "op by op, the process ended before it was compiled"

    @property
    def words(self) -> str:
        runs = settings.compile_after
        after = f"if it comes back (after {runs} runs, LTC_COMPILE_AFTER)"
        if not runs:
            after = "after some more seconds of steps"
        return self.value.format(after=after)


# What the user can do if the graph that ran last is in this state.
_NEXT = {
    State.BUILDING: "go on training: the compiler takes what the steps leave of the cores "
    "(LTC_COMPILE_PRIORITY=low gives it more, and slows them); LTC_COMPILE=sync waits for the compiler before the "
    "first run; a later run of the script starts with what is compiled by the end of this one",
    State.OFF: "LTC_COMPILE=async compiles graphs that come back",
    State.DYNAMIC: "pad inputs to one or two sizes, or LTC_DYNAMIC_SHAPES=never has each size compiled for itself",
    State.DROPPED: "train for longer, or LTC_COMPILE=sync waits for the compiler before the first run",
}


class Reported(abc.ABC):
    """A program that the reports describe.

    Attributes:
        op_by_op_runs: its launches that ran op by op.
        compiled_runs: those that ran compiled code.
        last_run: number of its last launch among the launches of this process; 0 if it has not run.
        kept: op, with the user's line -> why it is not compiled.
    """

    def __init__(self) -> None:
        self.op_by_op_runs = self.compiled_runs = self.last_run = 0
        self.kept: dict[str, str] = {}
        _programs[next(_numbers)] = self

    @property
    @abc.abstractmethod
    def state(self) -> State:
        """How it runs now."""

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """The graph in words: 'a graph of 26 ops (recorded at train.py:12)'."""

    @property
    @abc.abstractmethod
    def progress(self) -> str:
        """What there is to say beside the state: ', for 12 s so far'; "" for nothing."""


class _Reason:
    def __init__(self, next: str) -> None:
        self.next = next
        self.count = 0


_numbers = itertools.count()
_programs: weakref.WeakValueDictionary[int, Reported] = weakref.WeakValueDictionary()
_reasons: dict[str, _Reason] = {}


def recorded_at(nodes: Sequence[Node]) -> str:
    """The user's lines of some nodes, in brackets: ' (recorded at train.py:12 and 4 more)'; "" if none is known."""
    lines = dict.fromkeys(node.line for node in nodes if node.line)
    return f" (recorded at {listed(lines, 1)})" if lines else ""


def refuse(reason: str, next: str, is_printed: bool = True) -> None:
    """Note why something is not compiled, and print it the first time; `next` is what the user can do about it."""
    found = _reasons.get(reason)
    if found is None:
        if len(_reasons) >= _MAX_REASONS:
            reason = _OTHER
        found = _reasons.setdefault(reason, _Reason(next))
        if is_printed and not found.count:
            print(f"[ltc] {reason}", file=sys.stderr, flush=True)
    found.count += 1


def sentences(counters: Mapping[str, int]) -> list[str]:
    """Sentences of a summary; none if no graph has run since the counters were cleared."""
    op_by_op, compiled = counters.get(OP_BY_OP_RUNS, 0), counters.get(COMPILED_RUNS, 0)
    reasons = list(_reasons_told())
    if not op_by_op and not compiled:
        return reasons if counters.get("ExecuteComputation") else []
    replayed = counters.get(REPLAYED_RUNS, 0)
    how = f" ({replayed} of them in C++)" if replayed else ""
    found = [f"Of these runs, {op_by_op} were op by op{how} and {compiled} compiled."]
    programs = _that_ran()
    if programs:
        last = programs[-1]
        state = last.state
        next = f" Next: {_NEXT[state]}." if state in _NEXT else ""
        found.append(f"The last run was {last.title}: {state.words}{last.progress}.{next}")
    if len(programs) > 1:
        states = Counter(program.state.words for program in programs)
        each = "; ".join(f"{n} {words}" for words, n in states.most_common())
        found.append(f"The {len(programs)} graphs now: {each}.")
    return [*found, *reasons, *_kept(programs)]


def graph_lines() -> list[str]:
    """A sentence for each graph that has run."""
    return [
        f"{program.title}: {program.op_by_op_runs} runs op by op, {program.compiled_runs} compiled; "
        f"now {program.state.words}{program.progress}" + "".join(_kept_by(program.kept))
        for program in _that_ran()
    ]


def _that_ran() -> list[Reported]:
    """The programs that have run and are still there, the last one last."""
    # Not `values`: another thread may add a program meanwhile. `valuerefs` copies the list in one step.
    programs = [ref() for ref in _programs.valuerefs()]
    there = [program for program in programs if program is not None and program.last_run]
    return sorted(there, key=lambda program: program.last_run)


def _reasons_told() -> Iterator[str]:
    reasons = sorted(_reasons.items(), key=lambda item: -item[1].count)
    for reason, found in reasons[:_MAX_QUOTED]:
        times = f" ({found.count} times)" if found.count > 1 else ""
        yield f"Not compiled: {reason}{times}. Next: {found.next}."
    if len(reasons) > _MAX_QUOTED:
        yield f"{len(reasons) - _MAX_QUOTED} more reasons why something is not compiled were printed."


def _kept(programs: list[Reported]) -> Iterator[str]:
    kept = {op: why for program in programs for op, why in program.kept.items()}
    if kept:
        yield f"Op by op between compiled code: {_each(kept)}. That is no fault; results stay those of eager."


def _kept_by(kept: Mapping[str, str]) -> Iterator[str]:
    if kept:
        yield f"; op by op: {_each(kept)}"


def _each(kept: Mapping[str, str]) -> str:
    return listed((f"{op} ({why})" for op, why in kept.items()), _MAX_QUOTED)
