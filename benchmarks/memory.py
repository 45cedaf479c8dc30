"""Peak resident memory: of training beside eager, and of saving a model.

Each run is a process of its own. A training run's peak is the highest resident set of the whole
process, PyTorch included; its ratio to that of eager is what a machine must have more. Of a save
the peak is what comes on top of a process that holds the model, in units of its largest tensor.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltc_core as ltc
from benchmarks import in_child, table
from ltc_core import serialization as xser

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_STEPS = 5
_MIB = 2**20


# ---- reading the resident set --------------------------------------------------------------------


def _status_bytes(field: str) -> int:
    """Read a field of /proc/self/status: VmRSS, the resident set, or VmHWM, its peak.

    Not getrusage: its peak survives exec, so a child begins with the peak of its parent.
    """
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def resident_bytes() -> int:
    """Return the bytes this process has in memory."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the most this process had in memory, since its start or the last `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Let the peak start again from what is in memory now."""
    _CLEAR_REFS.write_text(_RESET_PEAK)


# ---- training ------------------------------------------------------------------------------------

Batches = Callable[[], tuple[Tensor, Tensor]]


def _mlp() -> tuple[nn.Module, Batches]:
    """13 million parameters: 50 MB of them, 200 MB with their gradients and AdamW's state."""
    width = 2048
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, lambda: (torch.randn(64, width), torch.randint(0, 10, (64,)))


def _cnn() -> tuple[nn.Module, Batches]:
    """Few parameters; 40 MB of activations for each of the two convolutions."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, lambda: (torch.randn(256, 1, 28, 28), torch.randint(0, 10, (256,)))


MODELS = {"MLP, 50 MB, AdamW": _mlp, "CNN, batch 256, AdamW": _cnn}


@dataclass(frozen=True)
class TrainingPeak:
    """Peak bytes of one process: before the model was made, and in the end."""

    before_bytes: int
    peak_bytes: int


def train(model_name: str, mode: str) -> TrainingPeak:
    """Train for a few steps in this process; `mode` is eager or lazy."""
    device = ltc.lazy_device() if mode == "lazy" else torch.device("cpu")
    before = peak_bytes()
    torch.manual_seed(0)
    model, batch = MODELS[model_name]()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        data, target = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(data.to(device)), target.to(device)).backward()
        optimizer.step()
        ltc.mark_step()  # nothing for eager
    ltc.wait_device_ops()
    return TrainingPeak(before, peak_bytes())


# ---- saving --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavePeak:
    """What `xser.save` needed on top of the model; sizes in bytes."""

    model_bytes: int
    largest_bytes: int
    extra_bytes: int


def save() -> SavePeak:
    """Save a model of 400 MB that is on the device."""
    model = nn.Sequential(*(nn.Linear(3200, 3200) for _ in range(10))).to(ltc.lazy_device())
    ltc.wait_device_ops()
    state = model.state_dict()
    sizes = [t.numel() * t.element_size() for t in state.values()]
    with tempfile.TemporaryDirectory() as directory:
        # A first save of something small pays for what any first save loads.
        xser.save({"x": torch.zeros(1).to(ltc.lazy_device())}, Path(directory, "first"))
        before = resident_bytes()
        reset_peak()
        xser.save(state, Path(directory, "model"))
        extra = peak_bytes() - before
    return SavePeak(sum(sizes), max(sizes), extra)


# ---- the command ---------------------------------------------------------------------------------


def measure(repeats: int) -> dict[str, Any]:
    """Run everything, each in its own process; of several repeats the median is kept."""
    training = []
    for model in MODELS:
        peaks = {}
        for mode in ("eager", "lazy"):
            runs = [_child("train", model, mode) for _ in range(repeats)]
            peaks[mode] = TrainingPeak(**sorted(runs, key=lambda r: r["peak_bytes"])[repeats // 2])
        eager, lazy = peaks["eager"], peaks["lazy"]
        training.append(
            {
                "model": model,
                "eager_bytes": eager.peak_bytes,
                "lazy_bytes": lazy.peak_bytes,
                "lazy_over_eager": lazy.peak_bytes / eager.peak_bytes,
                "growth_lazy_over_eager": (lazy.peak_bytes - lazy.before_bytes)
                / (eager.peak_bytes - eager.before_bytes),
            }
        )
    saved = SavePeak(**_child("save"))
    ratio = saved.extra_bytes / saved.largest_bytes
    return {
        "torch": torch.__version__,
        "training": training,
        "save": {**asdict(saved), "extra_over_largest": ratio},
    }


def _child(*arguments: str) -> dict[str, Any]:
    return in_child("benchmarks.memory", "--only", *arguments)  # type: ignore[no-any-return]


def report(figures: dict[str, Any]) -> str:
    """Return the tables."""
    training = [
        [
            row["model"],
            f"{row['eager_bytes'] / _MIB:.0f}",
            f"{row['lazy_bytes'] / _MIB:.0f}",
            f"{row['lazy_over_eager']:.2f}",
            f"{row['growth_lazy_over_eager']:.2f}",
        ]
        for row in figures["training"]
    ]
    saved = figures["save"]
    sizes = [f"{saved[k] / _MIB:.0f}" for k in ("model_bytes", "largest_bytes", "extra_bytes")]
    return "\n".join(
        [
            f"Peak resident memory of {_STEPS} training steps, in MiB. Growth is the peak less "
            "what the process had before the model.",
            "",
            table(["model", "eager", "lazy", "lazy / eager", "of the growth"], training),
            "",
            "Saving a model with ltc_core.serialization.save, in MiB.",
            "",
            table(
                ["model", "largest tensor", "extra", "extra / largest tensor"],
                [[*sizes, f"{saved['extra_over_largest']:.2f}"]],
            ),
        ]
    )


def main() -> None:
    """Parse the command line, measure in one process for each run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each training")
    parser.add_argument("--only", nargs="+", metavar="PART", help="one run in this process")
    args = parser.parse_args()
    if not _CLEAR_REFS.exists():
        parser.error("the peak of a process is read from /proc, which only Linux has")
    if args.only:
        part, *rest = args.only
        print(json.dumps(asdict(train(*rest) if part == "train" else save())))
        return
    figures = measure(args.repeats)
    print(json.dumps(figures) if args.json else report(figures))


if __name__ == "__main__":
    main()
