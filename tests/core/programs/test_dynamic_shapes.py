"""Batches of many sizes: the numbers of eager PyTorch, from a few programs."""

import gc
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.record import dynamic_steps, fast_path
from ltc_core.runtime.devices import context
from ltc_core.settings import settings

pytestmark = pytest.mark.usefixtures("marked_steps")

Step = Callable[[nn.Module, int, torch.device], Tensor]


@pytest.fixture(autouse=True)
def new_trace() -> Iterator[None]:
    """No step of another test is there."""
    device = context(0)
    device.wait()
    device.trace.forget()
    device.compiler.forget()
    yield


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def num_programs() -> int:
    return metrics.counter_value("UncachedCompile") or 0


class Sequences(nn.Module):
    """Attention over a sequence of any length, with views, masks and sizes in its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.places = nn.Embedding(64, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 50)

    def forward(self, x: Tensor) -> Tensor:
        n, length = x.shape
        h = self.tokens(x) + self.places(torch.arange(length, device=x.device))
        q, k, v = self.qkv(self.norm(h)).view(n, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(later, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, 16)
        logits: Tensor = self.out(F.gelu(h + mixed))
        return logits


class Images(nn.Module):
    """Convolutions over images of any size, with a norm that keeps statistics and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)), inplace=True)
        h = F.interpolate(F.max_pool2d(h, 2), scale_factor=2.0)
        h = self.second(F.pad(h, (1, 1, 1, 1))).mean((2, 3))
        logits: Tensor = self.out(h)
        return logits


