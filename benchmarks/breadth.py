"""Training steps of many models that nobody tuned the runtime for, beside eager and torch.compile.

    python -m benchmarks.breadth [--models unet lstm] [--sides eager replay] [--rounds 5] [--threads 1 2] [--json FILE]

The sides of a model are processes that take turns: `eager`; `compile`, torch.compile in its default mode;
`replay`, the lazy device without a compiler; `warm`, the lazy device after everything was compiled and it has
chosen between compiled code and replay. In a round each runs a block of steps that are waited for, and one whose last
step only is; all blocks begin with the same parameters and optimizer state, those after ten steps. A ratio is the
median of the rounds' ratios. Part of `make bench`; breadth_child.py is what runs in the processes.
"""

import argparse
import dataclasses
import datetime
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.breadth_child import KINDS
from benchmarks.breadth_models import LARGE, SUBJECTS
from benchmarks.command_line import add_json, check, positive
from benchmarks.peer_process import PeerFailed, PeerProcess
from benchmarks.peers import machine

_CHILD = "benchmarks.breadth_child"
_OURS = ("replay", "warm")  # their losses must be eager's; torch.compile draws other random numbers
_LOSS_TOLERANCE = 1e-3
_WARM_UP_STEPS = 10
_PAUSE_S = 0.05  # between turns: the threads of the side before spin on for some milliseconds
_NONE = "-"

