"""The figures of benchmarks.peers as Markdown tables, one table for each figure.

Comes from peer_figures.py; its text goes to the README. A peer that cannot train a model has a dash
in the tables, and its reason below them.
"""

import math
import statistics
from collections.abc import Callable, Mapping

from benchmarks import table
from benchmarks.peer_figures import (
    BEST_RIVALS,
    OURS,
    Comparison,
    ModelFigures,
    PeerFigures,
    compare,
    steps_until_steady,
)

TITLES = {
    "eager": "eager",
    "compile": "torch.compile",
    "lazy": "torch._lazy",
    "xla": "torch_xla",
    "ltc": "ltc",
    "jax": "ltc on JAX",
}
_NONE = "-"
_MIB = 2**20

Models = Mapping[str, ModelFigures]
Column = tuple[str, Callable[[ModelFigures], str]]


# ---- cells ---------------------------------------------------------------------------------------


def _ms(peer: PeerFigures) -> str:
    ms = peer.step_s * 1e3
    text = f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
    return text if peer.is_compiled else f"{text}*"


def _cold_warm(peer: PeerFigures) -> str:
    cold, warm = map(statistics.median, (peer.first_loss_cold_s, peer.first_loss_warm_s))
    return f"{cold:.2f} / {warm:.2f}"


def _mib(peer: PeerFigures) -> str:
    numbers = [peer.peak_bytes, peer.cold_peak_bytes, peer.children_peak_bytes]
    text = " / ".join(f"{number / _MIB:.0f}" for number in numbers)
    return f"{text}, GPU {peer.device_peak_bytes / _MIB:.0f}" if peer.device_peak_bytes else text


def _counts(peer: PeerFigures) -> str:
    counts = peer.counts
    if not counts:
        return _NONE
    return f"{counts['compiles']:.0f} / {counts['sent']:.1f} / {counts['fetched']:.1f}"


def _programs(model: ModelFigures) -> str:
    ours = model.working().get(OURS)
    if ours is None or not ours.counts:
        return _NONE
    return f"{ours.counts['programs']:.0f} / {ours.counts['graphs']:.0f}"


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _steady(model: ModelFigures) -> str:
    ours = model.working().get(OURS)
    if ours is None:
        return _NONE
    steps = steps_until_steady(ours.warm_times_s)
    return f"> {len(ours.warm_times_s)}" if steps is None or not ours.is_compiled else str(steps)


def _difference(model: ModelFigures, peer: str) -> str:
    difference = model.loss_differences().get(peer)
    if difference is None:
        return _NONE
    return f"{difference:.0e}" if math.isfinite(difference) else "NaN"


# ---- tables --------------------------------------------------------------------------------------


def _peer_names(models: Models) -> list[str]:
    return list(next(iter(models.values())).peers)


def _wide(models: Models, columns: list[Column]) -> str:
    """One row for each model."""
    rows = [[model.title, *(cell(model) for _, cell in columns)] for model in models.values()]
    return table(["model", *(title for title, _ in columns)], rows)


def _of_peers(models: Models, cell: Callable[[PeerFigures], str]) -> list[Column]:
    """One column for each peer."""

    def column(name: str) -> Column:
        return TITLES[name], lambda m: cell(m.peers[name]) if name in m.working() else _NONE

    return [column(name) for name in _peer_names(models)]


def _steps_table(models: Models) -> str:
    columns = _of_peers(models, _ms)
    if OURS in _peer_names(models):
        columns += [
            ("ltc / best of eager, compile", lambda m: _ratio(m.step_ratio(BEST_RIVALS))),
            ("ltc / _lazy", lambda m: _ratio(m.step_ratio(["lazy"]))),
            ("ltc / xla", lambda m: _ratio(m.step_ratio(["xla"]))),
            ("overlap", lambda m: _ratio(m.overlap_ratio())),
        ]
    return _wide(models, columns)


def _first_loss_table(models: Models) -> str:
    columns = _of_peers(models, _cold_warm)
    if OURS in _peer_names(models):
        columns += [
            ("ltc / eager, cold", lambda m: _ratio(m.first_loss_ratio())),
            ("steps until steady", _steady),
        ]
    return _wide(models, columns)


def _counts_table(models: Models) -> str:
    columns = _of_peers(models, _counts)
    if OURS in _peer_names(models):
        columns += [
            ("programs / graphs of ltc", _programs),
            ("compiles, ltc / xla", lambda m: _ratio(m.compiles_ratio())),
        ]
    return _wide(models, columns)


def _losses_table(models: Models) -> str:
    def column(name: str) -> Column:
        return TITLES[name], lambda m: _difference(m, name)

    return _wide(models, [column(name) for name in _peer_names(models) if name != "eager"])


def _imports_table(models: Models) -> str:
    rows = []
    for name in _peer_names(models):
        working = [m.peers[name] for m in models.values() if name in m.working()]
        if working:
            cold = statistics.median(s for peer in working for s in peer.import_cold_s)
            warm = statistics.median(s for peer in working for s in peer.import_warm_s)
            versions = ", ".join(f"{k} {v}" for k, v in working[0].versions.items())
            rows.append([TITLES[name], f"{cold:.2f}", f"{warm:.2f}", versions])
    return table(["import of", "cold s", "warm s", "versions"], rows)


def _summary_table(comparisons: list[Comparison]) -> str:
    rows = [
        [c.title, f"{c.geometric_mean:.2f}", f"{c.worst:.2f}", c.worst_model, str(c.num_models)]
        for c in comparisons
    ]
    return table(["ratio", "geometric mean", "worst", "on", "models"], rows)


def _notes(models: Models) -> list[str]:
    """Say why a peer has no figures, and which run op by op (*)."""
    titles: dict[tuple[str, str], list[str]] = {}
    for model in models.values():
        for name, peer in model.peers.items():
            why = peer.error or ("" if peer.is_compiled else "* runs op by op, it is not compiled")
            if why:
                titles.setdefault((name, why), []).append(model.title)
    notes = [
        f"- {TITLES[name]} ({'all models' if len(of) == len(models) else '; '.join(of)}): {why}"
        for (name, why), of in titles.items()
    ]
    return ["", *notes] if notes else []


def report(models: Models, machine: str, date: str) -> str:
    """Return all tables; `machine` and `date` end the text."""
    parts = [
        "Training step in ms: medians over the rounds. A ratio is the median of the ratios of each "
        "round. Overlap, for steps of 20 ms or more, is a step of the loop over the execution of "
        "its program alone.",
        _steps_table(models),
        "Seconds from the end of the imports to the first loss, with empty caches / with warm "
        "ones, and the steps ltc needs with a warm cache until it has its steady speed.",
        _first_loss_table(models),
        "Peak resident MiB: of the process / of the one that filled the caches / of its children.",
        _wide(models, _of_peers(models, _mib)),
    ]
    if any(peer.counts for model in models.values() for peer in model.peers.values()):
        parts += [
            "What XLA's library counted: compiles until the end / transfers to the device / from it, in "
            "a step of a block of ten of which the last loss is fetched. Programs and graphs are what "
            "ltc itself counted as compiled.",
            _counts_table(models),
        ]
    if "eager" in _peer_names(models) and len(_peer_names(models)) > 1:
        parts += [
            "Largest relative difference of the first losses to those of eager.",
            _losses_table(models),
        ]
    parts += [_imports_table(models)]
    comparisons = compare(models)
    if comparisons:
        parts += ["All models:", _summary_table(comparisons)]
    return "\n\n".join([*parts, "\n".join([f"{machine}, {date}.", *_notes(models)])])
