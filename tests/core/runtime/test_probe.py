"""Probes: a read that needs little of a step does not end it."""

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ltc_core as ltc
from ltc_core import errors, metrics
from ltc_core.runtime import probe
from ltc_core.runtime.devices import context
from ltc_core.runtime.worker import Job
from ltc_core.settings import settings


def probed() -> int:
    return metrics.counter_value("ProbedRead") or 0


def cuts() -> int:
    return metrics.counter_value("ExecuteComputation") or 0


@pytest.fixture(autouse=True)
def nothing_is_recorded() -> Iterator[None]:
    context(0).wait()
    with settings.override(steps="marked"):
        yield
    context(0).wait()


def long(x: Tensor, n: int = 40) -> Tensor:
    for _ in range(n):
        x = x * 1.01 + 0.1
    return x


class Masked(nn.Module):
    """As libraries write it: the mask is used if it masks anything, which is asked in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        self.after = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.before(x)
        if not mask.bool().all():
            x = x * mask
        return self.after(x)


def trained(device: str, cut: Callable[[], object]) -> list[float]:
    torch.manual_seed(0)
    model = Masked().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for k in range(12):
        x = torch.randn(4, 8, generator=generator).to(device)
        mask = torch.ones(4, 8, dtype=torch.long)
        mask[0, 0] = k % 3 != 1
        optimizer.zero_grad()
        loss = model(x, mask.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        cut()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def test_a_model_that_asks_for_its_mask_is_one_graph_a_step() -> None:
    eager = trained("cpu", lambda: None)
    before, cuts_before = probed(), cuts()
    assert trained("ltc", ltc.mark_step) == pytest.approx(eager, rel=1e-5)
    assert probed() - before == 12
    assert cuts() - cuts_before == 12


def test_what_is_probed_is_still_recorded() -> None:
    x = torch.arange(6).to("ltc")
    kept = long(torch.ones(3, device="ltc"))
    doubled = x * 2
    before = cuts()
    assert doubled.sum().item() == 30 and doubled[2].item() == 4
    assert doubled.tolist() == [0, 2, 4, 6, 8, 10]
    assert cuts() == before
    doubled.add_(1)
    assert doubled.tolist() == [1, 3, 5, 7, 9, 11] and cuts() == before
    torch.testing.assert_close(kept.cpu(), long(torch.ones(3)))
    assert x.tolist() == list(range(6))


def test_what_was_written_is_seen() -> None:
    x = torch.zeros(4, dtype=torch.long).to("ltc")
    kept = long(torch.ones(3, device="ltc"))
    y = x * 2
    y[1] = 5
    before = probed()
    assert y.sum().item() == 5 and probed() - before == 1
    y[2] = 1
    assert y.sum().item() == 6 and probed() - before == 2
    ltc.mark_step()
    assert y.tolist() == [0, 5, 1, 0] and x.tolist() == [0] * 4
    del kept


def test_what_was_uploaded_and_written_is_cut() -> None:
    """As a count that is kept on the device."""
    x = torch.zeros(4, dtype=torch.long).to("ltc")
    kept = long(torch.ones(3, device="ltc"))
    x.add_(1)
    before = probed()
    assert x.sum().item() == 4 and probed() == before
    del kept


def test_numbers_of_the_script_may_differ() -> None:
    x = torch.ones(4, dtype=torch.long).to("ltc")
    for k in range(5):
        kept = long(torch.ones(3, device="ltc"))
        assert (x * (k + 0.5)).sum().item() == 4 * (k + 0.5)
        ltc.mark_step()
        del kept


def test_a_loss_ends_its_step() -> None:
    w = torch.ones(4).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(6):
        loss = w.square().sum()
        loss.backward()
        long(w.detach())
        optimizer.step()
        optimizer.zero_grad()
        before = cuts()
        loss.item()
        assert cuts() - before == 1


def test_what_is_all_that_is_recorded_is_cut_where_steps_are_waited_for() -> None:
    x = torch.ones(4, dtype=torch.long).to("ltc")
    found = []
    for k in range(6):
        before = cuts()
        assert (x * k).sum().item() == 4 * k
        found.append(cuts() - before)
    assert found[-2:] == [1, 1]


def goes_on() -> None:
    """Steps whose values nobody reads."""
    x = torch.ones(4, device="ltc")
    for _ in range(5):
        x = x * 2
        ltc.mark_step()
    context(0).worker.drain()
    assert not context(0).reads.is_waited


def _are_seen(mask: torch.Tensor) -> torch.Tensor:
    return (mask > 0).all()


def _are_seen_in_a_bias(mask: torch.Tensor) -> torch.Tensor:
    """As a library extends a mask: in many ops, with floats among their constants."""
    bias = torch.zeros(4, 4, device=mask.device).masked_fill(
        mask[:, None] == 0, torch.finfo(torch.float32).min
    )
    for _ in range(10):
        bias = bias.unsqueeze(0).expand(2, 4, 4).clone()[0]
    return (bias == 0).all()


@pytest.mark.parametrize("ask", [_are_seen, _are_seen_in_a_bias])
def test_a_read_does_not_wait_for_a_step_before(
    ask: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x, mask = torch.ones(4).to("ltc"), torch.ones(4, dtype=torch.long).to("ltc")
    goes_on()
    gate, worker = threading.Event(), context(0).worker
    assert worker.start()
    worker.submit(Job(gate.wait))
    in_the_end = threading.Timer(20, gate.set)
    in_the_end.start()
    try:
        assert ask(mask).item() is True
        assert not worker.is_idle
    finally:
        gate.set()
        in_the_end.cancel()
    y = x * 3
    assert y.tolist() == [3.0] * 4


class Experts(nn.Module):
    """The best of four experts for each row, which a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            out[mask] = expert(x[mask]) * weights[mask].unsqueeze(-1)
        return out


