"""A training step beside its peers: eager, torch.compile, torch._lazy, torch_xla, and ltc with LTC_EXECUTOR=jax.

Each peer trains each model in processes of its own. A cold start has empty caches, a warm one those
that the first cold start left. The first warm processes stay, and run blocks of steps in turns, one at
a time; in each round another one begins. A block is waited for at its end only. Peers that wait for
their turn sleep. torch_xla needs a PyTorch of its own: name an interpreter that has it.

    python -m benchmarks.peers --jax-python PATH --peers eager,ltc,jax
    python -m benchmarks.peers --executor torch_xla --torch-xla-python PATH

The last one runs ltc's graphs on XLA too, and all peers with that interpreter; then compiles and transfers are counted.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import add_json, check, positive
from benchmarks.models import WORKLOADS
from benchmarks.peer_figures import OURS, ModelFigures, PeerFigures, compare, steady_s
from benchmarks.peer_kinds import PEERS
from benchmarks.peer_process import PeerFailed, PeerProcess
from benchmarks.peer_report import report

_TRIAL_MODEL = "tiny"
_WITH_CACHE = ("compile", OURS, "jax")
_ON_XLA = ("eager", "xla", OURS)  # with --executor torch_xla; eager's losses are compared with
_STARTED_AGAIN = ("eager", OURS)  # their first losses are compared, those of the others only shown
_WARM_UP_STEPS = 20
_BLOCK_S = 0.5
_STEPS_A_BLOCK = (5, 100)
_COUNTED_STEPS = 10
_PAUSE_S = 0.05  # between turns: the threads of the peer before spin on for some milliseconds


@dataclass(frozen=True)
class Options:
    """What is measured; `steps` of a block, 0: as many as take half a second.

    On the device "xla" ltc's graphs run on PJRT's CPU client, and all peers run under `torch_xla_python`.
    """

    models: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int = 7
    steps: int = 0
    starts: int = 3
    device: str = "cpu"
    torch_xla_python: str = ""
    jax_python: str = ""
    compile_timeout_s: float = 600.0
    answer_timeout_s: float = 1800.0


# ---- one model -----------------------------------------------------------------------------------


class Contest:
    """All peers on one model; those that fail drop out.

    Args:
        caches: an empty directory.
        processes: ends what is still running.
    """

    def __init__(self, model: str, options: Options, caches: Path, processes: ExitStack) -> None:
        self._model = model
        self._options = options
        self._caches = caches
        self._processes = processes
        self.running: dict[str, PeerProcess] = {}
        peers = {name: PeerFigures() for name in options.peers}
        self.figures = ModelFigures(WORKLOADS[model].title, peers=peers)

    @contextmanager
    def _may_fail(self, peer: str) -> Iterator[PeerFigures]:
        try:
            yield self.figures.peers[peer]
        except PeerFailed as failure:
            self.figures.peers[peer].error = str(failure)
            if peer in self.running:
                self.running.pop(peer).kill()

    def _working(self) -> list[str]:
        return list(self.figures.working())

    def _say(self, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._model}: {what}", file=sys.stderr)

    def _start(self, peer: str, cache: int) -> PeerProcess:
        options = self._options
        on_xla = options.device == "xla"
        python = self._python(peer)
        self._say(f"{peer} starts, cache {cache}")
        environ = _environ(peer, options.device, self._caches / peer / str(cache))
        device = "cpu" if on_xla and peer != OURS else options.device
        return PeerProcess(python, peer, self._model, device, environ, options.answer_timeout_s)

    def _python(self, peer: str) -> str:
        """The interpreter that a peer runs under."""
        options = self._options
        if peer == "jax":
            if not options.jax_python:
                raise PeerFailed("--jax-python names no interpreter that has it")
            return options.jax_python
        if options.device != "xla" and peer != "xla":
            return sys.executable
        if not options.torch_xla_python:
            raise PeerFailed("--torch-xla-python names no interpreter that has it")
        return options.torch_xla_python

    def cold(self, peer: str, index: int) -> None:
        """Start with empty caches; the first start goes on until they are full."""
        with self._may_fail(peer) as figures, self._start(peer, index) as process:
            figures.import_cold_s.append(process.hello["import_s"])
            figures.first_loss_cold_s.append(process.hello["first_loss_s"])
            if not index and peer in _WITH_CACHE:
                self._warm_up(process, figures)
            figures.cold_peak_bytes = max(figures.cold_peak_bytes, process.peak_bytes())
            figures.children_peak_bytes = max(
                figures.children_peak_bytes, process.children_peak_bytes
            )

    def warm(self, peer: str, index: int) -> None:
        """Start with the caches of the first cold start; the first one stays for the rounds."""
        with self._may_fail(peer) as figures, ExitStack() as stack:
            process = stack.enter_context(self._start(peer, 0))
            figures.versions = process.hello["versions"]
            figures.import_warm_s.append(process.hello["import_s"])
            figures.first_loss_warm_s.append(process.hello["first_loss_s"])
            if not index:
                figures.warm_times_s = self._warm_up(process, figures)
                self.running[peer] = process
                self._processes.push(stack.pop_all())

    def _warm_up(self, process: PeerProcess, figures: PeerFigures) -> list[float]:
        timeout_s = self._options.compile_timeout_s
        done = process.ask("warm_up", watch=True, steps=_WARM_UP_STEPS, timeout_s=timeout_s)
        figures.is_compiled = done["is_compiled"]
        figures.losses.append(done["losses"][:_WARM_UP_STEPS])
        times_s: list[float] = done["times_s"]
        return times_s

    def starts(self) -> None:
        """Run all starts; afterwards the working peers are running and warm."""
        for index in range(self._options.starts):
            for start in (self.cold, self.warm):
                for peer in self._working():
                    if not index or peer in _STARTED_AGAIN:
                        start(peer, index)

    def rounds(self) -> None:
        """Let the running peers take turns, in each round in another order."""
        for index in range(self._options.rounds):
            self._say(f"round {index + 1}")
            peers = deque(self.running)
            peers.rotate(-index)
            for peer in peers:
                with self._may_fail(peer) as figures:
                    time.sleep(_PAUSE_S)
                    steps = self._steps(figures)
                    figures.round_s.append(self.running[peer].ask("run", steps=steps))

    def overlap(self) -> None:
        """Compare the loop of the lazy device with the execution of its program alone."""
        if OURS not in self.running:
            return
        process = self.running[OURS]
        with self._may_fail(OURS) as figures:
            steps = self._steps(figures)
            for _ in range(self._options.rounds):
                alone_s = process.ask("execute_alone", steps=steps)
                if not alone_s:  # not known
                    return
                loop_s = process.ask("run", steps=steps)
                self.figures.overlap.append(loop_s / alone_s)

    def counts(self) -> None:
        """Ask those that run on XLA how often it compiled so far, and what a step moves."""
        if self._options.device != "xla":
            return
        for peer, process in list(self.running.items()):
            with self._may_fail(peer) as figures:
                before = process.ask("counts")
                process.ask("run", steps=_COUNTED_STEPS)
                figures.counts = process.ask("counts")
                for name in {"sent", "fetched"} & before.keys():
                    figures.counts[name] = (figures.counts[name] - before[name]) / _COUNTED_STEPS

    def peaks(self) -> None:
        """Ask for the memory that the running peers needed."""
        for peer, process in list(self.running.items()):
            with self._may_fail(peer) as figures:
                figures.device_peak_bytes = process.ask("device_peak_bytes")
                figures.peak_bytes = process.peak_bytes()
                figures.children_peak_bytes = max(
                    figures.children_peak_bytes, process.children_peak_bytes
                )

    def _steps(self, figures: PeerFigures) -> int:
        """Return the steps of a block of this peer."""
        few, many = _STEPS_A_BLOCK
        fitting = math.ceil(_BLOCK_S / steady_s(figures.warm_times_s))
        return self._options.steps or max(few, min(many, fitting))


def _environ(peer: str, device: str, cache: Path) -> dict[str, str]:
    """Return the variables of a peer: its own caches, and what its backend is told that way."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "LTC_CACHE_DIR")
    environ = {name: str(cache / name.lower()) for name in names}
    if peer == "xla" or device == "xla":
        environ["PJRT_DEVICE"] = "CPU"
    if device == "xla":  # ltc would keep XLA's programs on the disk, torch_xla does not
        environ["XLA_PERSISTENT_CACHE_PATH"] = ""
    if peer == "lazy" and device == "cuda":
        environ["LTC_TS_CUDA"] = "1"
    if peer == "jax":
        environ["LTC_EXECUTOR"] = "jax"
    if peer == OURS:
        environ["LTC_DEVICE"] = device
        environ["LTC_COMPILE_AFTER"] = (
            "3"  # not when the steps have taken as long as compiling may: they are few
        )
    return environ


