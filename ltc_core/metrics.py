"""Counters and timers of the runtime, and the readers that torch_xla and torch._lazy users know.

Every layer calls `count` and `observe`, from any thread; users call the readers and reports. A counter
only grows: clearing stores its total, which is subtracted from then on. A metric keeps the count and sum
of all samples, and the last 1024 samples. `metrics_report` writes the text of the reports.
"""

import html
import sys
import threading
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from ltc_core.errors import SettingsError
from ltc_core.metrics_report import Kind, Metric, counter_text, metric_text, summary_text
from ltc_core.settings import file_of_rank, settings

_RING_SIZE = 1024
_FALLBACK_PREFIX = "aten::"
_FETCH = "aten::_local_scalar_dense"
_SHORT_COUNTERS = ("CachedCompile", "MarkStep", "DynamoSyncInputExecuteTime")
_SHORT_METRICS = (
    "CompileTime",
    "ExecuteTime",
    "ExecuteReplicatedTime",
    "TransferToDeviceTime",
    "TransferFromDeviceTime",
)
_DEFAULT_METRICS_FILE = "ltc_metrics.txt"

# Kind of a metric whose first `observe` passes none; every other metric is a time.
_KINDS: dict[str, Kind] = {
    "InboundData": "bytes",
    "OutboundData": "bytes",
    "TensorsGraphSize": "number",
    "InputOutputAliasCount": "number",
}

# Reentrant: a finalizer that counts may run while this thread holds it.
_lock = threading.RLock()


def renew_lock() -> None:
    """Replace the lock in a forked child: another thread may have held it at the fork."""
    global _lock
    _lock = threading.RLock()


# --- counters -----------------------------------------------------------------------------------
# One dict for each thread, summed when read: `+=` on a dict that threads share loses counts.
# A shared dict under a lock costs 163 ns a count, a thread's own dict 76 ns (2 cores, Python
# 3.11; `timeit` of 1000 calls in a loop).


class _Cell:
    """The counts of one thread. The cell is released when the thread ends; `_cells` keeps the counts."""

    __slots__ = ("__weakref__", "counts", "uses")

    def __init__(self) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.uses: _Uses = {}


# By the address of a mapping: the mapping of op -> how often, and how often it was counted.
_Uses = dict[int, list[Any]]
_MOST_USES = 256  # mappings, after which their ops are counted
_cells: list[tuple[weakref.ref[_Cell], defaultdict[str, int], _Uses]] = []
_ended: defaultdict[str, int] = defaultdict(int)  # the counts of threads that have ended
_cleared: dict[str, int] = {}  # the totals at the last clear_counters


def _fold_ended_threads() -> None:
    alive = []
    for cell, counts, uses in _cells:
        if cell() is None:
            for name, value in counts.items():
                _ended[name] += value
            _add_uses(_ended, uses)
        else:
            alive.append((cell, counts, uses))
    _cells[:] = alive


class _Local(threading.local):
    # Used only by a finalizer that counts while a thread's __init__ begins.
    counts = _ended
    uses: _Uses = {}

    def __init__(self) -> None:  # called once for each thread
        self.cell = _Cell()
        self.counts, self.uses = self.cell.counts, self.cell.uses
        with _lock:
            _fold_ended_threads()
            _cells.append((weakref.ref(self.cell), self.counts, self.uses))


_local = _Local()


def count(name: str, n: int = 1) -> None:
    """Add `n` (at least 0) to a counter. Cost: 76 ns, no lock."""
    _local.counts[name] += n


def count_ops(names_to_counts: Mapping[str, int], times: int = 1) -> None:
    """Count recorded ops, as '<device name>::<op>'. Cost: 0.2 us; the ops are counted when somebody reads a counter.

    Args:
        names_to_counts: op -> how often; it must not change any more. An op is named 'add', 'aten::add' or
            'aten::add.Tensor', which are the same counter; another namespace stays in the name.
        times: how often each of them is counted.
    """
    uses = _local.uses
    use = uses.get(id(names_to_counts))
    if use is None:
        if len(uses) >= _MOST_USES:
            with _lock:
                _add_uses(_local.counts, uses)
                uses.clear()
        use = uses[id(names_to_counts)] = [names_to_counts, 0]
    use[1] += times


def _add_uses(counts: defaultdict[str, int], uses: _Uses) -> None:
    for names_to_counts, times in list(uses.values()):
        for name, n in names_to_counts.items():
            counts[_op_counters.get(name) or op_counter(name)] += n * times


_op_counters: dict[str, str] = {}


def op_counter(name: str) -> str:
    """Name of the counter of an op."""
    prefix = f"{settings.device_name}::"
    bare = name.removeprefix(prefix).removeprefix(_FALLBACK_PREFIX).partition(".")[0]
    if settings.compat and not bare.endswith("__"):  # torch_xla counts add_ as xla::add
        bare = bare.removesuffix("_")
    return _op_counters.setdefault(name, prefix + bare)


_late_counts: list[Callable[[], None]] = []


def register_late_counts(count_all: Callable[[], None]) -> None:
    """Register a function that counts and observes what its caller has kept to itself, before anybody reads it."""
    _late_counts.append(count_all)