def with_experts(device: str) -> list[float]:
    torch.manual_seed(0)
    model = Experts().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for k in range(8):
        generator = torch.Generator().manual_seed(k % 3)
        loss = model(torch.randn(16, 8, generator=generator).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_rows_of_all_experts_are_found_with_one_cut() -> None:
    """The first mask is cut for, since a router decides it; the others need no more than what it has chosen."""
    eager = with_experts("cpu")
    before, cuts_before = probed(), cuts()
    assert with_experts("ltc") == pytest.approx(eager, rel=1e-5)
    assert probed() - before == 8 * 3
    assert cuts() - cuts_before == 8 * 2


def test_what_an_op_that_failed_was_to_choose_is_no_value() -> None:
    x, row = torch.ones(4, dtype=torch.long).to("ltc"), torch.tensor([9]).to("ltc")
    chosen = x[row]
    with pytest.raises(IndexError):
        ltc.mark_step(wait=True)
    kept = long(torch.ones(3, device="ltc"))
    with pytest.raises(IndexError):
        (chosen + 1).sum().item()
    del kept


def test_what_a_program_is_computing_is_waited_for() -> None:
    x = torch.ones(4, dtype=torch.long).to("ltc")
    y = x * 3
    gate, worker = threading.Event(), context(0).worker
    assert worker.start()
    worker.submit(Job(gate.wait))
    ltc.mark_step()
    later = threading.Timer(0.1, gate.set)
    later.start()
    kept = long(x)
    before = probed(), cuts()
    assert (y + 1).sum().item() == 16
    assert (probed(), cuts()) == (before[0] + 1, before[1])
    later.join()
    del kept


def test_a_mask_that_is_made_on_the_device() -> None:
    before = probed()
    for _ in range(3):
        kept = long(torch.ones(3, device="ltc"))
        mask = torch.ones(4, 8, device="ltc")
        assert mask.bool().all().item() is True
        ltc.mark_step()
        del kept
    assert probed() - before == 3


def test_batches_of_any_length() -> None:
    torch.manual_seed(0)
    layers = {"cpu": [nn.Linear(8, 8) for _ in range(12)]}
    layers["ltc"] = [copy.deepcopy(layer).to("ltc") for layer in layers["cpu"]]
    before, cuts_before = probed(), cuts()
    for k in range(30):
        length = 3 + k % 7
        x, mask = torch.randn(2, length, 8), torch.randint(0, 2, (2, length))
        found: dict[str, tuple[object, ...]] = {}
        ends = {}
        for device, net in layers.items():
            y, m = x.to(device), mask.to(device)
            for layer in net:
                y = layer(y).tanh()
            found[device] = m.sum().item(), m.bool().all().item(), (m * 2)[:, 1].tolist()
            ends[device] = y.sum()
        ltc.mark_step()
        assert found["ltc"] == found["cpu"]
        torch.testing.assert_close(ends["ltc"].cpu(), ends["cpu"], rtol=1e-4, atol=1e-5)
    assert probed() - before == 90 and cuts() - cuts_before == 30


def test_who_wants_the_memory_itself_gets_no_copy() -> None:
    x = torch.ones(4, dtype=torch.long).to("ltc")
    kept = long(torch.ones(3, device="ltc"))
    y = x * 2
    before = probed()
    data = context(0).value_data(y._h, "Pointer")
    assert probed() == before and data is context(0).value_data(y._h, "Pointer")
    del kept


def test_random_numbers_are_drawn_once() -> None:
    found = []
    for device in ("cpu", "ltc"):
        torch.manual_seed(3)
        x = torch.ones(4, dtype=torch.long).to(device)
        kept = long(torch.ones(3, device=device))
        noise = torch.randint(0, 90, (4,), device=device) + x
        found.append([noise.sum().item(), *torch.rand(2, device=device).tolist(), *kept.tolist()])
    assert found[0] == pytest.approx(found[1])


def test_a_failed_op_is_raised_at_the_read() -> None:
    table, index = torch.ones(3, 2, dtype=torch.long).to("ltc"), torch.tensor([7]).to("ltc")
    long(torch.ones(3, device="ltc"))
    with pytest.raises((errors.LtcError, IndexError), match=r"(?s)out of range.*test_probe\.py"):
        table.index_select(0, index).sum().item()


def test_what_takes_long_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MOST_NS", 0)
    x = torch.ones(4, dtype=torch.long).to("ltc")
    before = probed()
    for _ in range(10):
        kept = long(torch.ones(3, device="ltc"), 41)
        assert x.sum().item() == 4
        ltc.mark_step()
        del kept
    assert probed() - before == probe._SLOW


def test_a_script_that_only_reads_is_cut_in_the_end() -> None:
    x = torch.ones(4, dtype=torch.long).to("ltc")
    kept = long(torch.ones(3, device="ltc"))
    before = cuts()
    for k in range(100):
        assert (x + k).sum().item() == 4 + 4 * k
    assert cuts() > before
    del kept


def test_not_while_every_op_is_cut() -> None:
    x = torch.ones(4, dtype=torch.long).to("ltc")
    with settings.override(eager=True):
        before = probed()
        long(x)
        assert x.sum().item() == 4 and probed() == before
