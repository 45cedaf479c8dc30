"""While runs are forbidden, a line that needs one is an error and loses nothing; what no line asks for is left out."""

from collections.abc import Iterator

import pytest
import torch

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.errors import ExecutionForbiddenError
from ltc_core.runtime import execution_gate
from ltc_core.runtime.devices import context
from ltc_core.settings import settings


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    ltc.mark_step()
    execution_gate.close()
    yield
    execution_gate.open()


def num_runs() -> int:
    return metrics.counter_value("ExecuteComputation") or 0


def test_what_needs_a_run_is_an_error_at_its_line() -> None:
    y = torch.ones(3, device="ltc") + 1
    for need in (y.tolist, ltc.mark_step, ltc.wait_device_ops, lambda: bool(y[0] > 1)):
        with pytest.raises(ExecutionForbiddenError, match="Unexpected execution happens") as caught:
            need()
        assert "test_execution_gate.py" in str(caught.value)
        assert "full_graph=False" in caught.value.next
    execution_gate.open()
    assert y.tolist() == [2, 2, 2]


def test_a_run_that_C_plus_plus_repeats_is_forbidden_too() -> None:
    execution_gate.open()
    x = torch.ones(3, device="ltc")
    for _ in range(5):
        assert (x * 3).sum().item() == 9
    execution_gate.close()
    with pytest.raises(ExecutionForbiddenError):
        (x * 3).sum().item()


def test_what_has_a_value_is_read() -> None:
    execution_gate.open()
    x = torch.ones(3, device="ltc") * 2
    ltc.mark_step()
    execution_gate.close()
    assert x.tolist() == [2, 2, 2]
    ltc.mark_step()  # nothing to run


def test_found_steps_are_not_ended() -> None:
    execution_gate.open()
    p = torch.nn.Parameter(torch.ones(16, device="ltc"))
    optimizer = torch.optim.SGD([p], lr=0.5)
    execution_gate.close()
    before = num_runs()
    with settings.override(steps="auto"):
        for _ in range(20):
            optimizer.zero_grad()
            ((p * torch.ones(16).to("ltc")) ** 2).sum().backward()
            optimizer.step()
    assert num_runs() == before
    execution_gate.open()
    assert p.tolist() == [0] * 16


def test_a_long_trace_is_not_cut() -> None:
    device = context(ltc.lazy_device().index)
    before, limit = num_runs(), device.trace.limit
    with settings.override(trim_graph_size=50, max_graph_size=100):
        device.trace.first_limit = device.trace.limit = 50
        x = torch.zeros(2, device="ltc")
        for _ in range(300):
            x = x + 1
        assert num_runs() == before
        execution_gate.open()
        assert x.tolist() == [300, 300]
    device.trace.first_limit = device.trace.limit = limit
