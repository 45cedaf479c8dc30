"""What it costs to record an op, beside eager dispatch and torch._lazy.

Each program is a step of a loop on tensors so small that their arithmetic costs nothing. In every
round the three devices take turns. A round's figure is its fastest step; the figures shown are the
medians of the rounds, a ratio the median of the ratios of each round. The clock runs while ops are
called. The cut is timed apart: with the null executor it is what `mark_step` costs and nothing is
computed; with the reference executor the cut of so small a graph runs it too, and steps are not
waited for, as in a training loop.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch._lazy
import torch._lazy.metrics
import torch._lazy.ts_backend
import torch.nn.functional as F
from torch import nn

import ltc_core as ltc
from benchmarks import in_child, table
from ltc_core import metrics

EXECUTORS = ("null", "reference")
_STEPS_A_ROUND = 10
Step = Callable[[], object]


# ---- programs ------------------------------------------------------------------------------------


def _chain(device: torch.device, autograd: bool) -> Step:
    x = torch.rand(4).to(device).requires_grad_(autograd)
    y = torch.rand(4).to(device)

    def step() -> object:
        z = x
        for _ in range(50):
            z = torch.relu(z * y + x).sigmoid()
        return z

    return step


def _mlp(device: torch.device) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(8))
    return nn.Sequential(*layers, nn.Linear(8, 4)).to(device)


def _mlp_forward(device: torch.device) -> Step:
    model = _mlp(device)
    x = torch.rand(4, 8).to(device)

    def step() -> object:
        with torch.no_grad():
            return model(x)

    return step


def _mlp_training(device: torch.device) -> Step:
    model = _mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    x = torch.rand(4, 8).to(device)
    target = torch.tensor([0, 1, 2, 3]).to(device)

    def step() -> object:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _optimizer_step(device: torch.device) -> Step:
    parameters = [nn.Parameter(torch.rand(4).to(device)) for _ in range(32)]
    for parameter in parameters:
        parameter.grad = torch.rand(4).to(device)
    return torch.optim.AdamW(parameters, foreach=True).step


PROGRAMS: dict[str, Callable[[torch.device], Step]] = {
    "pointwise chain": lambda device: _chain(device, autograd=False),
    "pointwise chain, autograd": lambda device: _chain(device, autograd=True),
    "MLP forward, no_grad": _mlp_forward,
    "MLP training step, foreach SGD": _mlp_training,
    "AdamW step, foreach, 32 tensors": _optimizer_step,
}


# ---- devices -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    """A device that runs the programs: `cut` ends a step, `settle` waits until it is idle."""

    name: str
    device: torch.device
    cut: Callable[[], object]
    settle: Callable[[], object]


def _nothing() -> None:
    pass


def _contestants() -> list[Contestant]:
    torch._lazy.ts_backend.init()
    lazy_device = torch.device("lazy")
    return [
        Contestant("eager", torch.device("cpu"), _nothing, _nothing),
        Contestant("torch._lazy", lazy_device, torch._lazy.mark_step, torch._lazy.wait_device_ops),
        Contestant("ours", ltc.lazy_device(), ltc.mark_step, ltc.wait_device_ops),
    ]


class Runner:
    """One program on one device: runs steps and times them."""

    def __init__(self, contestant: Contestant, make: Callable[[torch.device], Step]) -> None:
        self._contestant = contestant
        torch.manual_seed(0)
        self._step = make(contestant.device)

    def times_us(self, steps: int, wait_each: bool) -> tuple[float, float]:
        """Run steps; return the shortest time of a step's ops and that of a cut."""
        clock = time.perf_counter_ns
        cut, settle = self._contestant.cut, self._contestant.settle
        step_ns, cut_ns = [], []
        for _ in range(steps):
            started = clock()
            kept = self._step()
            recorded = clock()
            cut()
            cut_ns.append(clock() - recorded)
            step_ns.append(recorded - started)
            del kept
            if wait_each:
                settle()
        settle()
        return min(step_ns) / 1e3, min(cut_ns) / 1e3


