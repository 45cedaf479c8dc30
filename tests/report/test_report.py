"""Reports: what a user sees of a run in a browser, what is left of a run that was killed, and what is refused."""

import json
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import profiler
from ltc_core.errors import ProfilerError
from ltc_core.executors.processor import num_cores
from ltc_core.record import modules
from ltc_core.report import recording
from ltc_core.report.build import data_of, read_ranks
from ltc_core.timeline import op_times, slices
from tests.core import child
from tests.report.browser import Page

NET = """
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
    def forward(self, x):
        return torch.relu(self.norm(self.convolution(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
torch.manual_seed(0)
net = Net().to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
def step(size):
    x = torch.randn(size, 4, 8, 8, generator=torch.Generator().manual_seed(size)).to(device)
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    ltc.mark_step()
    return loss
"""
TRAIN = (
    NET + "for k in range(12):\n    loss = step(8 if k != 7 else 5).item()\nprint(f'{loss:.9e}')\n"
)


@pytest.fixture(autouse=True)
def nothing_is_recorded_afterwards() -> Iterator[None]:
    ltc.wait_device_ops()
    yield
    assert recording.on is None and slices.on is None and op_times.on is None and not modules.is_on


@pytest.fixture(scope="module")
def of_a_net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a small convolutional net, one of whose batches is smaller."""
    run = tmp_path_factory.mktemp("net") / "run"
    out, err = child.run(TRAIN, LTC_REPORT=str(run), LTC_COMPILE="off")
    assert err == f"ltc: the report of this run is {run}/report.html\n"
    plain, _ = child.run(TRAIN, LTC_COMPILE="off")
    assert out == plain  # the loss is what it is without a report
    return run


LONG_STEPS = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(40)]).to("ltc")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(64, 128).to("ltc")
for _ in range(30):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()
"""


@pytest.mark.skipif(num_cores() < 2, reason="nothing runs early on one core")
def test_what_runs_early_is_part_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    child.run(LONG_STEPS, LTC_REPORT=str(run), LTC_COMPILE="off", LTC_STREAMING="auto")
    (rank,) = read_ranks(run)
    early = [one for lane in rank.threads.values() for one in lane if one.name == "run early"]
    assert early
    programs = data(run)["ranks"][0]["programs"]
    assert sum(p["runs"] for p in programs) == 30
    last = programs[-1]
    assert last["total_ms"] * 1000 > sum(one.took for one in early)


def data(run: Path) -> dict[str, Any]:
    return data_of(read_ranks(run))


