"""Metrics as text: the peers' report format, and a summary in sentences.

In: plain values (a name, a count, a `Metric` snapshot). Out: text; no state is kept here. The format is
the one that torch_xla's tools parse (`debug/metrics_compare_utils.py`). `metrics` collects the values and
calls this module.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from ltc_core.errors import listed

Kind = Literal["time", "bytes", "number"]

_PERCENTILES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)
_TIME_PARTS = (  # suffix, nanoseconds, digits
    ("d", 86_400_000_000_000, 2),
    ("h", 3_600_000_000_000, 2),
    ("m", 60_000_000_000, 2),
    ("s", 1_000_000_000, 2),
    ("ms", 1_000_000, 3),
)
_SIZE_SUFFIXES = ("B", "KB", "MB", "GB", "TB", "PB")
_MAX_NAMED = 20
_CAUSE_PREFIX = "CompileCause."
STEPS = ("MarkStep", "FoundStep")  # counters of the steps that a script marks, and of others


class Metric(NamedTuple):
    """A snapshot of one metric: the count and sum of all samples, and the last samples."""

    kind: Kind
    total_samples: int
    accumulator: float
    samples: list[tuple[float, float]]  # (time in seconds since the epoch, value)


def time_text(value_ns: float) -> str:
    """Render nanoseconds as '01m02s066ms326.694us'; leading parts that are zero are left out."""
    rest_ns = round(value_ns)
    text = ""
    for suffix, part_ns, digits in _TIME_PARTS:
        count, rest_ns = divmod(rest_ns, part_ns)
        if text or count:
            text += f"{count:0{digits}d}{suffix}"
    return f"{text}{rest_ns // 1000:03d}.{rest_ns % 1000:03d}us"


def bytes_text(value: float) -> str:
    """Render bytes as '1.23MB', in powers of 1024."""
    suffixes = iter(_SIZE_SUFFIXES)
    suffix = next(suffixes)
    while value >= 1024 and suffix != _SIZE_SUFFIXES[-1]:
        value /= 1024
        suffix = next(suffixes)
    return f"{value:.2f}{suffix}"


def number_text(value: float) -> str:
    """Render a plain number as '12.00'."""
    return f"{value:.2f}"


_TEXT_OF = {"time": time_text, "bytes": bytes_text, "number": number_text}


def metric_text(name: str, metric: Metric) -> str:
    """Render one metric as its block of the report."""
    text_of = _TEXT_OF[metric.kind]
    lines = [
        f"Metric: {name}",
        f"  TotalSamples: {metric.total_samples}",
        f"  Accumulator: {text_of(metric.accumulator)}",
    ]
    span_s = metric.samples[-1][0] - metric.samples[0][0]
    if span_s > 0:
        values_per_s = sum(value for _, value in metric.samples) / span_s
        lines.append(f"  ValueRate: {text_of(values_per_s)} / second")
        lines.append(f"  Rate: {len(metric.samples) / span_s:g} / second")
    ordered = sorted(value for _, value in metric.samples)
    shares = (
        f"{share * 100:g}%={text_of(ordered[int(share * len(ordered))])}" for share in _PERCENTILES
    )
    lines.append(f"  Percentiles: {'; '.join(shares)}")
    return "\n".join(lines) + "\n"


def counter_text(name: str, value: int) -> str:
    """Render one counter as its block of the report."""
    return f"Counter: {name}\n  Value: {value}\n"


def cause_counter(kind: str) -> str:
    """Name of the counter for a kind of cause, without spaces: parsers of reports expect none."""
    return _CAUSE_PREFIX + kind.replace(" ", "_")


def summary_text(
    counters: Mapping[str, int],
    metrics: Mapping[str, Metric],
    device_name: str,
    peak_bytes: int | None,
    tiers: Iterable[str] = (),
) -> str:
    """Sentences on what was recorded, built, run, moved and cut, and on what ran on the CPU instead.

    Args:
        tiers: sentences on how the programs ran; they follow the number of runs.
    """
    sentences = [
        *_steps(counters, device_name),
        *_programs(counters),
        *tiers,
        *_causes(counters),
        *_times(metrics),
        *_sizes(metrics, peak_bytes),
        *_syncs(counters),
        *_fallbacks(counters),
    ]
    return "\n".join(sentences) if sentences else "Nothing has been recorded."


def _num_steps(counters: Mapping[str, int]) -> int:
    return sum(counters.get(name, 0) for name in STEPS)


def _steps(counters: Mapping[str, int], device_name: str) -> Iterable[str]:
    steps = _num_steps(counters)
    ops = sum(n for name, n in counters.items() if name.startswith(f"{device_name}::"))
    if steps and ops:
        each = f", {ops / steps:.4g} a step"
        yield f"{counted(steps, 'step')} ran, {counted(ops, 'op')} were recorded{each}."
    elif steps:
        yield f"{counted(steps, 'step')} ran."
    elif ops:
        yield f"{counted(ops, 'op')} were recorded, and no step has ended."


def num_runs(counters: Mapping[str, int]) -> int:
    """How many programs ran, by either name: compat has torch_xla's other one with `use_spmd`."""
    return counters.get("ExecuteComputation", 0) + counters.get("ExecuteReplicated", 0)


