"""The harness of benchmarks.peers: what it computes, by known numbers; what it runs, on a tiny model."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import peer_kinds, peers
from benchmarks.models import WORKLOADS
from benchmarks.peer_figures import (
    Comparison,
    ModelFigures,
    PeerFigures,
    compare,
    loss_difference,
    median_ratio,
    steps_until_steady,
)
from benchmarks.peer_kinds import Peer
from benchmarks.peer_process import PeerFailed, PeerProcess
from benchmarks.peer_report import report
from benchmarks.training import Training
from tests.compiled_cache import put_extensions

ROOT = Path(__file__).parents[2]


def figures(
    *round_s: float, first_loss_s: float = 1.0, losses: tuple[float, ...] = (2.0,)
) -> PeerFigures:
    return PeerFigures(
        versions={"torch": "2.13.0"},
        import_cold_s=[1.0],
        import_warm_s=[1.0],
        first_loss_cold_s=[first_loss_s],
        first_loss_warm_s=[first_loss_s / 2],
        warm_times_s=[0.1] * 20,
        losses=[list(losses)],
        round_s=list(round_s),
    )


@pytest.fixture
def two_models() -> dict[str, ModelFigures]:
    """ltc takes half of the best rival's time on model a and twice of it on model b."""
    a = {
        "eager": figures(0.040, 0.044, 0.400),
        "compile": figures(0.060, 0.060, 0.060),
        "lazy": PeerFigures(error="NotImplementedError: no attention"),
        "ltc": figures(0.020, 0.022, 0.200, first_loss_s=1.5, losses=(2.002,)),
    }
    b = {
        "eager": figures(0.010, 0.010, 0.010),
        "compile": figures(0.005, 0.005, 0.005),
        "lazy": figures(0.040, 0.040, 0.040),
        "ltc": figures(0.010, 0.010, 0.010, first_loss_s=1.0),
    }
    return {
        "a": ModelFigures("model a", a, overlap=[1.1, 1.0, 1.2]),
        "b": ModelFigures("model b", b, overlap=[3.0, 3.0, 3.0]),
    }


class TestStatistics:
    def test_median_ratio_pairs_the_rounds(self) -> None:
        assert median_ratio([1.0, 3.0, 100.0], [2.0, 3.0, 50.0]) == 1.0

    def test_steady_from_the_first_step(self) -> None:
        assert steps_until_steady([9.0] + [1.0] * 20) == 0  # one slow step is noise

    def test_steady_after_the_slow_steps(self) -> None:
        assert steps_until_steady([3.0] * 6 + [1.0] * 20) == 4  # step 4 sees two slow of five

    def test_never_steady(self) -> None:
        assert steps_until_steady([1.0, 1.0, 1.0]) is None

    def test_loss_difference(self) -> None:
        assert loss_difference([1.0, 2.2], [1.0, 2.0, 5.0]) == pytest.approx(0.1)
        assert loss_difference([1.0, math.nan], [1.0, 2.0]) == math.inf
        assert loss_difference([1.0] * 20 + [9.0], [1.0] * 21) == 0  # later ones drift apart

    def test_comparison(self) -> None:
        found = Comparison.of("x", {"a": 0.5, "b": 2.0, "c": None})
        assert found == Comparison("x", 1.0, 2.0, "b", 2)
        assert Comparison.of("x", {"a": None}) is None


class TestFigures:
    def test_step_is_compared_with_the_faster_rival(
        self, two_models: dict[str, ModelFigures]
    ) -> None:
        assert two_models["a"].step_ratio(["eager", "compile"]) == pytest.approx(0.5)
        assert two_models["b"].step_ratio(["eager", "compile"]) == pytest.approx(2.0)

    def test_a_peer_that_failed_is_left_out(self, two_models: dict[str, ModelFigures]) -> None:
        assert two_models["a"].step_ratio(["lazy"]) is None
        assert two_models["b"].step_ratio(["lazy"]) == pytest.approx(0.25)
        assert "lazy" not in two_models["a"].loss_differences()

    def test_overlap_counts_for_long_steps_only(self, two_models: dict[str, ModelFigures]) -> None:
        assert two_models["a"].overlap_ratio() == 1.1
        assert two_models["b"].overlap_ratio() is None

    def test_compare(self, two_models: dict[str, ModelFigures]) -> None:
        rival, lazy, first_loss, overlap = compare(two_models)
        assert (rival.geometric_mean, rival.worst, rival.worst_model) == pytest.approx((1, 2, "b"))
        assert (lazy.worst_model, lazy.num_models) == ("b", 1)
        assert (first_loss.worst, first_loss.worst_model) == (1.5, "a")
        assert overlap.worst == 1.1

    def test_report(self, two_models: dict[str, ModelFigures]) -> None:
        text = report(two_models, "2 cores", "2026-11-20")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        assert ["model a", "44.0", "60.0", "-", "22.0", "0.50", "-", "-", "1.10"] in rows
        assert ["model b", "10.0", "5.00", "40.0", "10.0", "2.00", "0.25", "-", "-"] in rows
        assert ["model a", "0e+00", "-", "1e-03"] in rows  # losses
        reason = "- torch._lazy (model a): NotImplementedError: no attention"
        assert text.splitlines()[-3:] == ["2 cores, 2026-11-20.", "", reason]


