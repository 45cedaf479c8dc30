"""What happens, made visible: syncs on stderr, graphs in a file, the user's lines, counters of a known loop."""

import re
from pathlib import Path

import pytest
import torch

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.debug.dump import FORMATS, graph_text
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta
from ltc_core.settings import settings
from tests.core import child
from tests.core.counting import Counting

pytestmark = pytest.mark.usefixtures("exact_shapes")

NAME = settings.device_name


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Take reports apart: (title, lines) of each block."""
    found: list[tuple[str, list[str]]] = []
    is_inside = False
    for row in text.splitlines():
        title, _, line = row.partition(": ")
        if line == "=" * 80:
            if not is_inside:
                found.append((title, []))
            is_inside = not is_inside
        else:
            assert is_inside and found[-1][0] == title, row
            found[-1][1].append(line)
    assert not is_inside
    return found


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


def loop(device: torch.device, times: int, size: int) -> torch.Tensor:
    """Two inputs and an op; a size of its own makes it new to the process."""
    x = torch.ones(size).to(device)
    for _ in range(times):
        x = x.add(1.0)
        ltc.mark_step()
    return x


class TestReports:
    def test_level_0_says_nothing(
        self, device: torch.device, capfd: pytest.CaptureFixture[str]
    ) -> None:
        loop(device, 3, 1011)
        assert capfd.readouterr() == ("", "")

    def test_level_1_shows_what_was_compiled(
        self, device: torch.device, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with settings.override(debug=1):
            loop(device, 4, 1012)
        out, err = capfd.readouterr()
        assert out == ""
        (title, lines), (after, sizes) = blocks(err)
        assert (title, after) == ("Compilation Analysis", "Post Compilation Analysis")
        assert lines[:2] == ["Compilation Cause", "  user mark_step"] and lines[3] == "Graph Info:"
        assert re.fullmatch(r"  Graph Hash: [0-9a-f]{32}", lines[4])
        assert lines[5:9] == [
            "  Number of Graph Inputs: 2",  # a tensor and a number
            "  Number of Graph Outputs: 1",
            "  Number of Graph Ops: 1",
            "Python Frame Triggered Execution:",
        ]
        assert re.fullmatch(r"  loop \(.*test_report\.py:\d+\)", lines[9])
        assert lines[10].startswith("  test_level_1_shows_what_was_compiled (")
        assert len(lines) == 9 + settings.debug_frames
        assert sizes[:2] == ["Graph input size: 3.95KB", "Graph output size: 3.95KB"]

    def test_level_2_shows_every_run_with_its_cause(
        self, device: torch.device, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with settings.override(debug=2, debug_frames=1):
            x = loop(device, 4, 1013)
            (x + 1).tolist()
            (x + 1).sum().item()
            x[x > 0].tolist()
        runs = [
            lines for title, lines in blocks(capfd.readouterr().err) if title.startswith("Exec")
        ]
        looking = "  most likely user code trying to access tensor value before mark_step"
        causes = [lines[1] for lines in runs]
        assert causes[:4] == ["  user mark_step"] * 4
        assert causes[4:] == [f"{looking} ({how})" for how in ("ToCpu", "Item", "nonzero", "ToCpu")]
        assert runs[0][-1].endswith("run 1 of this graph") and "Handed over in" in runs[0][-1]
        assert runs[3][3] == runs[2][3] and "run 1 " not in runs[3][-1]
        assert runs[5][-2].startswith("  test_level_2_shows_every_run_with_its_cause (")

    def test_level_3_shows_the_graph(
        self, device: torch.device, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with settings.override(debug=3):
            x = loop(device, 1, 1014)
        (graph,) = (lines for title, lines in blocks(capfd.readouterr().err) if title == "Graph")
        assert graph[0].startswith("%0: float32[1014] = input") and graph[-1].startswith("return %")
        assert re.search(r"aten\.add.*# .*test_report\.py:\d+ in loop", graph[1])
        assert x[0].item() == 2.0

    def test_in_a_file(self, device: torch.device, tmp_path: Path) -> None:
        path = tmp_path / "report.txt"
        with settings.override(debug=1, debug_file=str(path)):
            loop(device, 1, 1015)
        assert [title for title, _ in blocks(path.read_text())][0] == "Compilation Analysis"
        x = torch.ones(1016).to(device)
        with settings.override(debug=1, debug_file=str(tmp_path / "none" / "report.txt")):
            x.add_(1)
            with pytest.raises(ValueError, match="the reports cannot be written") as raised:
                ltc.mark_step()
            assert "LTC_DEBUG_FILE" in str(raised.value) and settings.debug_file is None

    def test_the_hash_of_each_run(
        self, device: torch.device, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with settings.override(emit_steplog=True):
            loop(device, 2, 1017)
            loop(device, 1, 1018)
        rows = capfd.readouterr().err.splitlines()
        assert len(rows) == 3 and rows[0] == rows[1] != rows[2]
        assert re.fullmatch(rf"\[ltc\] {NAME}:0: MarkStep, graph [0-9a-f]{{32}}", rows[0])

    def test_what_was_too_frequent_is_said_at_the_end(self) -> None:
        code = """
