"""What the background compiler costs the steps that go on meanwhile.

    python -m benchmarks.compiling [--models unet vit] [--threads 1 2] [--rounds 10] [--json FILE]

In a process for each row a model of `benchmarks.breadth` trains until its steps are settled; then its graph goes to
the compiler. In a round the compiler is stopped for half a second (SIGSTOP), and works for the next one. The figure is
the median of the rounds' ratios. Part of `make bench`.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from benchmarks import in_child, table
from benchmarks.breadth_child import SubjectTraining
from benchmarks.breadth_models import SUBJECTS
from benchmarks.command_line import add_json, check, positive
from benchmarks.peer_kinds import PEERS
from benchmarks.peers import machine
from ltc_core.executors.inductor.compiler.patience import processor_s

_MODELS = ("unet", "vit", "lstm")
_RHYTHMS = ("waited", "free")
_SETTLED = 150  # steps until the graph goes to the compiler
_WINDOW_S = 0.5
_FEWEST_STEPS = 3

_clock = time.perf_counter


@dataclass(frozen=True)
class Figures:
    """What was measured of one model, with so many threads.

    Attributes:
        alone_ms: a step while the compiler is stopped.
        ratio: how much longer it takes while the compiler works.
        cores: what the compiler gets of the cores.
        rounds: how many there were; fewer than asked for if the compiler was done.
    """

    model: str
    threads: int
    is_waited: bool
    alone_ms: float
    ratio: float
    cores: float
    rounds: int


# ---- in the process that trains ------------------------------------------------------------------


def measure(model: str, threads: int, is_waited: bool, rounds: int) -> Figures:
    """Train a model in this process, which has compiled nothing yet."""
    torch.set_num_threads(threads)
    peer = PEERS["ltc"]("cpu")
    training = SubjectTraining(peer, SUBJECTS[model])
    step = training.fetched_step if is_waited else training.free_step
    while len(_compiler()) == 0:
        step()
    alone, ratios, cores = [], [], []
    while len(ratios) < rounds and not peer.counts().get("programs", 0):
        _send(signal.SIGSTOP)
        alone_s = _window(step, peer.settle)
        before_s = _processor_s()
        _send(signal.SIGCONT)
        started = _clock()
        both_s = _window(step, peer.settle)
        alone.append(alone_s)
        ratios.append(both_s / alone_s)
        # One that has ended meanwhile, as the C++ compiler's, takes its time along.
        cores.append(max(0.0, _processor_s() - before_s) / (_clock() - started))
    if not ratios:
        raise RuntimeError(f"{model} was compiled before anything was measured")
    return Figures(
        model, threads, is_waited, statistics.median(alone) * 1e3, statistics.median(ratios),
        statistics.mean(cores), len(ratios),
    )  # fmt: skip


def _window(step: Callable[[], object], settle: Callable[[], None]) -> float:
    """Seconds of a step."""
    started, steps = _clock(), 0
    while steps < _FEWEST_STEPS or _clock() - started < _WINDOW_S:
        step()
        steps += 1
    settle()
    return (_clock() - started) / steps


def _compiler() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _send(number: int) -> None:
    for process in _compiler():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.send_signal(number)


def _processor_s() -> float:
    return sum(processor_s(process.pid) for process in psutil.Process().children())


# ---- the command ---------------------------------------------------------------------------------


def report(figures: list[Figures]) -> str:
    """Return the table."""
    header = ["model", "threads", "steps", "alone ms", "beside the compiler", "compiler's cores"]
    rows = map(_cells, figures)
    title = "Steps while the background compiler works, over those while it is stopped."
    return "\n".join([title, "", table(header, rows), "", machine()])


def _cells(figures: Figures) -> list[str]:
    return [
        figures.model,
        str(figures.threads),
        "waited for" if figures.is_waited else "not waited for",
        f"{figures.alone_ms:.2f}",
        f"{figures.ratio:.2f}",
        f"{figures.cores:.2f}",
    ]


def main() -> None:
    """Parse the command line, measure in one process for each row, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiling", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(SUBJECTS), default=_MODELS)
    parser.add_argument("--threads", nargs="+", type=positive, default=[1, 2])
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--only", nargs=3, metavar=("MODEL", "THREADS", "RHYTHM"), help="as JSON")
    add_json(parser)
    args = parser.parse_args()
    check(parser, args.json)
    if args.only:
        model, threads, rhythm = args.only
        print(json.dumps(asdict(measure(model, int(threads), rhythm == "waited", args.rounds))))
        return
    figures = []
    for model in args.models:
        for threads in args.threads:
            for rhythm in _RHYTHMS:
                only = ("--only", model, str(threads), rhythm, "--rounds", str(args.rounds))
                figures.append(_in_new_child(only, threads))
                print(*_cells(figures[-1]), sep=", ", file=sys.stderr, flush=True)
    text = json.dumps([asdict(each) for each in figures], indent=2)
    if args.json and args.json != "-":
        Path(args.json).write_text(text)
    print(text if args.json == "-" else report(figures))


def _in_new_child(only: tuple[str, ...], threads: int) -> Figures:
    """Measure in a process that finds nothing that was compiled before."""
    with tempfile.TemporaryDirectory() as directory:
        environ = {
            "OMP_NUM_THREADS": str(threads),
            "LTC_COMPILE": "async",
            "LTC_COMPILE_AFTER": str(_SETTLED),
            "LTC_COMPILED_CACHE_DIR": os.path.join(directory, "compiled"),
        }
        return Figures(**in_child("benchmarks.compiling", *only, **environ))


if __name__ == "__main__":
    main()