_ENVIRON = {
    # As a script has it by default, until compiled code comes; here it never does.
    "replay": {"LTC_COMPILE": "async", "LTC_COMPILE_AFTER": "1000000000"},
    # At once, not when the steps have taken as long as compiling may: the warm-up is short.
    "warm": {"LTC_COMPILE": "async", "LTC_COMPILE_AFTER": "3"},
}
_CACHES = ("LTC_COMPILED_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Options:
    """What is measured. `compile_timeout_s` is how long a warm-up waits for the compiler."""

    models: tuple[str, ...]
    sides: tuple[str, ...] = tuple(KINDS)
    rounds: int = 5
    compile_timeout_s: float = 240.0
    answer_timeout_s: float = 900.0


# ---- figures -------------------------------------------------------------------------------------


@dataclass
class SideFigures:
    """What was measured of one side on one model.

    `waited` and `free` have a block for each round: wall_s and processor_s of a step, each waited for or
    not, and the number of steps. `counts` are the graphs and compiled programs that were built.
    `tier_steps` and `tier_s` tell after how many steps and seconds the last program was swapped in, 0 if
    none was. `error` is why the side dropped out, "" if it did not.
    """

    error: str = ""
    losses: list[float] = field(default_factory=list)
    is_compiled: bool = False
    tier_steps: int = 0
    tier_s: float = 0.0
    waited: list[dict[str, float]] = field(default_factory=list)
    free: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class ModelFigures:
    """What was measured of all sides on one model."""

    sides: dict[str, SideFigures]

    def working(self, *names: str) -> list[SideFigures] | None:
        """Return the figures of these sides; None if one was not measured, or dropped out."""
        found = [self.sides[name] for name in names if name in self.sides]
        is_whole = len(found) == len(names) and not any(side.error for side in found)
        return found if is_whole else None

    def loss_difference(self, name: str) -> float | None:
        """Return the largest relative difference from eager's first losses."""
        sides = self.working("eager", name)
        if sides is None:
            return None
        eager, other = (side.losses for side in sides)
        pairs = zip(eager, other, strict=True)
        return max(abs(a - b) / max(abs(a), 1e-12) if a != b else 0.0 for a, b in pairs)

    def is_marked(self) -> bool:
        """Whether the losses of the lazy device are not eager's; a loss that is no number never is."""
        found = [self.loss_difference(name) for name in _OURS]
        return any(
            difference is not None and not difference <= _LOSS_TOLERANCE for difference in found
        )


Figures = dict[str, ModelFigures]
Ratio = Callable[[ModelFigures], float | None]


def _over_eager(side: str, blocks: str, what: str = "wall_s") -> Ratio:
    """Return what computes a side's time over eager's, both of the same kind of block."""

    def ratio(model: ModelFigures) -> float | None:
        sides = model.working("eager", side)
        if sides is None:
            return None
        eager, other = ([block[what] for block in getattr(figures, blocks)] for figures in sides)
        return _median_ratio(eager, other)

    return ratio


def _median_ratio(under: Iterable[float], over: Iterable[float]) -> float:
    return statistics.median(b / a for a, b in zip(under, over, strict=True))


def _warm_over_best(model: ModelFigures) -> float | None:
    """Return warm over the faster one of eager and torch.compile; over eager where that failed."""
    sides = model.working("eager", "compile", "warm") or model.working("eager", "warm")
    if sides is None:
        return None
    *rivals, warm = ([block["wall_s"] for block in side.free] for side in sides)
    return _median_ratio(map(min, zip(*rivals, strict=True)), warm)


def _memory(side: str) -> Ratio:
    def ratio(model: ModelFigures) -> float | None:
        sides = model.working("eager", side)
        return None if sides is None else sides[1].peak_bytes / sides[0].peak_bytes

    return ratio


_RATIOS: dict[str, Ratio] = {
    "compile": _over_eager("compile", "free"),
    "replay, waited": _over_eager("replay", "waited"),
    "replay": _over_eager("replay", "free"),
    "replay, processor": _over_eager("replay", "free", "processor_s"),
    "warm, waited": _over_eager("warm", "waited"),
    "warm": _over_eager("warm", "free"),
    "warm, processor": _over_eager("warm", "free", "processor_s"),
    "warm / best": _warm_over_best,
    "memory, replay": _memory("replay"),
    "memory, warm": _memory("warm"),
}


# ---- measuring -----------------------------------------------------------------------------------


class Contest:
    """All sides on one model; those that fail drop out.

    Args:
        caches: an empty directory.
        processes: ends what is still running.
    """

    def __init__(
        self, model: str, threads: int, options: Options, caches: Path, processes: ExitStack
    ) -> None:
        self._model = model
        self._threads = threads
        self._options = options
        self._caches = caches
        self._processes = processes
        self.running: dict[str, PeerProcess] = {}
        self.figures = ModelFigures({name: SideFigures() for name in options.sides})

    @contextmanager
    def _may_fail(self, side: str) -> Iterator[SideFigures]:
        try:
            yield self.figures.sides[side]
        except PeerFailed as failure:
            self.figures.sides[side].error = str(failure)
            self._say(f"{side} dropped: {failure}")
            if side in self.running:
                self.running.pop(side).kill()

    def _say(self, what: str) -> None:
        where = f"{self._model}, {_threads(self._threads)}"
        print(f"{time.strftime('%H:%M:%S')} {where}: {what}", file=sys.stderr, flush=True)

    def warm_up(self) -> None:
        """Start the sides one after the other, and run each until nothing is compiled any more."""
        for side in self.figures.sides:
            with self._may_fail(side) as figures:
                environ = {name: str(self._caches / side / name.lower()) for name in _CACHES}
                files = self._caches / side / "files"  # a side that is killed leaves some
                files.mkdir(parents=True)
                environ |= {"OMP_NUM_THREADS": str(self._threads), "TMPDIR": str(files)}
                environ |= _ENVIRON.get(side, {})
                process = PeerProcess(
                    sys.executable, side, self._model, "cpu", environ,
                    self._options.answer_timeout_s, _CHILD,
                )  # fmt: skip
                self.running[side] = self._processes.enter_context(process)
                timeout_s = self._options.compile_timeout_s
                found = process.ask("warm_up", steps=_WARM_UP_STEPS, timeout_s=timeout_s)
                for name, value in found.items():
                    setattr(figures, name, value)
                if side == "warm":
                    process.ask("settle", timeout_s=timeout_s)

    def rounds(self) -> None:
        """Let the running sides take turns, in each round in another order."""
        for index in range(self._options.rounds):
            sides = list(self.running)
            first = index % max(len(sides), 1)
            for side in sides[first:] + sides[:first]:
                with self._may_fail(side) as figures:
                    time.sleep(_PAUSE_S)
                    block = self.running[side].ask("waited_block")
                    figures.waited.append(block)
                    free = self.running[side].ask("free_block", steps=block["steps"])
                    figures.free.append(free)

    def end(self) -> None:
        """Ask for memory and counts."""
        for side, process in list(self.running.items()):
            with self._may_fail(side) as figures:
                figures.counts = process.ask("counts")
                figures.peak_bytes = process.peak_bytes()
        found = {name: ratio(self.figures) for name, ratio in _RATIOS.items()}
        self._say(", ".join(f"{name} {r:.2f}" for name, r in found.items() if r is not None))


def measure(options: Options, threads: int) -> Iterator[tuple[str, ModelFigures]]:
    """Measure one model after the other; what it does at the moment goes to stderr."""
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="breadth-") as caches, ExitStack() as processes:
            contest = Contest(model, threads, options, Path(caches), processes)
            contest.warm_up()
            contest.rounds()
            contest.end()
        yield model, contest.figures