class TestWorkloads:
    @pytest.mark.parametrize(
        ("name", "millions"),
        [("mnist", 1.2), ("mlp", 0.5), ("gpt", 0.8), ("resnet", 0.7), ("resnet50", 23.5),
         ("gpt30m", 29.5)],
    )  # fmt: skip
    def test_parameters(self, name: str, millions: float) -> None:
        parameters = sum(p.numel() for p in WORKLOADS[name].model().parameters())
        assert round(parameters / 1e6, 1) == millions

    def test_the_same_each_time(self) -> None:
        tiny = WORKLOADS["tiny"]
        for a, b in zip(tiny.model().parameters(), tiny.model().parameters(), strict=True):
            assert a.equal(b)
        (x, y), (x_2, _) = tiny.batches(2)
        again, _ = tiny.batches(2)[0]
        assert x.equal(again) and not x.equal(x_2) and y.dtype == torch.int64

    @pytest.mark.parametrize("name", ["mnist", "mlp", "gpt", "resnet"])
    def test_loss_is_that_of_a_guess(self, name: str) -> None:
        workload = WORKLOADS[name]
        data, target = workload.batches(1)[0]
        guess = math.log(65 if name == "gpt" else 10)
        loss = workload.loss(workload.model()(data), target).item()
        assert loss == pytest.approx(guess, rel=0.2)


class TestWarmUp:
    def training(self, compiles_steps: float, swaps_in: bool) -> Training:
        """A training whose peer compiles beside so many steps."""
        run: list[None] = []  # as many as steps were run

        def is_idle() -> bool:
            return len(run) > compiles_steps

        peer = Peer(
            torch.device("cpu"),
            lambda: None,
            cut=lambda: run.append(None),
            wait_compiler=lambda timeout_s: is_idle() or timeout_s > 0,
            is_compiled=lambda: swaps_in and is_idle(),
        )
        return Training(peer, WORKLOADS["tiny"])

    def test_ten_steps_follow_the_swap(self) -> None:
        training = self.training(compiles_steps=15, swaps_in=True)
        assert training.warm_up(steps=5, timeout_s=math.inf)
        assert len(training.times_s) == len(training.losses) == 25

    def test_what_is_refused_is_not_waited_for(self) -> None:
        training = self.training(compiles_steps=0, swaps_in=False)
        assert not training.warm_up(steps=5, timeout_s=math.inf)
        assert len(training.times_s) == 10

    def test_the_time_is_limited(self) -> None:
        training = self.training(compiles_steps=math.inf, swaps_in=True)
        assert not training.warm_up(steps=5, timeout_s=0)
        assert len(training.times_s) == 1


