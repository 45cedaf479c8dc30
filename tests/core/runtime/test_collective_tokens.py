"""What other processes may wait for is handed over; a graph without collectives is not cut."""

from collections.abc import Iterator

import pytest
import torch

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.graph import collective
from ltc_core.runtime import collective_tokens

GROUP = "a group of this test"


class Alone:
    """A transport that reaches nobody."""

    def all_reduce(
        self, values: list[torch.Tensor], kind: str, scale: float, label: str
    ) -> list[torch.Tensor]:
        return [v * scale for v in values]


@pytest.fixture
def group() -> Iterator[str]:
    collective.TRANSPORTS[GROUP] = Alone()  # type: ignore[assignment]
    yield GROUP
    ltc.wait_device_ops()
    del collective.TRANSPORTS[GROUP]
    for key in [key for key in collective_tokens._tokens if key[0] == GROUP]:
        del collective_tokens._tokens[key]
    collective_tokens._last.pop(GROUP, None)


def num_cuts() -> int:
    return int(metrics.counter_value("Sync.Collective") or 0)


def test_only_graphs_with_collectives_are_handed_over(group: str) -> None:
    before = num_cuts()
    for _ in range(4):  # followed in C++ too
        x = torch.ones(3, device="ltc") + 1
        collective_tokens.hand_over()
        assert num_cuts() == before
        written = collective_tokens.token(group, 0)
        y = collective.ops.all_reduce(x, written, "sum", 0.5, "a tensor", group)
        assert num_cuts() == before
        collective_tokens.hand_over()
        assert num_cuts() == before + 1
        z = y * 2
        collective_tokens.hand_over()
        assert num_cuts() == before + 1
        assert (y.tolist(), z.tolist()) == ([1.0] * 3, [2.0] * 3)
        before = num_cuts()
