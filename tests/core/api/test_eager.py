"""Eager mode, switched in a running program: each op is a cut, an error stands where it is made, and back again."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core.api.eager import eager_mode, eager_mode_context, is_eager_mode
from ltc_core.record import fast_path
from tests.core import child
from tests.core.counting import Counting
from tests.core.custom_ops import fail


@pytest.fixture(autouse=True)
def recording_again() -> Iterator[None]:
    ltc.wait_device_ops()
    yield
    eager_mode(False)


def train(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.ones(2, 3).to(device).requires_grad_()
    loss = (x.sin() * torch.arange(3.0).to(device)).sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def test_each_op_is_cut_and_gives_what_it_gave() -> None:
    device = ltc.lazy_device()
    expected = train(torch.device("cpu"))
    with Counting() as recorded:
        kept = [*train(device)]
        ltc.mark_step()
    assert recorded.syncs == {"MarkStep": 1}
    eager_mode(True)
    assert is_eager_mode()
    with Counting() as at_once:
        kept += train(device)
        ltc.mark_step()
    assert at_once.syncs.keys() == {"Eager"} and at_once.syncs["Eager"] >= 6
    eager_mode(False)
    assert not is_eager_mode()
    for _ in range(3):
        with Counting() as recorded:
            kept += train(device)
            ltc.mark_step()
        assert recorded.syncs == {"MarkStep": 1}
    for k in range(0, len(kept), 2):
        assert torch.allclose(kept[k].cpu(), expected[0]) and torch.allclose(
            kept[k + 1].cpu(), expected[1]
        )


def test_what_was_recorded_before_runs_with_the_first_op() -> None:
    x = torch.ones(3, device=ltc.lazy_device()) + 1
    with Counting() as counted, eager_mode_context(True):
        y = x * 2
    assert counted.syncs == {"Eager": 1} and y.tolist() == [4, 4, 4]


def test_an_op_that_fails_does_so_where_it_is_called() -> None:
    x = torch.ones(3, device=ltc.lazy_device())
    reached = []
    with pytest.raises(ValueError, match="this op fails"), eager_mode_context(True):
        y = fail(x, 0)
        reached.append(y)
    assert not reached and not is_eager_mode()


def test_the_context_gives_what_it_was_and_nests() -> None:
    with eager_mode_context(True) as before, eager_mode_context(False) as within:
        assert (before, within, is_eager_mode()) == (False, True, False)
    assert not is_eager_mode()


def test_it_is_for_all_threads() -> None:
    device = ltc.lazy_device()
    with Counting() as counted, eager_mode_context(True):
        thread = threading.Thread(target=lambda: torch.ones(2, device=device).exp())
        thread.start()
        thread.join()
    assert counted.syncs == {"Eager": 1}


def test_calls_are_followed_again() -> None:
    if fast_path._native is None:
        pytest.skip("the C++ part is not there")
    device = ltc.lazy_device()
    with eager_mode_context(True):
        train(device)
        before = fast_path.num_fast_calls()
        train(device)
        assert fast_path.num_fast_calls() == before
    for _ in range(4):
        train(device)
        ltc.mark_step()
    assert fast_path.num_fast_calls() > before


def test_a_program_that_starts_with_it_can_leave_it() -> None:
    code = """
        from ltc_core.api.eager import eager_mode
        def count(reason):
            return ltc.metrics.counter_value(f"Sync.{reason}") or 0
        x = torch.ones(2, device=device)
        y = (x + 1).sin()
        before = count("Eager")
        eager_mode(False)
        for _ in range(5):
            y = (x + 1).sin().exp()
            ltc.mark_step()
        eager_mode(True)
        assert count("Eager") == before > 0 and count("MarkStep") == 5, ltc.metrics.metrics_report()
        z = (x + 1).sin().exp()
        assert count("Eager") == before + 3 and torch.equal(z, y)
    """
    child.run(code, LTC_EAGER="1", LTC_COMPILE="off", LTC_AT_ONCE="never")


def test_without_a_cut_each_op_runs_where_it_is_called() -> None:
    code = """
        def step(x, rows):
            return (x.sin() * 2).index_select(0, rows).sum()
        x = torch.ones(3, 2, device=device)
        right, wrong = (torch.tensor([k], device=device) for k in (1, 7))
        for _ in range(20):
            y = step(x, right)
        cuts = ltc.metrics.counter_value("Sync.Eager")
        for _ in range(20):
            y = step(x, right)
        assert ltc.metrics.counter_value("Sync.Eager") == cuts
        assert y._h.value.buffer.data is not None
        reached = False
        try:
            z = step(x, wrong)
            reached = True
        except IndexError as error:
            assert "index out of range" in str(error), error
        assert not reached
        ltc.eager_mode(False)
        z = x.exp()
        assert z._h.value.buffer is None and torch.allclose(z.cpu(), torch.ones(3, 2).exp())
    """
    child.run(code, LTC_EAGER="1", LTC_COMPILE="off")