class TestProcesses:
    def test_a_peer_imports_nothing_of_ours(self) -> None:
        code = (
            "import sys, benchmarks.training as t; from benchmarks.models import WORKLOADS as w\n"
            "from benchmarks.peer_kinds import PEERS\n"
            "t.Training(PEERS['eager']('cpu'), w['tiny']).fetched_step()\n"
            "print([name for name in sys.modules if name.startswith('ltc_core')])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
        )
        assert done.stdout == "[]\n"

    # Five processes, one after the other, that import PyTorch.
    @pytest.mark.timeout(180)
    def test_measure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LTC_COMPILE", "off")
        of_peer = peers._environ

        def with_extensions(peer: str, device: str, cache: Path) -> dict[str, str]:
            environ = of_peer(peer, device, cache)
            put_extensions(Path(environ["LTC_CACHE_DIR"]))
            return environ

        monkeypatch.setattr(peers, "_environ", with_extensions)
        names = ("eager", "xla", "ltc", "jax")
        options = peers.Options(
            ("tiny",), names, rounds=2, steps=3, starts=1, torch_xla_python=sys.executable
        )
        models = dict(peers.measure(options))
        found = json.loads(json.dumps(peers.to_json(models, options, "here", "2026-11-20")))
        assert set(found) == {"date", "machine", "options", "environ", "models", "summary"}
        tiny = found["models"]["tiny"]
        assert len(tiny["overlap"]) == 2 and min(tiny["overlap"]) > 0
        assert tiny["peers"]["xla"]["error"].startswith("ModuleNotFoundError: No module named")
        assert tiny["peers"]["jax"]["error"] == "--jax-python names no interpreter that has it"
        for name, processes in (("eager", 1), ("ltc", 2)):
            peer = tiny["peers"][name]
            assert not peer["error"] and peer["is_compiled"] == (name == "eager")
            assert len(peer["round_s"]) == 2 and min(peer["round_s"]) > 0
            assert [len(losses) for losses in peer["losses"]] == [20] * processes
            assert peer["peak_bytes"] > 1e8 and peer["cold_peak_bytes"] > 1e8
            assert peer["versions"]["torch"] == torch.__version__
            for times in ("import", "first_loss"):
                assert len(peer[f"{times}_cold_s"]) == len(peer[f"{times}_warm_s"]) == 1
        assert tiny["loss_differences"]["eager"] == 0
        assert tiny["loss_differences"]["ltc"] < 1e-4
        titles = [line["title"] for line in found["summary"]]
        assert [title for title in titles if "20 ms" not in title] == [  # for long steps only
            "step, ltc / best of eager and torch.compile",
            "first loss with empty caches, ltc / eager",
        ]
        tables = report(models, "here", "today")
        assert "- torch_xla (all models): ModuleNotFoundError: No module named" in tables
        assert "- ltc on JAX (all models): --jax-python names no interpreter" in tables
        assert "- ltc (all models): * runs op by op, it is not compiled" in tables

    def test_a_peer_that_dies_in_its_turn_drops_out(self, tmp_path: Path) -> None:
        options = peers.Options(("tiny",), ("eager",), rounds=2, steps=3, starts=2)
        with ExitStack() as processes:
            contest = peers.Contest("tiny", options, tmp_path, processes)
            contest.starts()
            os.killpg(contest.running["eager"].pid, signal.SIGKILL)
            for stage in (contest.rounds, contest.overlap, contest.peaks):
                stage()
        eager = contest.figures.peers["eager"]
        assert len(eager.first_loss_cold_s) == len(eager.first_loss_warm_s) == 2
        assert eager.error == "SIGKILL" and not contest.running
        assert "- eager (all models): SIGKILL" in report({"": contest.figures}, "here", "today")

    def test_an_interpreter_that_is_missing(self) -> None:
        with pytest.raises(PeerFailed, match="^/no/python cannot be started: No such file"):
            PeerProcess("/no/python", "xla", "tiny", "cpu", {}, timeout_s=50)

    def test_a_peer_that_dies_is_a_failure_with_a_reason(self) -> None:
        with PeerProcess(sys.executable, "eager", "tiny", "cpu", {}, timeout_s=50) as process:
            assert process.peak_bytes() > 1e8
            os.killpg(process.pid, signal.SIGKILL)
            with pytest.raises(PeerFailed, match="SIGKILL"):
                process.ask("run", steps=1)

    def test_a_peer_that_does_not_answer_is_killed(self) -> None:
        with pytest.raises(PeerFailed, match="no answer in 0 s"):
            PeerProcess(sys.executable, "eager", "tiny", "cpu", {}, timeout_s=0)