def _count_late() -> None:
    for count_all in _late_counts:
        count_all()


def _totals() -> dict[str, int]:
    _count_late()
    _ = _local.counts  # registers this thread now, so that no finalizer does so during the sum
    with _lock:
        _fold_ended_threads()
        totals = _ended.copy()
        for _, counts, uses in list(_cells):
            for name, value in list(counts.items()):
                totals[name] += value
            _add_uses(totals, uses)
        _add_uses(totals, _Local.uses)
    for _, read in _derived:  # without the lock: it may take that of a trace
        for name, value in read(totals).items():
            totals[name] += value
    return totals


def _counters() -> dict[str, int]:
    """Return the counters that are not zero, sorted by name."""
    totals = _totals()
    with _lock:
        names = {**_cleared, **totals}
        values = {name: totals.get(name, 0) - _cleared.get(name, 0) for name in names}
        # Ops that were pending at a clear may never have run.
        _cleared.update({name: totals.get(name, 0) for name, value in values.items() if value < 0})
    return dict(sorted((name, value) for name, value in values.items() if value > 0))


def counter_names() -> list[str]:
    """Return the names of the counters that are not zero, sorted."""
    return list(_counters())


def counter_value(name: str) -> int | None:
    """Return a counter's value, or None if nothing was counted under that name.

    Cost: 1 us if it is not derived; for an op, 5 us for each program that is kept.
    """
    if any(is_name(name) for is_name, _ in _derived):
        return _counters().get(name)
    _count_late()
    _ = _local.counts  # as in `_totals`
    with _lock:
        _fold_ended_threads()
        total = _ended.get(name, 0) + sum(counts.get(name, 0) for _, counts, _ in list(_cells))
        if name.startswith(f"{settings.device_name}::"):
            ops: defaultdict[str, int] = defaultdict(int)
            for uses in (_Local.uses, *(each for _, _, each in list(_cells))):
                _add_uses(ops, uses)
            total += ops.get(name, 0)
        return total - _cleared.get(name, 0) or None


_derived: list[tuple[Callable[[str], bool], Callable[[Mapping[str, int]], Mapping[str, int]]]] = []


def register_counters(
    is_name: Callable[[str], bool], read: Callable[[Mapping[str, int]], Mapping[str, int]]
) -> None:
    """Register counters that are computed when they are read.

    Args:
        is_name: whether a counter is one of them.
        read: takes the totals of all counters, returns what is added to them.
    """
    _derived.append((is_name, read))


def executed_fallback_ops() -> list[str]:
    """Return the ops that ran on the CPU instead of the device, as 'aten::name', sorted."""
    return [name for name in _counters() if name.startswith(_FALLBACK_PREFIX)]


def num_fallbacks() -> int:
    """Return the number of calls that ran on the CPU instead of the device; a fetch (`.item()`) is none."""
    return sum(
        value
        for name, value in _counters().items()
        if name.startswith(_FALLBACK_PREFIX) and name != _FETCH
    )


# --- metrics ------------------------------------------------------------------------------------


class _Ring:
    """One metric: the count and sum of all samples, and the last samples."""

    __slots__ = ("accumulator", "kind", "samples", "total_samples")

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.total_samples = 0
        self.accumulator: float = 0
        self.samples: deque[tuple[float, float]] = deque(maxlen=_RING_SIZE)

    def add_many(self, value: float, n: int) -> None:
        self.total_samples += n
        self.accumulator += n * value
        self.samples.extend([(time.time(), value)] * min(n, _RING_SIZE))

    def add(self, value: float) -> None:
        """Add a sample. No lock: a signal handler that waits for the worker, which observes too, may run in between.

        Python changes threads and calls handlers between calls and at loops only: each line is one change.
        """
        self.total_samples += 1
        self.accumulator += value
        self.samples.append((time.time(), value))

    def snapshot(self) -> Metric:
        return Metric(self.kind, self.total_samples, float(self.accumulator), list(self.samples))


_rings: dict[str, _Ring] = {}


def observe(name: str, value: float, kind: Kind | None = None) -> None:
    """Add a sample to a metric.

    Args:
        value: nanoseconds, bytes or a number, as `kind` says.
        kind: read with the metric's first sample only. None: the kind of a known name, otherwise a time.
    """
    ring = _rings.get(name)
    if ring is None:
        ring = _new_ring(name, kind)
    ring.add(value)


def observe_many(name: str, value: float, n: int) -> None:
    """Add `n` samples of one value to a metric of a known name."""
    (_rings.get(name) or _new_ring(name)).add_many(value, n)


def _new_ring(name: str, kind: Kind | None = None) -> _Ring:
    return _rings.setdefault(name, _Ring(kind or _KINDS.get(name, "time")))