class TestOfANet:
    def test_others_cannot_read_it(self, of_a_net: Path) -> None:
        assert stat.S_IMODE(of_a_net.stat().st_mode) == 0o700
        names = {path.name for path in of_a_net.iterdir()}
        assert names == {"report.html", "programs.json", "trace.json"}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in of_a_net.iterdir())

    def test_the_programs_and_why_they_were_built(self, of_a_net: Path) -> None:
        first, second, smaller = data(of_a_net)["ranks"][0]["programs"]
        assert [p["why"] for p in (first, second, smaller)] == [
            "first graph",
            "new optimizer state",
            "shapes of the batch",
        ]
        assert (first["runs"], second["runs"], smaller["runs"]) == (1, 10, 1)
        assert smaller["nearest"] == second["compile"] and second["is_measured"]
        assert {tier["tier"] for tier in second["tiers"]} >= {"op by op"}
        # Two convolutions of 4 channels and 9 taps, forward and two or one gradients each, and the linear layer.
        of_one = 2 * 8 * 64 * 4 * 4 * 9
        assert second["flops"] > 5 * of_one

    def test_ops_of_backward_belong_to_modules_and_to_their_forward_line(
        self, of_a_net: Path
    ) -> None:
        graph = data(of_a_net)["ranks"][0]["programs"][1]["graph"]
        found = {
            (graph["names"][node[0]], graph["modules"][node[2]])
            for node in graph["nodes"]
            if node[3]
        }
        assert ("convolution_backward", "Net.blocks.1.convolution") in found
        assert ("native_batch_norm_backward", "Net.blocks.0.norm") in found
        assert ("threshold_backward", "Net.blocks.1") in found
        lines = {graph["lines"][node[1]] for node in graph["nodes"] if node[3] and node[2]}
        assert len([line for line in lines if " in forward" in line]) >= 2, lines

    def test_a_step_is_the_sum_of_its_parts(self, of_a_net: Path) -> None:
        rank = data(of_a_net)["ranks"][0]
        assert rank["num_steps"] == 12
        mean = rank["mean"]
        assert sum(mean["parts"].values()) == pytest.approx(mean["ms"], rel=0.01)
        assert mean["parts"]["computing"] > 0
        assert rank["icicle"]["ms"] == pytest.approx(sum(row["ms"] for row in rank["lines"]))

    def test_the_peak_of_a_step(self, of_a_net: Path) -> None:
        graph = data(of_a_net)["ranks"][0]["programs"][1]["graph"]
        memory = graph["memory"]
        assert memory["peak"] == max(memory["curve"]) > memory["inputs"]
        held = sum(size for _, size in memory["holders"]) + memory["others"]
        assert held == memory["peak"]

    def test_in_a_browser(self, of_a_net: Path) -> None:
        with Page(of_a_net / "report.html") as page:
            assert "A step takes" in page.text("#summary")
            assert "float32[8, 4, 8, 8] -> [5, 4, 8, 8]" in page.text("#programs")
            assert page.ask("document.querySelectorAll('.icicle button').length") > 8
            # Groups are opened, an op is chosen, a group is closed again.
            page.click('.viewer [data-key="/Net"]')
            page.click('.viewer [data-key="/Net/blocks"]')
            page.click('.viewer [data-key="/Net/blocks/1"]')
            keys = page.ask("[...document.querySelectorAll('.item')].map((e) => e.dataset.key)")
            assert "/Net/blocks/1/convolution" in keys and "/Net/blocks/0" in keys
            page.click('.viewer [data-close="/Net/blocks"]')
            keys = page.ask("[...document.querySelectorAll('.item')].map((e) => e.dataset.key)")
            assert "/Net/blocks" in keys and "/Net/blocks/1/convolution" not in keys
            self.look_for(page, "batch_norm_backward")
            page.click("#results button")
            assert "native_batch_norm_backward" in page.text(".viewer .details")
            assert "Net.blocks.1.norm" in page.text(".viewer .details")
            # What changed with the smaller batch.
            page.click('[data-compare="3"]')
            assert page.text("#difference").startswith("From program 2 to 3: ")
            assert ", 0 ops added, 0 ops missing; 1 input of another type" in page.text(
                "#difference"
            )
            assert page.ask("document.querySelectorAll('.viewer').length") == 2
            assert page.ask("document.querySelectorAll('.item.changed').length") > 2
            assert page.problems == [] and page.requests == []

    def test_places_of_boxes(self, of_a_net: Path) -> None:
        """Of random graphs no boxes overlap and edges go down; a chain is straight, and two chains do not cross."""
        check = """(() => {
            let seed = 1;
            const below = (n) => { seed = (seed * 1103515245 + 12345) % 2147483648; return seed % n; };
            const problems = [];
            for (let k = 0; k < 60; k++) {
                const sizes = Array.from({length: 1 + below(40)}, () => [40 + below(200), 20 + below(300)]);
                const edges = Array.from({length: below(90)}, () => [below(sizes.length), below(sizes.length), 1]);
                const {width, height, places, routes} = layered(sizes, edges.filter(([a, b]) => a !== b));
                places.forEach((p, i) => {
                    const [w, h] = [p.width / 2, p.height / 2];
                    const gaps = [p.x - w, p.y - h, width - p.x - w, height - p.y - h];
                    if (!gaps.every((gap) => gap >= 11.9)) problems.push(["outside", k, i, gaps]);
                    for (const q of places.slice(i + 1)) {
                        const apart = [
                            Math.abs(p.x - q.x) - w - q.width / 2, Math.abs(p.y - q.y) - h - q.height / 2];
                        if (Math.max(...apart) < 17.9) problems.push(["overlap", k, i, apart]);
                    }
                });
                edges.filter(([a, b]) => a !== b).forEach(([a, b], n) => {
                    const route = routes[n];
                    if (a > b && route) problems.push(["a way back", k, a, b]);
                    if (a < b && places[a].y >= places[b].y) problems.push(["up", k, a, b]);
                    const goesUp = (point, i) => i && point.y <= route[i - 1].y;
                    if (route && route.some(goesUp)) problems.push(["route", k, a, b]);
                });
            }
            return problems.slice(0, 5);
        })()"""
        with Page(of_a_net / "report.html") as page:
            assert page.ask(check) == []
            boxes = "const boxes = [[90, 20], [30, 20], [50, 20], [70, 20]];"
            chain = page.ask(
                f"(() => {{ {boxes} return layered(boxes, [[0, 1], [1, 2], [2, 3]]).places.map((p) => p.x); }})()"
            )
            assert chain == [pytest.approx(chain[0])] * 4
            left, right, below_right, below_left = page.ask(
                f"(() => {{ {boxes} return layered(boxes, [[0, 3], [1, 2]]).places.map((p) => p.x); }})()"
            )
            assert (left < right) == (below_left < below_right)

    @staticmethod
    def look_for(page: Page, text: str) -> None:
        page.ask(
            f"((box) => {{ box.value = {json.dumps(text)}; box.dispatchEvent(new Event('input')); }})"
            "(document.querySelector('#search'))"
        )