# ---- the report ----------------------------------------------------------------------------------


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _name(name: str, model: ModelFigures) -> str:
    return f"{name} *" if model.is_marked() else name


def _eager_ms(model: ModelFigures) -> str:
    eager = model.working("eager")
    if eager is None:
        return _NONE
    return f"{statistics.median(block['wall_s'] for block in eager[0].waited) * 1e3:.2f}"


def _programs(model: ModelFigures) -> str:
    """Return the graphs and the compiled programs that were built."""
    replay, warm = model.working("replay"), model.working("warm")
    ours = warm or replay
    if ours is None:
        return _NONE
    return f"{ours[0].counts['graphs']} / {ours[0].counts['programs'] if warm else _NONE}"


def means(figures: Figures) -> dict[str, float | None]:
    """Return the geometric mean of each ratio, over the models that have it."""
    return {
        name: math.exp(statistics.fmean(math.log(value) for _, value in found)) if found else None
        for name, found in _ratios_of(figures).items()
    }


def worst(figures: Figures) -> dict[str, tuple[str, float] | None]:
    """Return the model with the largest value of each ratio, and that value."""
    return {
        name: max(found, key=lambda pair: pair[1]) if found else None
        for name, found in _ratios_of(figures).items()
    }


def _ratios_of(figures: Figures) -> dict[str, list[tuple[str, float]]]:
    def found(ratio: Ratio) -> list[tuple[str, float]]:
        values = [(name, ratio(model)) for name, model in figures.items()]
        return [(name, value) for name, value in values if value is not None]

    return {column: found(ratio) for column, ratio in _RATIOS.items()}


def _speed_table(figures: Figures) -> str:
    rows = [
        [
            _name(name, model),
            _eager_ms(model),
            *(_number(ratio(model)) for ratio in _RATIOS.values()),
            _programs(model),
        ]
        for name, model in figures.items()
    ]
    rows.append(["geometric mean", "", *map(_number, means(figures).values()), ""])
    largest = [
        _NONE if pair is None else f"{pair[1]:.2f} {pair[0]}" for pair in worst(figures).values()
    ]
    rows.append(["worst", "", *largest, ""])
    return table(["model", "eager ms", *_RATIOS, "programs"], rows)


