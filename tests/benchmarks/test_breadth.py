"""benchmarks.breadth: each model trains alike on the lazy device and without it; figures, report, failures."""

import json
import math
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import breadth, breadth_child
from benchmarks.breadth import ModelFigures, SideFigures
from benchmarks.breadth_child import SubjectTraining
from benchmarks.breadth_models import LARGE, SUBJECTS
from benchmarks.peer_kinds import PEERS
from benchmarks.snapshot import Snapshot

_NUM_STEPS = 4  # the first two have graphs of their own; from its second run on a graph is replayed


def _blocks(*wall_ms: float, processor: float = 1.0) -> list[dict[str, float]]:
    return [
        {"wall_s": ms / 1e3, "processor_s": processor * ms / 1e3, "steps": 10} for ms in wall_ms
    ]


@pytest.fixture
def models() -> dict[str, ModelFigures]:
    """Two models: all sides measured, and one with a side that failed and another whose losses differ."""
    whole = {
        "eager": SideFigures("", [2.0, 1.0, 0.5], True, 0, 0.0, _blocks(10, 20), _blocks(10, 20)),
        "compile": SideFigures("", [2.0, 1.1, 0.5], True, 0, 0.0, _blocks(5, 10), _blocks(5, 10)),
        "replay": SideFigures(
            "", [2.0, 1.0, 0.5], False, 0, 0.0,
            _blocks(15, 30), _blocks(12, 24, processor=2.0), 300, {"graphs": 3, "programs": 0},
        ),
        "warm": SideFigures(
            "", [2.0, 1.0001, 0.5], True, 41, 12.3,
            _blocks(8, 16), _blocks(4, 8, processor=3.0), 400, {"graphs": 4, "programs": 2},
        ),
    }  # fmt: skip
    whole["eager"].peak_bytes = 200
    other = {
        "eager": SideFigures("", [2.0, 1.0, 0.5], True, 0, 0.0, _blocks(10, 20), _blocks(10, 20)),
        "compile": SideFigures("RuntimeError: no such op"),
        "replay": SideFigures(
            "", [2.0, 1.2, math.nan], False, 0, 0.0,
            _blocks(40, 80), _blocks(48, 96), 200, {"graphs": 2, "programs": 0},
        ),
    }  # fmt: skip
    other["eager"].peak_bytes = 200
    return {"whole": ModelFigures(whole), "other": ModelFigures(other)}


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


class TestModels:
    @pytest.mark.parametrize("name", [n for n in SUBJECTS if n not in LARGE])
    def test_the_lazy_device_has_the_losses_of_eager(self, name: str) -> None:
        losses = []
        for peer in ("eager", "ltc"):
            training = SubjectTraining(PEERS[peer]("cpu"), SUBJECTS[name])
            losses.append([training.fetched_step() for _ in range(_NUM_STEPS)])
        eager, ltc = losses
        assert all(map(math.isfinite, eager)) and eager[0] != eager[1]
        assert ltc == pytest.approx(eager, rel=1e-3)

    def test_the_same_each_time(self) -> None:
        unet = SUBJECTS["unet"]
        pairs = zip(unet.module().parameters(), unet.module().parameters(), strict=True)
        assert all(a.equal(b) for a, b in pairs)
        (first, second), (again, _) = unet.batches(2), unet.batches(2)
        assert first[0].equal(again[0]) and not first[0].equal(second[0])


class TestFigures:
    def test_a_ratio_is_of_blocks_of_the_same_round(self) -> None:
        eager = SideFigures(waited=_blocks(10, 40, 90))
        replay = SideFigures(waited=_blocks(10, 20, 90))
        model = ModelFigures({"eager": eager, "replay": replay})
        assert breadth._over_eager("replay", "waited")(model) == 1.0
        assert breadth._over_eager("warm", "waited")(model) is None

    def test_the_best_is_chosen_in_each_round(self, models: dict[str, ModelFigures]) -> None:
        whole = models["whole"]
        assert breadth._warm_over_best(whole) == pytest.approx(0.8)
        whole.sides["compile"].error = "RuntimeError: no such op"
        assert breadth._warm_over_best(whole) == pytest.approx(0.4)

    def test_means_and_the_worst(self, models: dict[str, ModelFigures]) -> None:
        assert breadth.means(models)["replay"] == pytest.approx(math.sqrt(1.2 * 4.8))
        worst = breadth.worst(models)["replay"]
        assert worst is not None and worst == ("other", pytest.approx(4.8))
        assert breadth.means({})["replay"] is None and breadth.worst({})["replay"] is None

    def test_losses_that_differ_are_marked(self, models: dict[str, ModelFigures]) -> None:
        whole, other = models.values()
        assert whole.loss_difference("compile") == pytest.approx(0.1)  # it draws other numbers
        assert not whole.is_marked() and other.is_marked()
        other.sides["replay"].losses[1:] = [1.0, 0.5]
        assert not other.is_marked()
        other.sides["replay"].losses[0] = math.nan
        assert other.is_marked()