COMPILED = """
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
for k in range(4):
    net.zero_grad()
    net(torch.ones(3, 4).to(device)).square().mean().backward()
    drawn = torch.rand(2, device=device)
    ltc.mark_step()
ltc.wait_device_ops()
print(*(ltc.metrics.counter_value(f"PersistentCache{name}") for name in ("Miss", "Hit")))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The reports of two processes that run one compiled program: the first builds it, the second finds it."""
    place = tmp_path_factory.mktemp("compiled")
    found = []
    for name, counts in (("built", "1 None\n"), ("found", "None 1\n")):
        run = place / name
        out, _ = child.run(
            COMPILED,
            LTC_REPORT=str(run),
            LTC_COMPILE="sync",
            LTC_COMPILED_CACHE_DIR=str(place / "programs"),
        )
        assert out == counts
        found.append(run)
    return found


class TestKernels:
    """What a compiled program runs as one kernel."""

    def test_a_program_has_them_also_from_the_cache(self, compiled: list[Path]) -> None:
        built, found = (data(run)["ranks"][0]["programs"][0] for run in compiled)
        assert built["kernels"] == found["kernels"] and built["eager"] == found["eager"]
        assert "compiled" in {tier["tier"] for tier in found["tiers"]}
        names = [built["graph"]["names"][node[0]] for node in built["graph"]["nodes"]]
        eager = built["eager"]
        assert [names[at] for at in eager] == ["empty_strided", "uniform_"]
        ops = [[names[at] for at in computed] for _, computed in built["kernels"]]
        assert ops.count(["addmm"]) == 2 and ops.count(["mm"]) == 3 and ["gelu"] in ops
        assert any({"gelu_backward", "gelu"} <= set(computed) for computed in ops), ops
        assert not {at for _, computed in built["kernels"] for at in computed} & set(eager)

    def test_in_a_browser(self, compiled: list[Path]) -> None:
        program = data(compiled[1])["ranks"][0]["programs"][0]
        kernels, graph = program["kernels"], program["graph"]
        names = [graph["names"][node[0]] for node in graph["nodes"]]
        backward = names.index("gelu_backward")
        (mine,) = [k for k, (_, computed) in enumerate(kernels) if backward in computed]
        with Page(compiled[1] / "report.html") as page:
            assert f"which {len(kernels)} kernel calls compute" in page.text(".viewer .head")
            computed = {at for _, ops in kernels for at in ops}
            assert f"{len(kernels)} kernel calls compute {len(computed)} ops." in page.text(
                ".viewer .details"
            )
            # By the name of a kernel the search finds its ops.
            TestOfANet.look_for(page, kernels[mine][0])
            assert self.numbers(page, "#results button", "at") == kernels[mine][1]
            # An op shows its kernel, and the other ops of it.
            page.click(f'#results [data-at="{backward}"]')
            assert f"{mine + 1}: {kernels[mine][0]}" in page.text(".viewer .details")
            others = [at for at in kernels[mine][1] if at != backward]
            assert f"together with {len(others)} other op" in page.text(".viewer .details")
            assert page.ask("document.querySelectorAll('.item.op.fused.selected').length") == 1
            # The kernel outlines its ops, and no others.
            page.click(f'.details [data-kernel="{mine}"]')
            assert self.numbers(page, ".details button", "op") == kernels[mine][1]
            outlined = page.ask(
                "[...document.querySelectorAll('.item.op.fused')].map((e) => e.dataset.key.split('#')[1])"
            )
            assert str(backward) in outlined and set(map(int, outlined)) <= set(kernels[mine][1])
            # Coloured by kernel, ops of one kernel have one colour.
            page.ask(
                "((box) => { box.value = 'kernel'; box.dispatchEvent(new Event('change')); })"
                "(document.querySelector('#color'))"
            )
            colours = page.ask(
                "[...document.querySelectorAll('.item.op')].map("
                "(e) => [+e.dataset.key.split('#')[1], e.querySelector('.heat').style.fill])"
            )
            shown = {at: colour for at, colour in colours if colour != "none"}
            assert shown and set(shown) <= computed
            first = {at: next(k for k, (_, ops) in enumerate(kernels) if at in ops) for at in shown}
            assert len(set(shown.values())) == len(set(first.values()))
            # An op that no kernel computes says why.
            TestOfANet.look_for(page, "uniform_")
            page.click(f'#results [data-at="{program["eager"][1]}"]')
            assert "it is called by itself, between compiled code" in page.text(".viewer .details")
            assert page.problems == []

    @staticmethod
    def numbers(page: Page, selector: str, name: str) -> list[int]:
        return page.ask(  # type: ignore[no-any-return]
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => +e.dataset.{name})"
        )