# ---- one process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One row: microseconds per op, an op being one that the lazy device records."""

    executor: str
    program: str
    ops: int
    eager_us: float
    torch_lazy_us: float
    ltc_us: float
    ltc_cut_us: float
    ltc_over_eager: float
    ltc_over_torch_lazy: float
    torch_lazy_fallbacks: list[str]


def measure(executor: str, program: str, rounds: int) -> Result:
    """Measure one program on all devices; in this process the lazy device runs on `executor`."""
    wait_each = executor == "null"
    runners = [Runner(contestant, PROGRAMS[program]) for contestant in _contestants()]
    for runner in runners:
        runner.times_us(5, wait_each)
    before = _ops_recorded(), _fallbacks_of_torch_lazy()
    for runner in runners:
        runner.times_us(1, wait_each)
    ops = _ops_recorded() - before[0]
    fallbacks = _fallbacks_of_torch_lazy()
    times: list[list[tuple[float, float]]] = []
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        times.append([runner.times_us(_STEPS_A_ROUND, wait_each) for runner in runners])
        gc.enable()
    eager, lazy, ours = ([a_round[k][0] for a_round in times] for k in range(3))
    return Result(
        executor=executor,
        program=program,
        ops=ops,
        eager_us=statistics.median(eager) / ops,
        torch_lazy_us=statistics.median(lazy) / ops,
        ltc_us=statistics.median(ours) / ops,
        ltc_cut_us=statistics.median(a_round[2][1] for a_round in times) / ops,
        ltc_over_eager=_median_ratio(ours, eager),
        ltc_over_torch_lazy=_median_ratio(ours, lazy),
        torch_lazy_fallbacks=sorted(n for n in fallbacks if fallbacks[n] > before[1].get(n, 0)),
    )


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _ops_recorded() -> int:
    prefix = f"{ltc.lazy_device().type}::"
    names = [name for name in metrics.counter_names() if name.startswith(prefix)]
    return sum(metrics.counter_value(name) or 0 for name in names)


def _fallbacks_of_torch_lazy() -> dict[str, int]:
    """What torch._lazy ran op by op on the CPU so far: such a step is not recorded, but cut up."""
    names = [n for n in torch._lazy.metrics.counter_names() if n.startswith("aten::")]
    return {name: torch._lazy.metrics.counter_value(name) for name in names}


# ---- the command ---------------------------------------------------------------------------------


def report(results: list[Result]) -> str:
    """Return the table."""
    header = [
        "program", "executor", "ops", "eager us", "torch._lazy us", "ltc us", "ltc cut us",
        "ltc / eager", "ltc / torch._lazy",
    ]  # fmt: skip
    rows = [
        [
            r.program,
            r.executor,
            str(r.ops),
            *(f"{us:.2f}" for us in (r.eager_us, r.torch_lazy_us, r.ltc_us, r.ltc_cut_us)),
            f"{r.ltc_over_eager:.2f}",
            f"{r.ltc_over_torch_lazy:.2f}" + ("*" if r.torch_lazy_fallbacks else ""),
        ]
        for r in results
    ]
    fallbacks = sorted({name for r in results for name in r.torch_lazy_fallbacks})
    lines = [
        "Microseconds per recorded op in steady state: medians over the rounds. A ratio is "
        "the median of the ratios of each round.",
        "",
        table(header, rows),
    ]
    if fallbacks:
        lines += [
            "",
            f"* Here torch._lazy cuts the step up, to run on the CPU: {', '.join(fallbacks)}",
        ]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure in one process for each program and executor, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of each program")
    parser.add_argument("--only", nargs=2, metavar=("EXECUTOR", "PROGRAM"), help="one row, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only:
        executor, program = args.only
        print(json.dumps(asdict(measure(executor, program, args.rounds))))
        return
    results = []
    for executor in EXECUTORS:
        for program in PROGRAMS:
            row = ("--only", executor, program, "--rounds", str(args.rounds))
            results.append(Result(**in_child("benchmarks.record", *row, LTC_EXECUTOR=executor)))
    if args.json:
        print(json.dumps({"torch": torch.__version__, "results": [asdict(r) for r in results]}))
    else:
        print(report(results))


if __name__ == "__main__":
    main()