class timer:
    """Observe how long a `with` block takes, also when it raises."""

    __slots__ = ("name", "start_ns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.start_ns = 0

    def __enter__(self) -> "timer":
        self.start_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        observe(self.name, time.perf_counter_ns() - self.start_ns)


def _metrics() -> dict[str, Metric]:
    _count_late()
    rings = {**_rings, **{name: _rings[of] for name, of in _same.items() if of in _rings}}
    return {name: ring.snapshot() for name, ring in sorted(rings.items())}


_same: dict[str, str] = {}


def register_metric(name: str, of: str) -> None:
    """Register another name of the metric `of`."""
    _same[name] = of


def metric_names() -> list[str]:
    """Return the names of the metrics that have samples, sorted."""
    return list(_metrics())


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """Return (total samples, accumulator, [(time in s, value), ...]) of a metric, or None.

    The list holds the last 1024 samples; times are seconds since the epoch.
    """
    metric = _metrics().get(name)
    return None if metric is None else (metric.total_samples, metric.accumulator, metric.samples)


def accumulated(name: str) -> float:
    """Return the sum of all samples of a metric, 0 if it has none. Cost: 0.3 us."""
    _count_late()
    ring = _rings.get(name)
    return 0.0 if ring is None else float(ring.accumulator)


_gauges: dict[str, Callable[[], int]] = {}


def register_gauge(name: str, read: Callable[[], int]) -> None:
    """Register a function that returns a current value. `summary` reads one: 'PeakMemory' (bytes)."""
    _gauges[name] = read


_sentences: list[Callable[[Mapping[str, int]], list[str]]] = []


def register_sentences(read: Callable[[Mapping[str, int]], list[str]]) -> None:
    """Register a function that returns sentences for `summary`, from the counters that are not zero."""
    _sentences.append(read)


# --- clearing -----------------------------------------------------------------------------------


def clear_counters() -> None:
    """Set every counter to zero."""
    totals = _totals()
    with _lock:
        _cleared.update(totals)


def clear_metrics() -> None:
    """Forget every metric."""
    _count_late()
    _rings.clear()


def clear_all() -> None:
    """Clear counters and metrics."""
    clear_counters()
    clear_metrics()


reset = clear_all  # torch._lazy's name
reset_metrics = clear_all  # lazy_tensor_core's name


# --- reports ------------------------------------------------------------------------------------


def metrics_report() -> str:
    """Return all metrics and counters as text, in the format of torch_xla's report."""
    metrics = "".join(metric_text(name, metric) for name, metric in _metrics().items())
    return metrics + "".join(counter_text(name, value) for name, value in _counters().items())


def short_metrics_report(
    counter_names: Iterable[str] | None = None, metric_names: Iterable[str] | None = None
) -> str:
    """Return a report of some counters and metrics; fallbacks (aten::) are always in it.

    Args:
        counter_names: default CachedCompile, MarkStep, DynamoSyncInputExecuteTime.
        metric_names: default the times of compiling, executing and moving data.
    """
    all_metrics = _metrics()
    wanted_metrics = tuple(metric_names or ()) or _SHORT_METRICS
    wanted_counters = tuple(counter_names or ()) or _SHORT_COUNTERS
    metrics = [metric_text(n, all_metrics[n]) for n in wanted_metrics if n in all_metrics]
    counters = [
        counter_text(name, value)
        for name, value in _counters().items()
        if name in wanted_counters or name.startswith(_FALLBACK_PREFIX)
    ]
    return "".join(metrics + counters)


def summary() -> str:
    """Return what happened, in sentences: steps, programs, tiers, seconds, bytes, cuts, fallbacks."""
    read_peak = _gauges.get("PeakMemory")
    peak_bytes = read_peak() if read_peak is not None else None
    counters = _counters()
    tiers = [sentence for read in _sentences for sentence in read(counters)]
    return summary_text(counters, _metrics(), settings.device_name, peak_bytes, tiers)


def show() -> None:
    """Show `summary`: as a list in a notebook, else as text on stdout."""
    text = summary()
    interactive = sys.modules.get("IPython")
    if interactive is None or interactive.get_ipython() is None:
        print(text)
        return
    rows = "".join(f"<li>{html.escape(line)}</li>" for line in text.splitlines())
    interactive.display.display({"text/plain": text, "text/html": f"<ul>{rows}</ul>"}, raw=True)


_appended: set[str] = set()


def append_step(step: int) -> None:
    """Append the report, under a line with the step, to the file of LTC_METRICS_FILE, if set.

    Raises:
        SettingsError: the file cannot be written to at the first report. A later failure (a full disk)
            warns and ends the reports; training goes on.
    """
    target = settings.metrics_file
    if target is None or target.lower() in ("0", "false", "no", "off"):
        return
    text = f"[MetricsData; step={step}]\n{metrics_report()}"
    if target in ("STDERR", "STDOUT"):
        print(text, end="", file=sys.stderr if target == "STDERR" else sys.stdout)
        return
    is_on = target.lower() in ("1", "true", "yes", "on")
    path = file_of_rank(_DEFAULT_METRICS_FILE if is_on else target)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        settings.metrics_file = None
        what = f"the metrics cannot be written to {path!r}: {error.strerror or error}"
        if path not in _appended:
            raise SettingsError(
                what, next="set LTC_METRICS_FILE to a file that can be written, STDERR or STDOUT."
            ) from error
        warnings.warn(f"{what}. No more metrics are written.", stacklevel=2)
    else:
        _appended.add(path)