# ---- all models ----------------------------------------------------------------------------------


def measure(options: Options) -> Iterator[tuple[str, ModelFigures]]:
    """Measure one model after the other; what it does at the moment goes to stderr."""
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="peers-") as caches, ExitStack() as processes:
            contest = Contest(model, options, Path(caches), processes)
            for stage in (
                contest.starts, contest.rounds, contest.overlap, contest.counts, contest.peaks,
            ):  # fmt: skip
                stage()
        yield model, contest.figures


def preheat(options: Options) -> None:
    """Let each peer train something tiny: the files of its libraries are read from disk once."""
    with tempfile.TemporaryDirectory(prefix="peers-") as caches, ExitStack() as processes:
        trial = Contest(_TRIAL_MODEL, options, Path(caches), processes)
        for peer in options.peers:
            trial.cold(peer, index=1)


def machine() -> str:
    """Describe the processor, and how busy it is now: beside other work a step's threads wait long."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    name = names[0] if names else platform.machine()
    return f"{cores} cores ({name}), load {os.getloadavg()[0]:.1f} at the start"


def to_json(
    models: dict[str, ModelFigures], options: Options, where: str, date: str
) -> dict[str, Any]:
    """Return everything that was measured, and what follows from it."""
    return {
        "date": date,
        "machine": where,
        "options": dataclasses.asdict(options),
        "environ": {name: v for name, v in os.environ.items() if name.startswith("LTC_")},
        "models": {
            name: dataclasses.asdict(model, dict_factory=_counted)
            | {"loss_differences": model.loss_differences()}
            for name, model in models.items()
        },
        "summary": [dataclasses.asdict(comparison) for comparison in compare(models)],
    }


def _counted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Leave out the counts of a peer that does not count."""
    return {name: value for name, value in pairs if name != "counts" or value}


