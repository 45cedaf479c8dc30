"""Why a graph was built: the cause in one sentence, with the user's line.

`explain` compares a new graph with the nearest known one; the rules of `causes` find the words. Each cause is counted
as `CompileCause.<kind>`, and the metrics' summary ranks them; `on_compile` prints it where LTC_EXPLAIN=1 asks for it.
Called by `runtime.program_cache` for each program that it builds.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings

from ltc_core import metrics, source
from ltc_core.debug import wording
from ltc_core.debug.causes import PAIR_KINDS, Pair
from ltc_core.debug.difference import compare
from ltc_core.debug.nearest import Known, KnownGraphs
from ltc_core.graph.ir import Graph
from ltc_core.metrics_report import cause_counter
from ltc_core.settings import settings

__all__ = ["KINDS", "Cause", "KnownGraphs", "explain", "on_compile"]

KINDS = ("first graph", "forgotten", "eager", *PAIR_KINDS, "unknown")

_EAGER = "Eager"  # the reason of the cuts of LTC_EAGER=1
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a graph was built.

    Attributes:
        number: of the compile, counted from 1 in this process.
        kind: one of `KINDS`.
        sentence: begins with the kind.
        nearest: the number of the compile whose graph is the nearest, None if none was looked at.
    """

    number: int
    kind: str
    sentence: str
    nearest: int | None = None


def explain(graph: Graph, known: KnownGraphs, reason: str, path: object) -> Cause:
    """Say why a graph was built, and count it; from then on the graph is known.

    Args:
        reason: what cut it: MarkStep, Wait, Item, GraphLimit, ...
        path: stands for what was recorded: the same object for each cut of the same recording.

    Cost: 1 ms for 300 nodes, 50 ms for 20,000 if none of them is shared with the nearest graph; 4 ms more to
    find that among 1024. Building their programs for the reference executor takes 2 ms and 150 ms.
    """
    new = Known(graph, next(_numbers), reason, source.user_line(), path)
    try:
        cause = _alone(new, known) or _beside(new, known)
    except Exception as error:  # a training run must not end because its compile has no explanation
        warnings.warn(
            f"the cause of a compile cannot be told: {error!r}; report this", stacklevel=2
        )
        cause = Cause(new.number, "unknown", f"unknown: {error!r}")
    known.add(new)
    metrics.count(cause_counter(cause.kind))
    return cause


def on_compile(cause: Cause) -> None:
    """Print the cause of a compile if LTC_EXPLAIN asks for it."""
    if settings.explain:
        print(f"[ltc] compile {cause.number}: {cause.sentence}", file=sys.stderr)


def _alone(new: Known, known: KnownGraphs) -> Cause | None:
    """Return the cause of a graph that is compared with none."""
    if new.reason == _EAGER:
        kind, text = "eager", f"LTC_EAGER=1 runs each op by itself, here {wording.first(new)}"
    elif len(known):
        return None
    elif known.was_forgotten:
        kind = "forgotten"
        text = f"so many different ops were recorded that all graphs were dropped{wording.cut(new)}"
    else:
        kind, text = "first graph", f"nothing was compiled before{wording.cut(new)}"
    return Cause(new.number, kind, f"{kind}: {text}")


def _beside(new: Known, known: KnownGraphs) -> Cause:
    old = known.nearest(new)
    kind, sentence = Pair(old, new, known, compare(old, new)).judge()
    new.short_of = old.number if kind == "cut elsewhere" else None
    return Cause(new.number, kind, sentence, old.number)