import torch
import ltc_core as ltc

x = torch.ones(1, device=ltc.lazy_device())
for n in range(12):
    (torch.ones(n + 1, device=x.device) * x).tolist()
    torch.linalg.lu(torch.eye(2, device=x.device))
    ltc.mark_step()
"""
        _, err = child.run(
            code, LTC_DEBUG="1", LTC_FORCE_FALLBACK="linalg_lu", LTC_DYNAMIC_SHAPES="never"
        )
        found = dict(blocks(err))
        assert re.fullmatch(
            r"CompileTime too frequent: \d+ counts during 12 steps", found["ltc-profiler"][0]
        )
        assert (
            found["ltc-profiler"][1]
            == "TransferFromDeviceTime too frequent: 12 counts during 12 steps"
        )
        assert found["ltc-profiler"][2] == "Op(s) not lowered: aten::linalg_lu; they ran on the CPU"
        assert found["Summary"][0].startswith("12 steps ran")
        assert child.run(code) == ("", "")

    def test_an_unknown_level_is_refused(self) -> None:
        with pytest.raises(ValueError, match="0, 1, 2, 3"):
            settings.debug = 7


class TestGraphsInAFile:
    def test_each_run_is_appended(self, device: torch.device, tmp_path: Path) -> None:
        path = tmp_path / "graphs.txt"
        with settings.override(save_tensors_file=str(path)):
            x = loop(device, 2, 1021)
            x.exp().tolist()
        records = path.read_text().split("[GraphInfo; ")[1:]
        assert len(records) == 3
        assert records[0].startswith(f"device={NAME}:0; sync=MarkStep; run=1]")
        assert "sync=ToCpu" in records[2] and "aten.exp" in records[2]
        assert all("return %" in record for record in records)
        assert "test_report.py" not in path.read_text()

    def test_as_dot_with_the_users_lines(self, device: torch.device, tmp_path: Path) -> None:
        path = tmp_path / "graphs.dot"
        with settings.override(save_tensors_file=str(path), save_tensors_fmt="dot", ir_debug=True):
            loop(device, 1, 1022)
        text = path.read_text()
        assert "digraph G {" in text and "->" in text
        assert re.search(r"test_report\.py:\d+ in loop", text)

    def test_a_file_that_cannot_be_written(self, device: torch.device, tmp_path: Path) -> None:
        """It is said in our words, once; the training goes on, as with LTC_METRICS_FILE."""
        x = torch.ones(1024).to(device)
        with settings.override(save_tensors_file=str(tmp_path / "none" / "graphs.txt")):
            x.add_(1)
            with pytest.raises(ValueError, match="cannot be written") as raised:
                ltc.mark_step()
            assert "LTC_SAVE_TENSORS_FILE" in str(raised.value)
            x.add_(1)
            ltc.mark_step()
        assert x[0].item() == 3.0

    def test_hlo_needs_another_executor(
        self, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is said once; graphs are written as text, as scripts for torch_xla got them so far."""
        path = tmp_path / "graphs.txt"
        x = torch.ones(1025).to(device)
        with settings.override(
            save_tensors_file=str(path), save_tensors_fmt="hlo", executor="inductor"
        ):
            for _ in range(2):
                x.add_(1)
                ltc.mark_step()
            assert x[0].item() == 3.0
        assert path.read_text().count("aten.add") >= 2
        assert capsys.readouterr().err == (
            "ltc: LTC_SAVE_TENSORS_FMT=hlo: the executor inductor has no HLO, graphs are written as text. "
            "Next: LTC_EXECUTOR=jax\n"
        )