def _names(text: str, known: list[str], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _parse() -> tuple[Options, str]:
    """Parse the command line: the options, and where the figures go: a file, - (stdout) or nowhere."""
    models = [name for name in WORKLOADS if name != _TRIAL_MODEL]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--models", default=",".join(models), help=default)
    add(
        "--peers",
        help=f"(default: {','.join(PEERS)}, jax only with --jax-python; with --executor torch_xla "
        f"{','.join(_ON_XLA)})",
    )
    add("--rounds", type=positive, default=Options.rounds, help=f"of each model {default}")
    add("--steps", type=positive, default=0, help="of a block (default: for 0.5 s)")
    add(
        "--starts", type=positive, default=Options.starts,
        help=f"cold and warm ones of eager and ltc; one of the others {default}",
    )  # fmt: skip
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add(
        "--executor", default="inductor", choices=("inductor", "torch_xla"),
        help="what ltc's graphs run on; torch_xla: on XLA, all peers with the interpreter that has "
        f"torch_xla (this one if none is named) {default}",
    )  # fmt: skip
    add("--torch-xla-python", default="", metavar="PATH", help="an interpreter that has torch_xla")
    add("--jax-python", default="", metavar="PATH", help="an interpreter that has jax")
    add_json(parser)
    args = parser.parse_args()
    check(parser, args.json)
    peers = ",".join(name for name in PEERS if name != "jax" or args.jax_python)
    if args.executor == "torch_xla":
        peers = ",".join(_ON_XLA)
        if args.device != "cpu":
            parser.error(
                "--executor torch_xla runs on PJRT's CPU client only, not on --device cuda"
            )
        if not args.torch_xla_python and importlib.util.find_spec("torch_xla") is None:
            parser.error(
                "--executor torch_xla needs torch_xla 2.9 and the torch 2.9 it is built for, which "
                "this interpreter does not have: name one that has them with --torch-xla-python"
            )
        args.device, args.torch_xla_python = "xla", args.torch_xla_python or sys.executable
    options = Options(
        _names(args.models, list(WORKLOADS), parser),
        _names(args.peers or peers, list(PEERS), parser),
        args.rounds, args.steps, args.starts, args.device, args.torch_xla_python,
        args.jax_python,
    )  # fmt: skip
    return options, args.json


def main() -> None:
    """Measure as the command line says, and print."""
    options, file = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and its processes with it
    where = machine()
    preheat(options)
    date = datetime.date.today().isoformat()
    models: dict[str, ModelFigures] = {}
    for name, figures in measure(options):
        models[name] = figures
        text = json.dumps(to_json(models, options, where, date), indent=1)
        if file not in ("", "-"):  # after each model: all of them take long
            Path(file).write_text(text + "\n")
    print(text if file == "-" else report(models, where, date))


if __name__ == "__main__":
    main()