class TestReport:
    def test_it_has_every_figure(self, models: dict[str, ModelFigures]) -> None:
        text = breadth.report({1: models}, "2 cores", "2026-11-26")
        rows = _rows(text)
        assert rows[4] == [
            "whole", "15.00", "0.50", "1.50", "1.20", "2.40", "0.80", "0.40", "1.20", "0.80",
            "1.50", "2.00", "4 / 2",
        ]  # fmt: skip
        assert rows[5] == [
            "other *", "15.00", "-", "4.00", "4.80", "4.80", "-", "-", "-", "-", "1.00", "-", "2 / -",
        ]  # fmt: skip
        assert rows[6][:6] == ["geometric mean", "", "0.50", "2.45", "2.40", "3.39"]
        assert rows[7][:5] == ["worst", "", "0.50 whole", "4.00 other", "4.80 other"]
        losses = "2.0000 1.0000 0.5000"
        assert ["whole", losses, "1e-01", "0e+00", "1e-04", "12.3", "41"] in rows
        assert "differs from eager by more than 0.001: other." in text
        assert "- compile (other): RuntimeError: no such op" in text
        assert text.endswith("2 cores, 2026-11-26.")

    def test_a_table_for_each_number_of_threads(self, models: dict[str, ModelFigures]) -> None:
        text = breadth.report({1: models, 2: models}, "2 cores", "2026-11-26")
        assert "with 1 thread," in text and "with 2 threads," in text


class TestProcesses:
    @pytest.mark.timeout(180)  # two processes that import PyTorch
    def test_measure(self) -> None:
        options = breadth.Options(("actor_critic",), ("eager", "replay"), rounds=2)
        models = dict(breadth.measure(options, 1))
        found = json.loads(json.dumps(breadth.to_json({1: models}, options, "here", "today")))
        model = found["threads"]["1"]["models"]["actor_critic"]
        for name, side in model["sides"].items():
            assert not side["error"] and side["peak_bytes"] > 1e8 and len(side["losses"]) == 3
            assert side["tier_steps"] == 0 and side["is_compiled"] == (name == "eager")
            for block in side["waited"] + side["free"]:
                assert block["wall_s"] > 0 and block["processor_s"] > 0 and block["steps"] >= 3
        assert model["sides"]["replay"]["counts"]["graphs"] > 0
        assert model["ratios"]["replay"] > 0 and not model["is_marked"]
        assert breadth.report({1: models}, "here", "today")

    def test_a_side_that_fails_is_named_and_dropped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(breadth._ENVIRON, "replay", {"LTC_COMPILE": "never"})
        options = breadth.Options(("actor_critic",), ("eager", "replay"), rounds=1)
        with ExitStack() as processes:
            contest = breadth.Contest("actor_critic", 1, options, tmp_path, processes)
            contest.warm_up()
            assert list(contest.running) == ["eager"]
            os.killpg(contest.running["eager"].pid, signal.SIGKILL)
            contest.rounds()
            contest.end()
        assert not contest.running
        text = breadth.report({1: {"actor_critic": contest.figures}}, "here", "today")
        assert "- eager (actor_critic): SIGKILL" in text
        assert "- replay (actor_critic): SettingsError: " in text


class TestProgram:
    """A program that is swapped in after so many steps."""

    def test_the_step_of_the_swap_is_noted(self) -> None:
        steps: list[None] = []
        eager = PEERS["eager"]("cpu")
        peer = breadth_child.Peer(
            eager.device, eager.settle,
            cut=lambda: steps.append(None),
            counts=lambda: {"programs": int(len(steps) > 3)},
        )  # fmt: skip
        training = SubjectTraining(peer, SUBJECTS["actor_critic"])
        assert training.warm_up(steps=6, timeout_s=1.0)
        assert training.tier_steps == 4 and training.tier_s > 0
        assert training.snapshot is not None
        training.snapshot.close()


class TestSnapshot:
    @pytest.mark.parametrize("device", ["cpu", "ltc"])
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
    def test_the_losses_after_it_come_again(self, device: str, kind: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device)
        optimizer = kind(net.parameters(), lr=0.05)
        x = torch.randn(16, 4).to(device)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found: torch.Tensor = net(x).square().mean()
            found.backward()  # type: ignore[no-untyped-call]
            return found

        def steps() -> list[float]:
            return [optimizer.step(loss).item() for _ in range(4)]

        before = steps()
        snapshot = Snapshot(net)
        found = []
        for _ in range(2):
            snapshot.restore()
            found.append(steps())
        snapshot.close()
        assert found[0] == found[1] != before


class TestCommandLine:
    def test_large_models_are_named_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["breadth"])
        options, threads, file = breadth._parse()
        assert set(options.models) == set(SUBJECTS) - set(LARGE) and len(options.models) == 28
        assert threads == [1, 2] and not file
        sys.argv += ["--models", "mnist", "unet", "--threads", "2", "--sides", "eager", "--json"]
        options, threads, file = breadth._parse()
        assert options.models == ("mnist", "unet") and options.sides == ("eager",)
        assert threads == [2] and file == "-"

    def test_unknown_names(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["breadth", "--models", "vgg"])
        with pytest.raises(SystemExit):
            breadth.main()
        assert "invalid choice: 'vgg'" in capsys.readouterr().err
        monkeypatch.setattr(sys, "argv", ["breadth", "--json", "/no/directory/figures.json"])
        with pytest.raises(SystemExit):
            breadth.main()
        assert "there is no directory for /no/directory/figures.json" in capsys.readouterr().err
