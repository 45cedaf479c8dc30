"""Programs as StableHLO in a file, and what they take, in the summary."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.executors import program_costs
from ltc_core.executors.device_program import Cost, Launch
from ltc_core.executors.jax.launch import JaxLaunch
from ltc_core.program.subgraph import Subgraph
from ltc_core.settings import settings


def train(width: int, steps: int = 4) -> nn.Module:
    device = ltc.lazy_device()
    net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(16, 8).to(device), torch.randint(3, (16,)).to(device)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        ltc.mark_step()
    ltc.mark_step(wait=True)
    return net


def test_each_program_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "programs.txt"
    train(51)  # what was compiled before is written, too
    with settings.override(save_tensors_file=str(path), save_tensors_fmt="hlo"):
        net = train(52)
        net[0].weight.cpu()
    records = path.read_text().split("[GraphInfo; ")[1:]
    assert all(
        re.match(r"device=\w+:0; sync=\w+; run=\d+\]\nmodule @jit_ordered", one) for one in records
    )
    of_step = [one for one in records if "tensor<52x8xf32>" in one]
    assert len(of_step) == 1
    # The memory of the parameters is that of their new values.
    assert of_step[0].count("tf.aliasing_output") == 4
    assert "stablehlo.dot_general" in of_step[0]
    assert any("tensor<51x8xf32>" in one for one in records)


def test_the_summary_says_what_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = JaxLaunch.cost

    def cost(launch: JaxLaunch) -> Cost | None:
        asked.append(launch)
        return original(launch)

    monkeypatch.setattr(JaxLaunch, "cost", cost)
    metrics.clear_all()
    train(640, steps=7)
    assert not asked
    text = metrics.summary()
    assert asked
    lines = [line for line in text.splitlines() if line.startswith("A program of ")]
    assert 1 <= len(lines) <= 3
    found = re.search(
        r"A program of \d+ ops \(recorded at [^)]*\) ran (\d+) times, each with ([\d.]+) kFLOP, "
        r"[\d.]+\w+ read and written, and [\d.]+\w+ of temporary memory\.",
        lines[0],
    )
    assert found is not None and int(found[1]) == 7
    # Products of 16 x 8 x 640 and 16 x 640 x 3: two of the first kind, three of the other, two operations each.
    products = 2 * 16 * 640 * (2 * 8 + 3 * 3)
    assert products <= float(found[2]) * 1e3 <= 2 * products


def test_the_programs_with_the_most_work_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Given(Launch):
        def __init__(self, subgraph: Subgraph, runs: int, flops: float) -> None:
            super().__init__(subgraph)
            self.runs, self._flops = runs, flops

        def run(self, inputs: Sequence[Any]) -> list[Any]:
            raise AssertionError

        def cost(self) -> Cost:
            return Cost(self._flops, 2048, 1024)

    train(53)
    some = next(one for one in program_costs.launches() if one.runs)
    given = [
        Given(some.subgraph, runs, flops)
        for runs, flops in ((1, 5e12), (9, 2e3), (2, 4e12), (4, 30), (0, 9e15))
    ]
    monkeypatch.setattr(program_costs, "launches", lambda: given)
    lines = program_costs.sentences({"ExecuteComputation": 1})
    shown = [
        re.search(
            r"ran (.*?), each with (.*?), (.*?) read and written, and (.*?) of", line
        ).groups()
        for line in lines
    ]
    assert shown == [
        ("2 times", "4 TFLOP", "2.00KB", "1.00KB"),
        ("1 time", "5 TFLOP", "2.00KB", "1.00KB"),
        ("9 times", "2 kFLOP", "2.00KB", "1.00KB"),
    ]
    assert program_costs.sentences({}) == []
