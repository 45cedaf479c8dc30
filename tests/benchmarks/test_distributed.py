"""benchmarks.distributed: the report, and that what its processes run trains."""

from typing import Any

import pytest

from benchmarks import distributed, distributed_child
from benchmarks.models import WORKLOADS

FIGURES: dict[str, Any] = {
    "training": {
        "mlp": {
            "step_ms": {"ddp": 12.0, "ltc": 10.0, "one": 8.0},
            "speed_over_ddp": 1.2,
            "speed_over_one": 0.8,
            "loss": {"ddp": 1.0, "ltc": 1.0, "one": 1.0},
        }
    },
    "loader": {"load_ms": 10.0, "compute_ms": 9.0, "both_ms": 11.0, "over_larger": 1.1},
    "start": {"ltc-launch": 3.0, "torchrun": 2.0, "ratio": 1.5},
}


def test_the_report_has_every_figure() -> None:
    text = distributed.report(FIGURES)
    row = [cell.strip() for cell in text.splitlines()[4].split("|")[1:-1]]
    assert row == [WORKLOADS["mlp"].title, "12.00", "10.00", "8.00", "1.20", "0.80"]
    assert "11.0 ms a step together, 1.10 of the larger one" in text
    assert "ltc-launch 3.00 s, torchrun 2.00 s, ratio 1.50" in text


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert distributed._ratio([1.0, 4.0, 9.0], [1.0, 2.0, 1.0]) == 2.0


def test_the_child_trains_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_child, "_WARM_UP_S", 0.0)
    monkeypatch.setattr(distributed_child, "_TIMED_S", 0.0)
    found = distributed_child.train("one", "mlp")
    assert found["step_ms"] > 0 and found["loss"] > 0
    found = distributed_child.loader()
    assert found["both_ms"] > 0


def test_a_child_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="no_such_thing"):
        distributed.run([], ["no_such_thing"], "1")