def _programs(counters: Mapping[str, int]) -> Iterable[str]:
    built = counters.get("UncachedCompile", 0)
    cached = counters.get("CachedCompile", 0)
    runs = num_runs(counters)
    if built or cached or runs:
        yield (
            f"{counted(built, 'program')} built, {counted(cached, 'time')} one was found "
            f"in the cache, {counted(runs, 'run')} on the device."
        )


def _causes(counters: Mapping[str, int]) -> Iterable[str]:
    causes = {kind.replace("_", " "): n for kind, n in _named(counters, _CAUSE_PREFIX).items()}
    if causes:
        ranked = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
        compiles = counted(sum(causes.values()), "new program")
        steps = _num_steps(counters)
        each = "; ".join(f"{kind}, {n}" for kind, n in ranked)
        when = f" in {counted(steps, 'step')}" if steps else ""
        yield f"{compiles}{when}, because of: {each}."


def _times(metrics: Mapping[str, Metric]) -> Iterable[str]:
    seconds: dict[str, float] = defaultdict(float)
    for name, metric in metrics.items():
        seconds[name.replace("EagerOp", "")] += metric.accumulator / 1e9
    loop = list(_loop(seconds))
    parts = []
    for words, names in _OTHER_TIMES if loop else _TIMES:
        found = [seconds[name] for name in names if name in seconds]
        if found:
            parts.append(f"{sum(found):.3g} s {words}")
    yield from loop
    if parts:
        yield f"{'Time in all threads' if loop else 'Time went into'}: {', '.join(parts)}."


_OTHER_TIMES = (
    ("recording", ("LazyTracing",)),
    ("moving data", ("TransferToDeviceTime", "TransferFromDeviceTime")),
)
# DeviceLockWait is the peers' name for the time that a caller waits for in-flight work.
_TIMES = (
    ("building programs", ("CompileTime",)),
    ("executing", ("ExecuteTime",)),
    ("waiting", ("DeviceLockWait",)),
    *_OTHER_TIMES,
)


def _loop(seconds: Mapping[str, float]) -> Iterable[str]:
    """How the thread that cuts spent its time, from its first cut to its last cut or wait."""
    loop = seconds.get("LoopTime", 0.0)
    if not loop:
        return
    here, waited = seconds.get("ExecuteHere", 0.0), seconds.get("DeviceLockWait", 0.0)
    compiler = seconds.get("CompilerWait", 0.0)  # with LTC_COMPILE=sync, a run waits for it
    of_here = min(compiler, here)
    of_worker = compiler - of_here
    spent = {
        "computing in the thread that cuts": here - of_here,
        "waiting for values": max(waited - of_worker, 0.0),
        "waiting for the compiler": compiler,
        "waiting for batches": seconds.get("WaitForBatchTime", 0.0),
        "building programs": seconds.get("CompileTime", 0.0),
    }
    spent["the script and recording"] = max(loop - sum(spent.values()), 0.0)
    total = sum(spent.values())
    ranked = sorted(spent.items(), key=lambda item: -item[1])
    told = [
        f"{words} {s:.3g} s ({100 * s / total:.0f} %)" for words, s in ranked if s >= _LEAST * total
    ]
    yield f"Of {loop:.3g} s from the first cut on: {', '.join(told)}."
    beside = seconds.get("ExecuteTime", 0.0) - here - of_worker
    if beside >= _LEAST * total:
        yield f"Worker threads computed for {beside:.3g} s beside it."


_LEAST = 0.01  # a smaller share is not told


def _sizes(metrics: Mapping[str, Metric], peak_bytes: int | None) -> Iterable[str]:
    moved = []
    for name, words in (("OutboundData", "to the device"), ("InboundData", "back from it")):
        if name in metrics:
            moved.append(f"{bytes_text(metrics[name].accumulator)} {words}")
    if moved:
        yield f"Data moved: {', '.join(moved)}."
    graphs = metrics.get("TensorsGraphSize")
    if graphs is not None:
        mean = graphs.accumulator / graphs.total_samples
        largest = max(value for _, value in graphs.samples)
        yield f"A graph had {mean:.4g} nodes on average, {largest:g} at most of the recent ones."
    if peak_bytes is not None:
        yield f"The device held {bytes_text(peak_bytes)} at its peak."


def _syncs(counters: Mapping[str, int]) -> Iterable[str]:
    reasons = _named(counters, "Sync.")
    if reasons:
        total = sum(reasons.values())
        yield f"The graph was cut {counted(total, 'time')}: {_ranking(reasons)}."


def _fallbacks(counters: Mapping[str, int]) -> Iterable[str]:
    calls = _named(counters, "aten::")
    calls.pop("_local_scalar_dense", None)  # .item() is a fetch, which `_syncs` reports
    if calls:
        yield (
            f"{counted(sum(calls.values()), 'call')} of {counted(len(calls), 'op')} ran on the "
            f"CPU instead: {_ranking(calls)}. LTC_FALLBACK=error shows where."
        )
    elif num_runs(counters):
        yield "No op fell back to the CPU."


def _named(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): value
        for name, value in counters.items()
        if name.startswith(prefix)
    }


def _ranking(counts: Mapping[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return listed((f"{name} ({value})" for name, value in ranked), limit=_MAX_NAMED)


def counted(number: int, word: str) -> str:
    """A number with its word: '1 step', '2 steps'."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
