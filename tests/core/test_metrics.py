"""Counters and metrics: exact under threads, cleared, read, and written in the peers' format."""

import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from ltc_core import metrics as met
from ltc_core.errors import SettingsError
from ltc_core.metrics_report import (
    Metric,
    bytes_text,
    cause_counter,
    metric_text,
    summary_text,
    time_text,
)
from ltc_core.settings import settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean():
    met.clear_all()
    yield
    met.clear_all()


def parse_duration_s(text):
    """Read '01m02s066ms326.694us' as seconds, as torch_xla's comparison tool means to.

    (Its own expression takes the 'm' of a leading '066ms' for minutes; here it may not.)
    """
    parts = re.fullmatch(
        r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+)s)?(?:(\d+)ms)?(?:([\d.]+)us)?", text
    )
    scales = (86400, 3600, 60, 1, 1e-3, 1e-6)
    return sum(
        float(part) * scale for part, scale in zip(parts.groups(), scales, strict=True) if part
    )


def parse_report(report):
    """Read a report the way torch_xla's comparison tool does."""
    metrics = re.findall(r"Metric: (\S+)\s+TotalSamples: (\d+)\s+Accumulator: (\S+)", report)
    counters = re.findall(r"Counter: (\S+)\s+Value: (\d+)", report)
    return {name: (int(n), total) for name, n, total in metrics}, dict(counters)


# --- counters ---


def test_counters():
    met.count("B")
    met.count("A", 3)
    met.count("A")
    met.count("Zero", 0)
    assert met.counter_names() == ["A", "B"]
    assert met.counter_value("A") == 4
    assert met.counter_value("Zero") is None
    assert met.counter_value("never counted") is None