def test_a_graph_of_20_000_ops(tmp_path: Path) -> None:
    """Every click changes the drawing of few items: what one click does does not depend on the size of the graph."""
    run = tmp_path / "run"
    script = """
    from torch import nn
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))
    net = nn.Sequential(*(Layer() for _ in range(600))).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    for k in range(2):
        net(torch.ones(3, 4).to(device)).sum().backward()
        optimizer.step()
        ltc.mark_step()
    """
    child.run(
        script,
        LTC_EXECUTOR="null",
        LTC_REPORT=str(run),
        LTC_TRIM_GRAPH_SIZE="100000",
        LTC_CHECK_GRAPHS="0",
    )
    with Page(run / "report.html") as page:
        ops = page.text(".viewer .head")
        assert int(ops.split()[0]) > 18_000
        shown = "[...document.querySelectorAll('.item')].map((item) => item.dataset.key)"
        for _ in range(6):
            before = page.ask(shown)
            groups = page.ask("[...document.querySelectorAll('.group')].map((g) => g.dataset.key)")
            opened = groups[len(groups) // 2]
            page.click(f".viewer [data-key={json.dumps(opened)}]")
            now = page.ask(shown)
            assert opened in before and opened not in now and len(now) <= 120
        TestOfANet.look_for(page, "tanh_backward")
        page.click("#results button:nth-child(40)")
        assert "tanh_backward" in page.text(".viewer .details")
        assert page.ask("document.querySelectorAll('.item').length") <= 120
        assert page.problems == []


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    """A file, a module and an argument whose names are HTML; the page asks the network for nothing either."""
    name = "<img src=x onerror=window.run=1>.py"
    (tmp_path / name).write_text(
        textwrap.dedent("""
        import torch
        import ltc_core as ltc
        device = ltc.lazy_device()
        Net = type("</script><script>window['run']=1</script>", (torch.nn.Linear,), {})
        net = Net(2, 2).to(device)
        for k in range(3):
            net(torch.ones(2, 2).to(device)).sum().backward()
            ltc.mark_step()
        """)
    )
    child.run(
        f"import runpy; runpy.run_path({str(tmp_path / name)!r})",
        prelude="",
        LTC_REPORT=str(tmp_path / "run"),
    )
    with Page(tmp_path / "run" / "report.html") as page:
        assert "<img src=x onerror=window.run=1>.py:" in page.text("#time")
        assert "</script><script>window['run']=1</script>"[-27:] in page.text("#graph")
        assert page.ask("window.run") is None
        assert page.problems == [] and page.requests == []


def test_a_killed_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = (
        NET
        + "for k in range(6): step(8)\nltc.wait_device_ops()\nimport os, time\ntime.sleep(1.5)\nos.kill(os.getpid(), 9)"
    )
    child.run(code, returncode=-9, LTC_REPORT=str(run), LTC_COMPILE="off")
    assert not (run / "report.html").exists()
    found = subprocess.run(
        [sys.executable, "-m", "ltc_core.report", str(run)], capture_output=True, text=True
    )
    assert found.stdout == f"{run}/report.html: open it in a browser\n" and found.returncode == 0
    summary = data(run)["summary"]
    assert summary[0]["text"].startswith("The run has not ended by itself, or goes on")
    assert "of 6 steps" in summary[1]["text"]


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "ltc_core.report", str(tmp_path)], capture_output=True, text=True
    )
    assert found.returncode == 1
    assert found.stderr.startswith(f"ltc: there is no report in {tmp_path}")