class XlaProcess:
    """Stands for a process on a machine that has torch_xla: takes no time, and counts steps."""

    started: list[tuple[str, str, str, dict[str, str]]]
    children_peak_bytes = 0

    def __init__(
        self, python: str, peer: str, model: str, device: str, environ: dict[str, str], timeout_s: float
    ) -> None:  # fmt: skip
        self.started.append((peer, python, device, environ))
        self.hello = {"import_s": 1.0, "first_loss_s": 1.0, "versions": {"torch": "2.9.0"}}
        counts = {"xla": {"compiles": 2}, "ltc": {"compiles": 1, "programs": 1, "graphs": 1}}
        self.compiled = counts.get(peer)
        self.steps = 0

    def ask(self, command: str, watch: bool = False, **arguments: Any) -> Any:
        if command == "warm_up":
            return {"is_compiled": True, "times_s": [0.1] * 20, "losses": [2.0] * 20}
        if command == "run":
            self.steps += arguments["steps"]
            return 0.1
        if command == "counts":
            moved = {"sent": 50 + 3 * self.steps, "fetched": 20}
            return self.compiled | moved if self.compiled else {}
        return 0

    def peak_bytes(self) -> int:
        return 2**20

    def __enter__(self) -> "XlaProcess":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class TestOnXla:
    def test_measure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(XlaProcess, "started", [], raising=False)
        monkeypatch.setattr(peers, "PeerProcess", XlaProcess)
        names = ("eager", "xla", "ltc")
        options = peers.Options(
            ("tiny",), names, rounds=2, steps=3, starts=1, device="xla", torch_xla_python="/xla/python"
        )  # fmt: skip
        models = dict(peers.measure(options))
        for peer, python, device, environ in XlaProcess.started:
            assert (python, device) == ("/xla/python", "xla" if peer == "ltc" else "cpu")
            assert environ["PJRT_DEVICE"] == "CPU" and environ["XLA_PERSISTENT_CACHE_PATH"] == ""
            assert environ.get("LTC_DEVICE") == ("xla" if peer == "ltc" else None)
        found = json.loads(json.dumps(peers.to_json(models, options, "here", "2026-11-20")))
        tiny = found["models"]["tiny"]
        assert "counts" not in tiny["peers"]["eager"]
        assert tiny["peers"]["xla"]["counts"] == {"compiles": 2, "sent": 3, "fetched": 0}
        assert tiny["peers"]["ltc"]["counts"]["graphs"] == 1
        assert tiny["overlap"] == []  # how long XLA's programs run is not known
        assert [line["title"] for line in found["summary"]][
            -1
        ] == "compiles of XLA, ltc / torch_xla"
        text = report(models, "here", "today")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        title = WORKLOADS["tiny"].title
        assert [title, "-", "2 / 3.0 / 0.0", "1 / 3.0 / 0.0", "1 / 1", "0.50"] in rows

    def test_counts_of_both_come_from_the_same_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ltc_core import metrics

        samples = {"CompileTime": (3, 1e9, []), "TransferToDeviceTime": (8, 1e6, [])}
        library = SimpleNamespace(_xla_metric_data=samples.get)
        monkeypatch.setitem(sys.modules, "_XLAC", library)
        monkeypatch.setattr(metrics, "counter_value", {"CompiledProgram": 2}.get)
        theirs = {"compiles": 3, "sent": 8, "fetched": 0}
        assert peer_kinds._xla_counts() == theirs
        assert peer_kinds._ltc_xla_counts() == theirs | {"programs": 2, "graphs": 0}

    def test_without_it_nothing_is_counted(self, two_models: dict[str, ModelFigures]) -> None:
        options = peers.Options(("a", "b"), ("eager", "compile", "lazy", "ltc"))
        found = peers.to_json(two_models, options, "here", "2026-11-20")
        assert not any("counts" in p for m in found["models"].values() for p in m["peers"].values())
        assert not any("compiles" in line["title"] for line in found["summary"])
        assert "XLA" not in report(two_models, "here", "today")


class TestCommandLine:
    def refused(
        self,
        arguments: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> str:
        monkeypatch.setattr(sys, "argv", ["peers", *arguments])
        with pytest.raises(SystemExit):
            peers.main()
        return capsys.readouterr().err

    def test_unknown_names(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        err = self.refused(["--models", "mnist,vgg"], monkeypatch, capsys)
        assert "there is no vgg; there are mnist, mlp, gpt" in err

    def test_what_a_long_run_would_fail_on(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        err = self.refused(["--json", "/no/directory/figures.json"], monkeypatch, capsys)
        assert "there is no directory for /no/directory/figures.json" in err
        err = self.refused(["--rounds", "0"], monkeypatch, capsys)
        assert "argument --rounds: 0 is less than 1" in err

    def test_no_interpreter_for_torch_xla(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["peers", "--models", "tiny", "--peers", "xla"])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        peers.main()
        reason = "- torch_xla (all models): --torch-xla-python names no interpreter that has it"
        assert capsys.readouterr().out.splitlines()[-1] == reason

    def test_no_interpreter_for_the_xla_executor(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        err = self.refused(["--executor", "torch_xla"], monkeypatch, capsys)
        assert (
            "needs torch_xla 2.9 and the torch 2.9 it is built for, which this interpreter" in err
        )
        err = self.refused(["--executor", "torch_xla", "--device", "cuda"], monkeypatch, capsys)
        assert "--executor torch_xla runs on PJRT's CPU client only, not on --device cuda" in err

    def test_the_executor_chooses_peers_and_interpreter(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["peers"])
        options, _ = peers._parse()
        assert {*options.peers} == {*peer_kinds.PEERS} - {"jax"}
        assert (options.device, options.torch_xla_python, options.jax_python) == ("cpu", "", "")
        monkeypatch.setattr(sys, "argv", ["peers", "--jax-python", "/jax/python"])
        options, _ = peers._parse()
        assert (options.peers, options.jax_python) == (tuple(peer_kinds.PEERS), "/jax/python")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(sys, "argv", ["peers", "--executor", "torch_xla"])
        options, _ = peers._parse()
        assert options.peers == ("eager", "xla", "ltc")
        assert (options.device, options.torch_xla_python) == ("xla", sys.executable)
        sys.argv += ["--torch-xla-python", "/xla/python", "--peers", "xla,ltc"]
        options, _ = peers._parse()
        assert (options.peers, options.torch_xla_python) == (("xla", "ltc"), "/xla/python")