def _start_table(figures: Figures) -> str:
    rows = []
    for name, model in figures.items():
        cells = [_name(name, model)]
        eager, warm = model.working("eager"), model.working("warm")
        cells.append(" ".join(f"{loss:.4f}" for loss in eager[0].losses) if eager else _NONE)
        for side in ("compile", *_OURS):
            difference = model.loss_difference(side)
            cells.append(_NONE if difference is None else f"{difference:.0e}")
        cells += [f"{warm[0].tier_s:.1f}", str(warm[0].tier_steps)] if warm else [_NONE, _NONE]
        rows.append(cells)
    head = ["model", "eager's losses", "compile", *_OURS, "compiled after s", "steps"]
    return table(head, rows)


def report(figures: Mapping[int, Figures], where: str, date: str) -> str:
    """Render the figures as tables in Markdown, two for each number of threads."""
    parts = []
    for threads, models in figures.items():
        parts += [
            f"Training steps with {_threads(threads)}, each column over eager's: "
            "wall time of steps that are not waited for, but for `waited` and `processor`; `warm / best` is over the "
            "faster one of eager and torch.compile. Programs: graphs built / compiled.",
            _speed_table(models),
            "Losses of the first three steps: eager's, and how far the others are from them (torch.compile draws "
            "other random numbers); when the last compiled program took over, 0 where none did.",
            _start_table(models),
        ]
        marked = [name for name, model in models.items() if model.is_marked()]
        if marked:
            parts.append(
                f"\\* differs from eager by more than {_LOSS_TOLERANCE}: {', '.join(marked)}."
            )
        failed = [
            f"- {side} ({name}): {found.error}"
            for name, model in models.items()
            for side, found in model.sides.items()
            if found.error
        ]
        if failed:
            parts.append("Dropped out:\n" + "\n".join(failed))
    return "\n\n".join([*parts, f"{where}, {date}."])


def to_json(
    figures: Mapping[int, Figures], options: Options, where: str, date: str
) -> dict[str, Any]:
    """Return everything that was measured, and what follows from it."""
    return {
        "date": date,
        "machine": where,
        "options": dataclasses.asdict(options),
        "threads": {
            str(threads): {
                "models": {
                    name: dataclasses.asdict(model)
                    | {"ratios": {column: ratio(model) for column, ratio in _RATIOS.items()}}
                    | {"is_marked": model.is_marked()}
                    for name, model in models.items()
                },
                "means": means(models),
                "worst": worst(models),
            }
            for threads, models in figures.items()
        },
    }


# ---- command line --------------------------------------------------------------------------------


def _parse() -> tuple[Options, list[int], str]:
    """Parse the command line: the options, the numbers of threads, and where the figures go."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.breadth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--models", nargs="+", choices=SUBJECTS, metavar="MODEL",
        default=[name for name in SUBJECTS if name not in LARGE],
        help=f"of {', '.join(SUBJECTS)} (default: all but {', '.join(LARGE)}, whose steps are long)",
    )  # fmt: skip
    add("--sides", nargs="+", choices=KINDS, default=list(KINDS), help="(default: all)")
    add("--rounds", type=positive, default=Options.rounds, help="(default: %(default)s)")
    add(
        "--threads", nargs="+", type=positive, default=[1, 2],
        help="threads of each process; tables for each number (default: 1 2)",
    )  # fmt: skip
    add_json(parser)
    args = parser.parse_args()
    check(parser, args.json)
    options = Options(tuple(args.models), tuple(args.sides), args.rounds)
    return options, args.threads, args.json


def main() -> None:
    """Measure as the command line says, and print."""
    options, threads, file = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and its processes with it
    where, date = machine(), datetime.date.today().isoformat()
    figures: dict[int, Figures] = {}
    for count in threads:
        models = figures[count] = {}
        for name, found in measure(options, count):
            models[name] = found
            text = json.dumps(to_json(figures, options, where, date), indent=1)
            if file not in ("", "-"):  # after each model: all of them take long
                Path(file).write_text(text + "\n")
    print(text if file == "-" else report(figures, where, date))


if __name__ == "__main__":
    main()
