"""What is known of each peer after a run of benchmarks.peers, and what follows from it.

A ratio of steps is the median of the ratios of each round, so that a round in which the machine was
busy counts once. Times are in seconds. Comes from peers.py; peer_report.py writes it down.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_STEADY_WINDOW = 5
_STEADY_TOLERANCE = 1.2
_STEADY_TAIL = 10
_PARITY_STEPS = 20
_OVERLAP_FROM_S = 0.02  # a shorter step is bounded by what its recording takes

OURS = "ltc"
BEST_RIVALS = ("eager", "compile")


# ---- statistics ----------------------------------------------------------------------------------


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of each round, or start."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def steady_s(times_s: Sequence[float]) -> float:
    """Return the median of the last ten steps."""
    return statistics.median(times_s[-_STEADY_TAIL:])


def steps_until_steady(times_s: Sequence[float]) -> int | None:
    """Return how many steps are over when the steady speed is reached, None if it never is.

    It is reached at the first step from which the median of five is at most 1.2 times that of the
    last ten: a single slow step is noise.
    """
    for start in range(len(times_s) - _STEADY_WINDOW + 1):
        window_s = statistics.median(times_s[start : start + _STEADY_WINDOW])
        if window_s <= _STEADY_TOLERANCE * steady_s(times_s):
            return start
    return None


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of the first twenty losses; infinite if one is NaN."""
    pairs = list(zip(losses, expected, strict=False))[:_PARITY_STEPS]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


# ---- one model -----------------------------------------------------------------------------------


@dataclass
class PeerFigures:
    """One peer on one model. A cold start has empty caches, a warm one what a cold one left there.

    `losses` are the first ones of each process; `round_s` is the time of a step in each round;
    `cold_peak_bytes` is the peak of the process that compiled, `peak_bytes` that of the one that
    found everything in the cache; the children's is the most that they all had together. `counts` are
    those of peers that run on XLA: what was compiled until the end, what is moved in a step.
    """

    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    import_cold_s: list[float] = field(default_factory=list)
    import_warm_s: list[float] = field(default_factory=list)
    first_loss_cold_s: list[float] = field(default_factory=list)
    first_loss_warm_s: list[float] = field(default_factory=list)
    warm_times_s: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    is_compiled: bool = True
    round_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    cold_peak_bytes: int = 0
    children_peak_bytes: int = 0
    device_peak_bytes: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """A step in steady state."""
        return statistics.median(self.round_s)


@dataclass
class ModelFigures:
    """All peers on one model; `overlap` has a ratio for each round."""

    title: str
    peers: dict[str, PeerFigures] = field(default_factory=dict)
    overlap: list[float] = field(default_factory=list)

    def working(self) -> dict[str, PeerFigures]:
        """Return the peers that trained the model."""
        return {name: peer for name, peer in self.peers.items() if not peer.error}

    def step_ratio(self, rivals: Sequence[str]) -> float | None:
        """Return our step over that of the fastest of `rivals`, None if one of the two is missing."""
        working = self.working()
        running = [working[name] for name in rivals if name in working]
        if OURS not in working or not running:
            return None
        best = min(running, key=lambda peer: peer.step_s)
        return median_ratio(working[OURS].round_s, best.round_s)

    def overlap_ratio(self) -> float | None:
        """Return a step of our loop over the execution of its program alone, for long steps only."""
        ours = self.working().get(OURS)
        if ours is None or not self.overlap or ours.step_s < _OVERLAP_FROM_S:
            return None
        return statistics.median(self.overlap)

    def first_loss_ratio(self) -> float | None:
        """Return our time to the first loss with empty caches over that of eager."""
        working = self.working()
        if OURS not in working or "eager" not in working:
            return None
        return median_ratio(working[OURS].first_loss_cold_s, working["eager"].first_loss_cold_s)

    def compiles_ratio(self) -> float | None:
        """Return how often XLA compiled for us over how often it did for torch_xla."""
        working = self.working()
        found = [working[name].counts for name in (OURS, "xla") if name in working]
        if len(found) < 2 or not all(found):
            return None
        ours, theirs = found
        return ours["compiles"] / theirs["compiles"]

    def loss_differences(self) -> dict[str, float]:
        """Return for each peer how far its losses are from those of eager, in the worst process."""
        working = self.working()
        if "eager" not in working:
            return {}
        expected = working["eager"].losses[0]
        return {
            name: max(loss_difference(losses, expected) for losses in peer.losses)
            for name, peer in working.items()
        }


# ---- all models ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Ratios of several models in one line."""

    title: str
    geometric_mean: float
    worst: float
    worst_model: str
    num_models: int

    @classmethod
    def of(cls, title: str, ratios: Mapping[str, float | None]) -> "Comparison | None":
        """Compare over the models that have a ratio; None if no model has."""
        known = {model: ratio for model, ratio in ratios.items() if ratio is not None}
        if not known:
            return None
        worst_model = max(known, key=lambda model: known[model])
        mean = statistics.geometric_mean(known.values())
        return cls(title, mean, known[worst_model], worst_model, len(known))


def compare(models: Mapping[str, ModelFigures]) -> list[Comparison]:
    """Return the comparisons that a run's figures allow."""

    def steps(*rivals: str) -> dict[str, float | None]:
        return {name: model.step_ratio(rivals) for name, model in models.items()}

    ratios: dict[str, Mapping[str, float | None]] = {
        "step, ltc / best of eager and torch.compile": steps(*BEST_RIVALS),
        "step, ltc / torch._lazy": steps("lazy"),
        "step, ltc / torch_xla": steps("xla"),
        "first loss with empty caches, ltc / eager": {
            name: model.first_loss_ratio() for name, model in models.items()
        },
        "step of 20 ms or more in the loop, ltc / its execution alone": {
            name: model.overlap_ratio() for name, model in models.items()
        },
        "compiles of XLA, ltc / torch_xla": {
            name: model.compiles_ratio() for name, model in models.items()
        },
    }
    found = [Comparison.of(title, of_models) for title, of_models in ratios.items()]
    return [comparison for comparison in found if comparison is not None]