class Graphs(nn.Module):
    """Messages along edges, any number of them, gathered and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        sums = torch.zeros(len(x), 16, device=x.device).index_add(0, edges[1], h[edges[0]])
        scores: Tensor = self.second(sums.div_(edges.shape[1]) + h)
        return scores


def sequences(model: nn.Module, n: int, device: torch.device) -> Tensor:
    x = torch.randint(0, 50, (2, 3 + n)).to(device)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].reshape(-1))


def images(model: nn.Module, n: int, device: torch.device) -> Tensor:
    x, y = torch.randn(2, 3, 8 + 2 * n, 8 + n).to(device), torch.tensor([1, 3]).to(device)
    return F.cross_entropy(model(x), y)


def graphs(model: nn.Module, n: int, device: torch.device) -> Tensor:
    x, edges = torch.randn(5 + n, 6).to(device), torch.randint(0, 5 + n, (2, 3 * n + 1)).to(device)
    return model(x, edges).square().mean()


def losses(make: Callable[[], nn.Module], step: Step, device: str, sizes: list[int]) -> list[float]:
    torch.manual_seed(0)
    where = torch.device(device)
    model = make().to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for n in sizes:
        loss = step(model, n, where)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ltc.mark_step()
        found.append(loss)
    return [float(loss.detach()) for loss in found]


MODELS = {
    "sequences": (Sequences, sequences),
    "images": (Images, images),
    "graphs": (Graphs, graphs),
}


@pytest.mark.parametrize("replay", ["auto", "always", "never"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_eager_and_programs_few(name: str, replay: str) -> None:
    make, step = MODELS[name]
    draw = random.Random(1)
    sizes = [draw.randrange(20) for _ in range(40)]
    with settings.override(replay=replay):
        before = num_programs()
        found = losses(make, step, "ltc", sizes)
        assert num_programs() - before <= 12, "a program for each size"
    assert found == losses(make, step, "cpu", sizes)


def test_a_size_that_was_known_before_keeps_its_program(device: torch.device) -> None:
    def run(n: int) -> list[float]:
        x = torch.arange(float(n)).to(device)
        return (x * 2 + 1).tolist()  # type: ignore[no-any-return]

    for n in (3, 4, 5, 6):
        assert run(n) == [2.0 * i + 1 for i in range(n)]
    before = num_programs()
    for n in (4, 3, 9, 5, 12, 0, 1, 7):
        assert run(n) == [2.0 * i + 1 for i in range(n)]
    assert num_programs() == before


def test_another_rank_or_dtype_is_another_program(device: torch.device) -> None:
    for n in (3, 4, 5, 6):
        assert (torch.ones(n).to(device) * 2).tolist() == [2.0] * n
    assert (torch.ones(2, 2).to(device) * 2).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert (torch.ones(3, dtype=torch.long).to(device) * 2).tolist() == [2, 2, 2]


def test_another_line_is_another_program(device: torch.device) -> None:
    """Its errors and reports name it."""
    found = []
    for n in (3, 4, 5, 6):
        found.append((torch.ones(n).to(device) * 2).sum().item())
    x = torch.ones(7).to(device)
    found.append((x * 2).sum().item())
    newest = context(0).compiler.newest
    assert newest is not None and not newest.graph.dynamic
    assert found == [6.0, 8.0, 10.0, 12.0, 14.0]


def test_sizes_among_the_arguments(device: torch.device) -> None:
    x = torch.arange(24.0)
    ours = x.to(device)
    for rows in (2, 3, 4, 6, 8, 12, 24, 1):
        assert torch.equal((ours.view(rows, -1).t() + 1).cpu(), x.view(rows, -1).t() + 1)
    for k in range(12):
        assert torch.equal((ours[k : k + 5] * 2).cpu(), x[k : k + 5] * 2)
        assert torch.equal((ours.roll(k) * 2).cpu(), x.roll(k) * 2)
        assert float(ours[k] + 1) == float(x[k] + 1)


def test_the_number_of_results_may_follow_a_size(device: torch.device) -> None:
    for n in (4, 6, 8, 10, 12, 6):
        x = torch.arange(float(n))
        parts = [part * 2 for part in x.to(device).split(2)]
        assert [p.tolist() for p in parts] == [(part * 2).tolist() for part in x.split(2)]


def test_a_number_of_results_that_comes_again(device: torch.device) -> None:
    for n in (3, 4, 5, 6, 7, 5, 3, 6, 7, 8, 5):
        x = torch.arange(2.0 * n).view(n, 2)
        found = [part * 2 for part in x.to(device).unbind()]
        assert [part.tolist() for part in found] == (x * 2).tolist()


def test_writes_into_views_of_any_size(device: torch.device) -> None:
    before = num_programs()
    for n in (3, 4, 5, 6, 7, 8, 2, 12, 4):
        x = torch.arange(float(n * n)).view(n, n)
        for t in (x, (ours := x.to(device))):
            t[1:, : n - 1] = 1.0
            t[0].add_(2)
            t.view(-1)[n:].mul_(3)
            t[:, 1:].add_(t[:, :-1].clone())
        assert torch.equal(ours.cpu(), x)
    assert num_programs() - before == 3


def test_a_part_that_is_read_and_written(device: torch.device) -> None:
    for rows, columns in ((5, 1), (2, 3), (2, 2), (4, 1), (3, 3), (1, 7)):
        x = torch.arange(float(rows * columns))
        ours = x.to(device)
        for t in (x, ours):
            part = t.unflatten(0, (rows, columns))
            part.add_(part)
            torch._foreach_mul_([part], [part])
        assert torch.equal(ours.cpu(), x)


def test_a_cache_that_is_written_at_another_place_each_time(device: torch.device) -> None:
    cache, ours = torch.zeros(2, 20, 3), torch.zeros(2, 20, 3, device=device)
    before = num_programs()
    for place in range(19):
        new = torch.full((2, 1, 3), float(place))
        cache[:, place : place + 1] = new
        ours[:, place : place + 1] = new.to(device)
        assert torch.equal(ours[:, : place + 1].sum(1).cpu(), cache[:, : place + 1].sum(1))
    assert num_programs() - before <= 5


@pytest.mark.parametrize("is_fast", [True, False])
def test_writes_into_a_view_of_an_input(device: torch.device, is_fast: bool) -> None:
    was_fast = fast_path.enable(is_fast)
    try:
        for n in (3, 4, 5, 6, 5, 7):
            x = torch.ones(2, n).to(device)
            view = x.t()
            ltc.mark_step()
            view.mul_(3)
            assert x.tolist() == [[3.0] * n] * 2
    finally:
        fast_path.enable(was_fast)


def test_memory_that_is_filled_later(device: torch.device) -> None:
    for n in (3, 4, 5, 6, 7):
        x = torch.empty(n, 2, device=device)
        x[:] = 4.0
        y = torch.empty_like(x).fill_(1.0)
        assert (x + y).tolist() == [[5.0, 5.0]] * n


def test_draws_are_those_of_eager(device: torch.device) -> None:
    with settings.override(random="host"):
        for n in (3, 4, 5, 6, 7):
            torch.manual_seed(n)
            found = F.dropout(torch.ones(n, 9).to(device), 0.5).cpu()
            assert found.shape == (n, 9) and set(found.unique().tolist()) <= {0.0, 2.0}


def test_an_error_names_the_sizes_of_its_call(device: torch.device) -> None:
    weight = torch.ones(4, 2).to(device)
    for n in (3, 5, 6, 7):
        assert (torch.ones(n, 4).to(device) @ weight).shape == (n, 2)
    with pytest.raises(RuntimeError, match=r"8x5|shapes cannot be multiplied"):
        (torch.ones(8, 5).to(device) @ weight).cpu()
    table = torch.ones(4, 2).to(device)
    for n in (1, 2, 3, 4, 5):
        assert table[torch.zeros(n, dtype=torch.long).to(device)].sum().item() == 2.0 * n
    with pytest.raises(IndexError, match="out of range|out of bounds") as raised:
        table[torch.full((13,), 9).to(device)].cpu()
    assert "int64[13]" in str(raised.value), "the sizes of another call"
    assert table[torch.full((6,), 3).to(device)].sum().item() == 12.0


def test_the_cause_says_that_a_graph_serves_all_sizes(
    device: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    with settings.override(explain=True):
        for n in (3, 4, 5, 6):
            run(n, device)
    found = [line for line in capfd.readouterr().err.splitlines() if "[ltc] program" in line]
    assert ["serves inputs of other sizes" in line for line in found] == [False, False, True]


def test_memory_is_counted_by_the_size_of_each_call(device: torch.device) -> None:
    counter = context(0).memory
    kept = []
    ltc.mark_step()
    gc.collect()
    for n in (10, 20, 30, 40, 1000):
        context(0).wait()
        before = counter.used_bytes
        x = torch.ones(n).to(device)
        y = x * 2
        ltc.mark_step()
        context(0).wait()
        assert counter.used_bytes - before == 2 * 4 * n
        kept += [x, y]


def run(n: int, device: torch.device) -> list[float]:
    return ((torch.arange(float(n)).to(device) * 2 - 1).exp() / 3).tolist()  # type: ignore[no-any-return]


def latest_is_dynamic() -> bool:
    context(0).known_reads.pause()  # C++ may have run the latest one
    newest = context(0).compiler.newest
    assert newest is not None
    return newest.graph.dynamic


def test_a_size_that_comes_often_gets_a_graph_that_can_be_compiled(device: torch.device) -> None:
    with settings.override(compile="async", compile_after=1000):
        context(0).wait()
        for n in (3, 4, 5, 6, 7):
            run(n, device)
        assert latest_is_dynamic()
        for _ in range(2 * dynamic_steps.OFTEN):
            assert run(9, device) == [pytest.approx(x) for x in run(9, torch.device("cpu"))]
        assert not latest_is_dynamic()
        run(10, device)
        assert latest_is_dynamic()
        run(9, device)
        assert not latest_is_dynamic()
        before = num_programs()
        for n in (9, 3, 11, 9, 4, 12, 9):
            run(n, device)
        assert num_programs() == before


def test_a_size_whose_way_is_like_no_other_is_exact_the_next_time(device: torch.device) -> None:
    x = torch.arange(10.0).to(device)

    def search(k: int, ops: int) -> bool:
        """Whether a row of ops after `x[k]` is recorded for any size."""
        h = x[k] + 1
        for i in range(ops):
            h = (h * 2).exp() if i % (ops // 7) else h.cos()
        assert h.isfinite().item() in (True, False)
        return latest_is_dynamic()

    assert [search(k, 14 + 7 * k) for k in range(4)] == [False, False, True, True]
    assert [search(k, 140 + 7 * k) for k in (2, 3)] == [False, False]
    assert all(float(x[k] + 1) == k + 1 for k in range(10))


def test_the_usual_size_keeps_its_graph_beside_rare_ones(device: torch.device) -> None:
    for k in range(2 * dynamic_steps.OFTEN):
        run(8, device)
        if k % 16 == 15:
            run(k, device)
    run(8, device)
    assert not latest_is_dynamic()
    run(2, device)
    assert latest_is_dynamic()


def test_the_peak_is_that_of_the_largest_run(device: torch.device) -> None:
    def peak(n: int) -> int:
        x = torch.ones(n, 1000).to(device)
        context(0).memory.reset_peak()
        (x + 1).exp().sum().cpu()
        return context(0).memory.peak_bytes - context(0).memory.used_bytes

    for n in (1, 2, 3):
        peak(n)
    assert latest_is_dynamic()
    assert peak(300) >= 2 * 4 * 300_000
    assert latest_is_dynamic()


def test_never_makes_a_program_for_each_size(device: torch.device) -> None:
    with settings.override(dynamic_shapes="never"):
        (torch.ones(2).to(device) + 1).cpu()
        before = num_programs()
        for n in (13, 14, 15, 16):
            (torch.ones(n).to(device) * 3 - 1).cpu()
        assert num_programs() == before + 4


def test_never_may_come_late(device: torch.device) -> None:
    def run(n: int) -> None:
        x = torch.arange(2.0 * n).view(n, 2)
        y = x.to(device) * 2  # by C++, which takes the dynamic step
        was_fast = fast_path.enable(False)
        try:
            z = y.flip(0)[1:]
        finally:
            fast_path.enable(was_fast)
        assert z.shape == (n - 1, 2)
        assert torch.equal(z.cpu(), (x * 2).flip(0)[1:])

    for n in (3, 4, 5, 6):
        run(n)
    with settings.override(dynamic_shapes="never"):
        for n in (7, 8, 5, 9):
            run(n)


def test_the_text_of_a_graph_says_whose_sizes_it_shows(device: torch.device) -> None:
    for n in (3, 4, 5):
        run(n, device)
    newest = context(0).compiler.newest
    assert newest is not None
    assert str(newest.graph).startswith("# sizes of one run; it serves others, too\n%0: float32[5]")
