"""Training in two processes beside DistributedDataParallel and beside one process; the loader; how long a start takes.

    python -m benchmarks.distributed [--models mnist mlp gpt resnet] [--rounds 5] [--json]

The whole batch is the same for all: two processes have a half each and one thread, one process has it all and two
threads. Each runs in processes of its own, in turns; a figure is the median of the rounds, a ratio the median of the
rounds' ratios. Part of `make bench`; distributed_child.py is what runs in the processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.models import WORKLOADS

_ROOT = Path(__file__).parents[1]
_CHILD = str(_ROOT / "benchmarks" / "distributed_child.py")
LTC_LAUNCH = ["-m", "ltc_launch", "--nprocs", "2", "--no-prefix"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
_KINDS = {
    "ddp": (TORCHRUN, "1"),
    "ltc": (LTC_LAUNCH, "1"),
    "one": ([], "2"),
}


def run(launch: list[str], arguments: list[str], threads: str) -> tuple[dict[str, Any], float]:
    """Run the child; give what it printed, and the seconds from the start of the command to its end."""
    environ = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": threads}
    environ["LTC_COMPILE"] = "sync"  # so that the first round is as well compiled as the last
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *launch, _CHILD, *arguments],
        env=environ, capture_output=True, text=True,
    )  # fmt: skip
    took_s = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)} failed:\n{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return (json.loads(lines[-1]) if lines else {}), took_s


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_training(models: list[str], rounds: int) -> dict[str, Any]:
    """Measure ms a step of each kind, and the losses, which must be the same for all."""
    figures: dict[str, Any] = {}
    for model in models:
        steps: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        losses: dict[str, float] = {}
        for k in range(rounds):
            for kind, (launch, threads) in _KINDS.items():
                found, _ = run(launch, ["train", kind, model], threads)
                steps[kind].append(found["step_ms"])
                losses[kind] = found["loss"]
            _progress(
                f"{model}, round {k + 1} of {rounds}: { {n: round(v[-1], 2) for n, v in steps.items()} }"
            )
        figures[model] = {
            "step_ms": {kind: statistics.median(times) for kind, times in steps.items()},
            "speed_over_ddp": _ratio(steps["ddp"], steps["ltc"]),
            "speed_over_one": _ratio(steps["one"], steps["ltc"]),
            "loss": losses,
        }
    return figures


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def measure_loader(rounds: int) -> dict[str, float]:
    """Measure ms a step: loading alone, computing alone, and both at once."""
    found = [run([], ["loader"], "1")[0] for _ in range(rounds)]
    medians = {name: statistics.median(f[name] for f in found) for name in found[0]}
    medians["over_larger"] = statistics.median(
        f["both_ms"] / max(f["load_ms"], f["compute_ms"]) for f in found
    )
    return medians


def measure_start(rounds: int) -> dict[str, float]:
    """Measure seconds until two processes have started, met and ended."""
    times: dict[str, list[float]] = {"ltc-launch": [], "torchrun": []}
    for _ in range(rounds):
        for name, launch in (("ltc-launch", LTC_LAUNCH), ("torchrun", TORCHRUN)):
            times[name].append(run(launch, ["start"], "1")[1])
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, "ratio": _ratio(times["ltc-launch"], times["torchrun"])}


def report(figures: dict[str, Any]) -> str:
    """Render the figures as tables in Markdown."""
    rows = [
        [
            WORKLOADS[model].title,
            *(f"{found['step_ms'][kind]:.2f}" for kind in _KINDS),
            f"{found['speed_over_ddp']:.2f}",
            f"{found['speed_over_one']:.2f}",
        ]
        for model, found in figures["training"].items()
    ]
    head = ["model", "DDP, 2", "ltc, 2", "ltc, 1", "speed / DDP", "speed / 1 process"]
    load, start = figures["loader"], figures["start"]
    return "\n\n".join(
        [
            "A training step in ms, two processes of one thread (DDP over gloo, ltc) and one of two threads.",
            table(head, rows),
            f"Loader: {load['load_ms']:.1f} ms of loading and {load['compute_ms']:.1f} ms of computing take "
            f"{load['both_ms']:.1f} ms a step together, {load['over_larger']:.2f} of the larger one.",
            f"Start and end of two processes: ltc-launch {start['ltc-launch']:.2f} s, "
            f"torchrun {start['torchrun']:.2f} s, ratio {start['ratio']:.2f}.",
        ]
    )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--models", nargs="+", default=["mnist", "mlp", "gpt", "resnet"], choices=WORKLOADS
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        figures = {
            "training": measure_training(args.models, args.rounds),
            "loader": measure_loader(args.rounds),
            "start": measure_start(args.rounds),
        }
    print(json.dumps(figures) if args.json else report(figures))


if __name__ == "__main__":
    main()