def _graph(name: str = 'train.py:3 in "f"') -> Graph:
    meta = TensorMeta.packed((2,), torch.float32)
    aten = torch.ops.aten
    nodes = (
        Node(aten.exp.default, (Ref(0),), {}, 1, (meta,), result=0, line=name),
        Node(aten.aminmax.default, (Ref(1),), {}, 2, (meta, meta), result=(0, 1)),
        Node(aten.add_.Tensor, (Ref(1), Ref(3)), {}, 4, (meta,), writes=(0,), result="self"),
    )
    return Graph(nodes, {0: meta}, (2, 4), frozenset({0}))


class TestText:
    def test_text(self) -> None:
        text = graph_text(_graph())
        assert text.splitlines() == [
            "%0: float32[2] = input (donated)",
            "%1: float32[2] = aten.exp.default(%0)",
            "%2: float32[2], %3: float32[2] = aten.aminmax.default(%1)",
            "%4: float32[2] = aten.add_.Tensor(%1, %3)  writes %0",
            "return %2, %4",
        ]
        assert graph_text(_graph(), "backend") == text
        assert graph_text(_graph(), lines=True).splitlines()[1].endswith('# train.py:3 in "f"')

    def test_dot_is_well_formed_whatever_is_in_it(self) -> None:
        for name in ('a "quoted" name', "back\\slash", "x:1 in <lambda>"):
            text = graph_text(_graph(name), "dot", lines=True)
            for line in text.splitlines()[1:-1]:
                without = line.replace("\\\\", "").replace('\\"', "")
                assert without.count('"') % 2 == 0, line
        assert text.count("node0 -> node1;") == 1 and "node1 -> out2;" in text
        assert "input0 -> node2;" in text and "node2 -> out4;" in text

    def test_formats(self) -> None:
        for fmt in FORMATS:
            assert graph_text(_graph(), fmt)
        with pytest.raises(RuntimeError, match="Unrecognized IR format: hlo; one of text"):
            graph_text(_graph(), "hlo")


class TestCounters:
    def test_a_known_loop(self, device: torch.device) -> None:
        with Counting() as counted:
            loop(device, 5, 1031)
        grown = counted._grown
        assert grown["MarkStep"] == grown["Sync.MarkStep"] == grown["ExecuteComputation"] == 5
        assert grown["UncachedCompile"] + grown["CachedCompile"] == 5
        assert grown["UncachedCompile"] <= 2
        assert grown[f"{NAME}::add"] == 5

    def test_times_and_sizes(self, device: torch.device) -> None:
        metrics.clear_metrics()
        x = loop(device, 3, 1032)
        x.cpu()
        names = {"CompileTime", "ExecuteTime", "TransferToDeviceTime", "TransferFromDeviceTime"}
        assert names | {"InboundData", "OutboundData", "TensorsGraphSize"} <= set(
            metrics.metric_names()
        )
        data = metrics.metric_data("InboundData")
        assert data is not None and data[:2] == (1, 1032 * 4)
        report = metrics.metrics_report()
        assert re.search(r"Metric: ExecuteTime\n  TotalSamples: 3\n  Accumulator: ", report)
        assert "Counter: MarkStep\n  Value: " in report


def test_all_of_it_from_the_environment(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("metrics.txt", "graphs.dot")]
    out, err = child.run(
        """
        x = torch.ones(3).to(device)
        for _ in range(3):
            x = x * 2
            ltc.mark_step()
        print(x.tolist())
        """,
        LTC_METRICS_FILE=str(files[0]),
        XLA_SAVE_TENSORS_FILE=str(files[1]),
        LTC_SAVE_TENSORS_FMT="dot",
        XLA_IR_DEBUG="1",
        PT_XLA_DEBUG_LEVEL="2",
    )
    assert out == "[8.0, 8.0, 8.0]\n"
    runs = [lines for title, lines in blocks(err) if title == "Execution Analysis"]
    assert len(runs) == 3 and "  <module> (<string>:9)" in runs[0]
    reports = files[0].read_text().split("[MetricsData; step=")[1:]
    assert [r[0] for r in reports] == ["1", "2", "3"] and "Counter: MarkStep" in reports[2]
    graphs = files[1].read_text()
    assert graphs.count("digraph G {") == 3 and "<string>:8" in graphs