class TestInAScript:
    def train(self, steps: int) -> None:
        model = nn.Linear(4, 2).to("ltc")
        for _ in range(steps):
            model(torch.ones(3, 4).to("ltc")).sum().backward()
            ltc.mark_step()

    def test_a_part_of_a_run(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.train(2)
        with profiler.report(tmp_path / "run"):
            self.train(5)
        self.train(1)
        assert data(tmp_path / "run")["ranks"][0]["num_steps"] == 5
        assert f"{tmp_path}/run/report.html" in capfd.readouterr().err

    def test_in_a_notebook(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """The object at the end of a cell is shown as the page, in a frame that can do nothing to the notebook."""
        found = profiler.report(tmp_path / "run")
        assert "it is made when the report stops" in found._repr_html_()
        with found:
            self.train(2)
        shown = found._repr_html_()
        assert shown.startswith('<iframe sandbox="allow-scripts" ')
        assert shown.count("<") == 2 and shown.count('"') == 8

    def test_one_at_a_time(self, tmp_path: Path) -> None:
        with profiler.report(tmp_path / "run"):
            with pytest.raises(ProfilerError, match="a report is recorded already"):
                profiler.report(tmp_path / "other").start()
            with pytest.raises(ProfilerError, match="a timeline is recorded already"):
                profiler.timeline(tmp_path / "other.json").start()
        with profiler.timeline(tmp_path / "run.json"):
            with pytest.raises(ProfilerError, match="a timeline is recorded already"):
                profiler.report(tmp_path / "third").start()
        with pytest.raises(ProfilerError, match="no report is recorded"):
            profiler.report(tmp_path / "run").stop()

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ProfilerError, match="the report cannot be written"):
            profiler.report(tmp_path / "file" / "run").start()

    def test_both_settings(self, tmp_path: Path) -> None:
        _, err = child.run(
            "torch.ones(2, device=device)",
            returncode=1,
            LTC_REPORT=str(tmp_path / "run"),
            LTC_TRACE=str(tmp_path / "t.json"),
        )
        assert "a report has a timeline of its own" in err and "Next: unset LTC_TRACE" in err

    def test_ops_that_ran_on_the_cpu(self, tmp_path: Path) -> None:
        with profiler.report(tmp_path / "run"):
            x = torch.arange(4.0).to("ltc")
            for _ in range(3):
                torch.nonzero(x)
                ltc.mark_step()
        rank = data(tmp_path / "run")["ranks"][0]
        (row,) = rank["fallbacks"]
        assert row["op"] == "nonzero" and row["calls"] == 3 and "test_report.py:" in row["line"]
        assert row["advice"]