def test_counts_of_threads_that_ended_are_exact():
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            threads = [
                threading.Thread(target=lambda: [met.count("T") for _ in range(5000)])
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert met.counter_value("T") == 3 * 8 * 5000


def test_ended_threads_leave_nothing_behind():
    for _ in range(50):
        thread = threading.Thread(target=met.count, args=("T",))
        thread.start()
        thread.join()
    assert met.counter_value("T") == 50
    assert len(met._cells) <= threading.active_count() + 1


def test_clearing_covers_the_counts_of_a_living_thread():
    counted, cleared = threading.Event(), threading.Event()

    def work():
        met.count("T", 5)
        counted.set()
        assert cleared.wait(30)
        met.count("T", 2)

    thread = threading.Thread(target=work)
    thread.start()
    assert counted.wait(30)
    assert met.counter_value("T") == 5
    met.clear_counters()
    assert met.counter_names() == []
    cleared.set()
    thread.join()
    assert met.counter_value("T") == 2


def test_ops_are_counted_under_the_devices_name():
    met.count_ops({"add": 2, "aten::add": 1, "aten::add.Tensor": 3, "aten::add_": 1})
    met.count_ops({f"{settings.device_name}::add": 1, "torchvision::nms": 1})
    assert met.counter_value(f"{settings.device_name}::add") == 7
    assert met.counter_value(f"{settings.device_name}::add_") == 1
    assert met.counter_value(f"{settings.device_name}::torchvision::nms") == 1
    assert met.executed_fallback_ops() == []


def test_ops_of_many_programs_and_threads_are_counted():
    programs = [{"mul": 1, f"only_{k % 7}": k} for k in range(700)]  # more than are kept apart

    def work() -> None:
        for ops in programs:
            met.count_ops(ops)
            met.count_ops(ops, 2)

    thread = threading.Thread(target=work)
    thread.start()
    work()
    thread.join()
    prefix = settings.device_name
    assert met.counter_value(f"{prefix}::mul") == 2 * 3 * 700
    for k in range(7):
        assert met.counter_value(f"{prefix}::only_{k}") == 6 * sum(range(k, 700, 7))
    met.clear_counters()
    assert met.counter_value(f"{prefix}::mul") is None
    met.count_ops(programs[0], 5)
    assert met.counter_names() == [f"{prefix}::mul"] and met.counter_value(f"{prefix}::mul") == 5


def test_executed_fallback_ops():
    met.count("aten::unique")
    met.count("aten::nonzero", 2)
    met.count("MarkStep")
    assert met.executed_fallback_ops() == ["aten::nonzero", "aten::unique"]


def test_a_forked_child_counts_although_the_lock_was_held():
    code = """
import os, signal, threading
from ltc_core import metrics
held, done = threading.Event(), threading.Event()
def hold():
    with metrics._lock:
        held.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait(30)
metrics._local.counts["A"] += 1
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that hangs ends by itself
    metrics.count("A")
    os._exit(10 + metrics.counter_value("A"))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout.strip() == "12"


# --- metrics ---


def test_metric_data():
    met.observe("CompileTime", 10)
    met.observe("CompileTime", 30)
    total_samples, accumulator, samples = met.metric_data("CompileTime")
    assert (total_samples, accumulator) == (2, 40.0)
    assert [value for _, value in samples] == [10, 30]
    assert samples[0][0] <= samples[1][0]
    assert met.metric_names() == ["CompileTime"]
    assert met.metric_data("never observed") is None


def test_the_last_1024_samples_are_kept():
    for value in range(3000):
        met.observe("X", value, kind="number")
    total_samples, accumulator, samples = met.metric_data("X")
    assert (total_samples, accumulator) == (3000, sum(range(3000)))
    assert [value for _, value in samples] == list(range(3000 - 1024, 3000))


def test_kinds():
    met.observe("InboundData", 2048)
    met.observe("TensorsGraphSize", 7)
    met.observe("MyTime", 1500)
    met.observe("Mine", 3, kind="number")
    met.observe("Mine", 4)
    accumulators = {name: text for name, (_, text) in parse_report(met.metrics_report())[0].items()}
    assert accumulators == {
        "InboundData": "2.00KB",
        "TensorsGraphSize": "7.00",
        "MyTime": "001.500us",
        "Mine": "7.00",
    }


def test_timer_observes_also_when_the_block_raises():
    with met.timer("T"):
        pass
    with pytest.raises(ZeroDivisionError), met.timer("T"):
        raise ZeroDivisionError
    total_samples, accumulator, _ = met.metric_data("T")
    assert total_samples == 2
    assert accumulator > 0


@pytest.mark.parametrize(
    ("clear", "left"),
    [
        (met.clear_counters, ([], ["M"])),
        (met.clear_metrics, (["C"], [])),
        (met.clear_all, ([], [])),
        (met.reset, ([], [])),
        (met.reset_metrics, ([], [])),
    ],
)
def test_clearing(clear, left):
    met.count("C")
    met.observe("M", 1)
    clear()
    assert (met.counter_names(), met.metric_names()) == left


# --- text ---


@pytest.mark.parametrize(
    ("value_ns", "text"),
    [
        (0, "000.000us"),
        (694, "000.694us"),
        (66_326_694, "066ms326.694us"),
        (1_600_000_000, "01s600ms000.000us"),
        (3_723_004_005_006, "01h02m03s004ms005.006us"),
        (90_000_000_000_000, "01d01h00m00s000ms000.000us"),
        (1500.4, "001.500us"),
    ],
)
def test_time_text(value_ns, text):
    assert time_text(value_ns) == text
    assert parse_duration_s(text) == pytest.approx(round(value_ns) / 1e9)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00B"),
        (1023, "1023.00B"),
        (1024, "1.00KB"),
        (1289748, "1.23MB"),
        (2**60, "1024.00PB"),
    ],
)
def test_bytes_text(value, text):
    assert bytes_text(value) == text


def test_metric_text_is_the_peers():
    samples = [(100.0 + i / 10, 1e6 * (i + 1)) for i in range(11)]
    assert metric_text("X", Metric("time", 11, 66e6, samples)) == (
        "Metric: X\n"
        "  TotalSamples: 11\n"
        "  Accumulator: 066ms000.000us\n"
        "  ValueRate: 066ms000.000us / second\n"
        "  Rate: 11 / second\n"
        "  Percentiles: 1%=001ms000.000us; 5%=001ms000.000us; 10%=002ms000.000us; "
        "20%=003ms000.000us; 50%=006ms000.000us; 80%=009ms000.000us; 90%=010ms000.000us; "
        "95%=011ms000.000us; 99%=011ms000.000us\n"
    )


def test_one_sample_has_no_rate():
    assert "Rate" not in metric_text("X", Metric("number", 1, 2.0, [(100.0, 2.0)]))


def test_report_is_read_by_the_peers_tool():
    met.observe("ExecuteTime", 1_250_000_000)
    met.observe("ExecuteTime", 750_000_000)
    met.observe("OutboundData", 3 * 2**20)
    met.count("MarkStep", 3)
    met.count("aten::nonzero", 1)
    metrics, counters = parse_report(met.metrics_report())
    assert metrics["ExecuteTime"][0] == 2
    assert parse_duration_s(metrics["ExecuteTime"][1]) == 2.0
    assert metrics["OutboundData"] == (1, "3.00MB")
    assert counters == {"MarkStep": "3", "aten::nonzero": "1"}


def test_short_report():
    for name in ("MarkStep", "UncachedCompile", "aten::nonzero"):
        met.count(name)
    for name in ("CompileTime", "LazyTracing"):
        met.observe(name, 1)
    metrics, counters = parse_report(met.short_metrics_report())
    assert set(metrics) == {"CompileTime"}
    assert set(counters) == {"MarkStep", "aten::nonzero"}
    short = met.short_metrics_report(
        counter_names=["UncachedCompile", "aten::nonzero"], metric_names=["LazyTracing", "None"]
    )
    metrics, counters = parse_report(short)
    assert set(metrics) == {"LazyTracing"}
    assert set(counters) == {"UncachedCompile", "aten::nonzero"}
    assert short.count("aten::nonzero") == 1


def test_an_empty_report():
    assert met.metrics_report() == ""
    assert summary_text({}, {}, "dev", None) == "Nothing has been recorded."


def test_summary_in_sentences():
    counters = {
        "MarkStep": 5,
        "UncachedCompile": 1,
        "CachedCompile": 4,
        "CompileCause.first_graph": 1,
        "CompileCause.shapes_of_the_batch": 2,
        "ExecuteComputation": 6,
        "dev::add": 40,
        "dev::mul": 2,
        "aten::nonzero": 2,
        "aten::unique": 1,
        "Sync.mark_step": 5,
        "Sync.item": 1,
    }
    metrics = {
        "CompileTime": Metric("time", 1, 0.5e9, [(1.0, 0.5e9)]),
        "TransferToDeviceTime": Metric("time", 1, 1e9, [(1.0, 1e9)]),
        "TransferFromDeviceTime": Metric("time", 1, 0.25e9, [(1.0, 0.25e9)]),
        "OutboundData": Metric("bytes", 1, 2.0**20, [(1.0, 2.0**20)]),
        "TensorsGraphSize": Metric("number", 2, 30.0, [(1.0, 10.0), (2.0, 20.0)]),
    }
    assert summary_text(counters, metrics, "dev", 3 * 2**20).split("\n") == [
        "5 steps ran, 42 ops were recorded, 8.4 a step.",
        "1 program built, 4 times one was found in the cache, 6 runs on the device.",
        "3 new programs in 5 steps, because of: shapes of the batch, 2; first graph, 1.",
        "Time went into: 0.5 s building programs, 1.25 s moving data.",
        "Data moved: 1.00MB to the device.",
        "A graph had 15 nodes on average, 20 at most of the recent ones.",
        "The device held 3.00MB at its peak.",
        "The graph was cut 6 times: mark_step (5), item (1).",
        "3 calls of 2 ops ran on the CPU instead: nonzero (2), unique (1). "
        "LTC_FALLBACK=error shows where.",
    ]


def times(**seconds: float) -> str:
    """The sentences of a summary on times."""
    metrics = {name: Metric("time", 1, s * 1e9, [(1.0, s * 1e9)]) for name, s in seconds.items()}
    return summary_text({}, metrics, "dev", None)


def test_the_summary_says_how_the_time_of_the_loop_was_spent() -> None:
    assert times(
        LoopTime=10,
        ExecuteHere=5,
        ExecuteTime=8,
        DeviceLockWait=2,
        WaitForBatchTime=1,
        CompileTime=0.001,
    ).split("\n") == [
        "Of 10 s from the first cut on: computing in the thread that cuts 5 s (50 %), waiting for values 2 s (20 %), "
        "the script and recording 2 s (20 %), waiting for batches 1 s (10 %).",
        "Worker threads computed for 3 s beside it.",
    ]


@pytest.mark.parametrize("where", ["here", "worker"])
def test_waiting_for_the_compiler_is_no_computing(where: str) -> None:
    spent = {"ExecuteHere": 9.0} if where == "here" else {"DeviceLockWait": 9.0}
    text = times(LoopTime=10, ExecuteTime=9, CompilerWait=8, **spent)
    assert "waiting for the compiler 8 s (80 %)" in text
    if where == "here":
        assert "computing in the thread that cuts 1 s (10 %)" in text
        assert "Worker threads" not in text
    else:
        assert "waiting for values 1 s (10 %)" in text
        assert "Worker threads computed for 1 s beside it." in text


def test_causes_are_counters_that_a_reports_readers_take():
    met.count(cause_counter("shapes of the batch"), 3)
    assert parse_report(met.metrics_report())[1] == {"CompileCause.shapes_of_the_batch": "3"}
    assert met.summary().splitlines()[0] == "3 new programs, because of: shapes of the batch, 3."


def test_summary_without_steps_or_fallbacks():
    text = summary_text({"dev::add": 3, "ExecuteComputation": 1}, {}, "dev", None)
    assert "no step has ended" in text
    assert "No op fell back to the CPU." in text


def test_summary_reads_the_peak_from_its_gauge(monkeypatch):
    monkeypatch.setattr(met, "_gauges", {})
    met.count("MarkStep")
    met.register_gauge("PeakMemory", lambda: 2048)
    assert met.summary() == "1 step ran.\nThe device held 2.00KB at its peak."


# --- the metrics file ---


def test_steps_are_appended(tmp_path):
    path = tmp_path / "metrics.txt"
    with settings.override(metrics_file=str(path)):
        met.count("MarkStep")
        met.append_step(1)
        met.count("MarkStep")
        met.append_step(2)
    block = "[MetricsData; step={0}]\nCounter: MarkStep\n  Value: {0}\n"
    assert path.read_text() == block.format(1) + block.format(2)


@pytest.mark.parametrize("stream", ["STDERR", "STDOUT"])
def test_steps_are_printed(stream, capsys):
    met.count("MarkStep")
    with settings.override(metrics_file=stream):
        met.append_step(7)
    captured = capsys.readouterr()
    text, other = captured.err, captured.out
    if stream == "STDOUT":
        text, other = other, text
    assert text == "[MetricsData; step=7]\nCounter: MarkStep\n  Value: 1\n"
    assert other == ""


@pytest.mark.parametrize(("value", "files"), [("1", ["ltc_metrics.txt"]), ("0", []), (None, [])])
def test_the_file_may_be_switched_on_or_off(value, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with settings.override(metrics_file=value):
        met.append_step(1)
    assert [path.name for path in tmp_path.iterdir()] == files


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    path = tmp_path / "missing" / "metrics.txt"
    with settings.override(metrics_file=str(path)):
        with pytest.raises(SettingsError, match=r"cannot be written to .*No such file.*\n  Next: "):
            met.append_step(1)
        met.append_step(2)  # switched off: the program goes on


def test_a_file_that_can_no_longer_be_written_is_a_warning(tmp_path):
    path = tmp_path / "metrics.txt"
    with settings.override(metrics_file=str(path)):
        met.append_step(1)
        path.unlink()
        path.mkdir()
        with pytest.warns(UserWarning, match="cannot be written to .* No more metrics are written"):
            met.append_step(2)
        met.append_step(3)


class TestShow:
    def test_in_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        met.show()
        assert capsys.readouterr().out == met.summary() + "\n"

    def test_in_a_notebook(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[dict[str, str]] = []
        notebook = types.SimpleNamespace(
            get_ipython=lambda: object(),
            display=types.SimpleNamespace(display=lambda data, raw: shown.append(data)),
        )
        monkeypatch.setitem(sys.modules, "IPython", notebook)
        monkeypatch.setattr(met, "summary", lambda: "1 < 2\nmore")
        met.show()
        assert shown == [
            {"text/plain": "1 < 2\nmore", "text/html": "<ul><li>1 &lt; 2</li><li>more</li></ul>"}
        ]
