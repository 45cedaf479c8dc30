"""Datasets that draw from the global generators: the samples of a plain loop, in each run and after a resume."""

import random
import sys
import threading
from collections.abc import Iterator
from random import gauss
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

import ltc_core as ltc
from ltc_dist.checkpoint import random_state
from ltc_dist.data import watched
from ltc_dist.data.loader import MpDeviceLoader, ParallelLoader
from ltc_dist.data.watched import Draws

NUM_SAMPLES = 24


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


class Samples(Dataset[torch.Tensor]):
    """Sample k is k and a number that `draw` returns."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.draw()], dtype=torch.float64)


def late_bound(owner: Any, name: str) -> Any:
    return lambda: float(getattr(owner, name)())


class Late:
    """Draws from its 9th call on."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> float:
        self.num_calls += 1
        return float(late_bound(random, "random")()) if self.num_calls > 8 else 0.0


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for k in range(NUM_SAMPLES):
            yield torch.tensor([float(k), np.random.rand()], dtype=torch.float64)


class Batches:
    """No DataLoader: draws in its own code, or where that does not say so."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = random.sample(range(12), 12)
        for k in order:
            yield torch.tensor([[float(k), self.draw()]], dtype=torch.float64)


class OneByOne(Sampler[int]):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(NUM_SAMPLES))
        while left:
            yield left.pop(int(np.random.randint(len(left))))

    def __len__(self) -> int:
        return NUM_SAMPLES


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    batch: torch.Tensor = default_collate(samples)
    return batch + torch.zeros_like(batch).uniform_()


def loaded(dataset: Any, **options: Any) -> Any:
    return lambda: DataLoader(dataset(), 2, **options)


LOADERS: dict[str, Any] = {
    "python": loaded(lambda: Samples(lambda: random.uniform(0, 1)), shuffle=True),
    "python, imported": loaded(lambda: Samples(lambda: gauss(0, 1))),
    "numpy": loaded(lambda: Samples(np.random.rand), shuffle=True),
    "torch": loaded(lambda: Samples(lambda: float(torch.rand(()))), shuffle=True),
    "in place": loaded(lambda: Samples(lambda: float(torch.zeros(()).normal_())), shuffle=True),
    "collate": loaded(lambda: Samples(float), shuffle=True, collate_fn=noisy),
    "subset": loaded(
        lambda: Subset(ConcatDataset([Samples(random.random)] * 2), range(1, 25)), shuffle=True
    ),
    "late bound python": loaded(lambda: Samples(late_bound(random, "random")), shuffle=True),
    "late bound numpy": loaded(lambda: Samples(late_bound(np.random, "rand"))),
    "late bound torch": loaded(
        lambda: Samples(late_bound(torch.nn.functional, "_draw")), shuffle=True
    ),
    "stream": loaded(Stream),
    "no DataLoader": lambda: Batches(random.random),
    "no DataLoader, late bound": lambda: Batches(late_bound(np.random, "rand")),
}


@pytest.fixture(autouse=True)
def torch_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> torch.Tensor:
        return torch.nn.functional.dropout(torch.ones(64)).sum()

    monkeypatch.setattr(torch.nn.functional, "_draw", draw, raising=False)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def step(batch: torch.Tensor, script_draws: bool = True) -> list[Any]:
    """What a step sees: its batch, and what the script draws."""
    numbers = [random.random(), np.random.rand(), float(torch.rand(()))] if script_draws else []
    return [batch.cpu().tolist(), *numbers]


def steps(loader: Any, num_epochs: int, script_draws: bool) -> list[Any]:
    found = []
    for _ in range(num_epochs):
        found.append([step(batch, script_draws) for batch in loader])
    for batch in loader:  # left in mid-epoch: nothing has been drawn ahead
        found.append(step(batch, script_draws))
        break
    return [*found, random.random(), np.random.rand(), float(torch.rand(()))]


@pytest.mark.parametrize("script_draws", [False, True])
@pytest.mark.parametrize("name", LOADERS)
def test_all_numbers_are_those_of_a_plain_loop(
    device: torch.device, name: str, script_draws: bool
) -> None:
    seed(3)
    expected = steps(LOADERS[name](), 2, script_draws)
    seed(3)
    assert steps(MpDeviceLoader(LOADERS[name](), device), 2, script_draws) == expected


@pytest.mark.parametrize("num_taken", [0, 1, 5, 12])
@pytest.mark.parametrize("is_all_restored", [False, True])
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_epoch_has_the_numbers_it_would_have_had(
    device: torch.device, name: str, is_all_restored: bool, num_taken: int
) -> None:
    """The loader's state alone is enough; a checkpoint has that of the generators, too."""
    seed(3)
    loader = MpDeviceLoader(LOADERS[name](), device)
    for batch in loader:
        step(batch)
    batches = iter(loader)
    for _ in range(num_taken):
        step(next(batches))
    state, generators = loader.state_dict(), random_state.get()
    rest = [step(batch) for batch in batches]
    after = [step(batch) for batch in loader]
    assert len(rest) == 12 - num_taken

    seed(99)
    resumed = MpDeviceLoader(LOADERS[name](), device)
    resumed.load_state_dict(state)
    if is_all_restored:
        random_state.put(generators)
    assert [step(batch) for batch in resumed] == rest
    assert [step(batch) for batch in resumed] == after


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_state_between_resuming_and_the_next_batch(device: torch.device, is_closed: bool) -> None:
    """The batch that is read when the epoch is resumed has not been taken yet."""
    loader = MpDeviceLoader(LOADERS["numpy"](), device)
    batches = iter(loader)
    for _ in range(3):
        step(next(batches))
    state = loader.state_dict()
    rest = [step(batch) for batch in batches]
    for _ in range(2):
        seed(99)
        resumed = MpDeviceLoader(LOADERS["numpy"](), device)
        resumed.load_state_dict(state)
        batches = iter(resumed)
        if is_closed:
            resumed.close()
        state = resumed.state_dict()
    resumed.load_state_dict(state)
    assert [step(batch) for batch in resumed] == rest


def test_draws_that_begin_late_are_noticed(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples are those of a plain loop where only the dataset draws."""
    seed(3)
    plain = DataLoader(Samples(Late()), 2, shuffle=True)
    expected = [[b.tolist() for b in plain] for _ in range(3)]
    seed(3)
    loader = MpDeviceLoader(DataLoader(Samples(Late()), 2, shuffle=True), device)
    assert [[b.cpu().tolist() for b in loader] for _ in range(3)] == expected
    assert loader._draws.are_known
    assert capsys.readouterr().err.count("but did not for the first batch") == 1

    # From then on, also where the script draws, and in mid-epoch.
    seed(4)
    expected = steps(plain, 1, True)
    seed(4)
    assert steps(loader, 1, True) == expected


def test_a_sampler_that_draws_each_index_is_read_in_the_training_thread(
    device: torch.device,
) -> None:
    data = TensorDataset(torch.arange(NUM_SAMPLES))
    loader = MpDeviceLoader(DataLoader(data, 2, sampler=OneByOne()), device)
    plain = DataLoader(data, 2, sampler=OneByOne())
    seed(3)
    expected = [step(batch[0]) for batch in plain]
    seed(3)
    assert [step(batch[0]) for batch in loader] == expected


class Counted(Dataset[torch.Tensor]):
    """Draws from a generator of its own; says when so many samples have been read in the background."""

    def __init__(self, num_awaited: int = NUM_SAMPLES - 2) -> None:
        self.own = random.Random(5)
        self.num_awaited = num_awaited
        self.in_background = 0
        self.are_read = threading.Event()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> float:
        if threading.current_thread() is not threading.main_thread():
            self.in_background += 1
            if self.in_background == self.num_awaited:
                self.are_read.set()
        return index + self.own.random() + float(np.random.default_rng(index).random())


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_with_its_own_generator_is_read_ahead(
    device: torch.device, shuffle: bool
) -> None:
    data = Counted()
    loader = MpDeviceLoader(DataLoader(data, 2, shuffle=shuffle), device)
    batches = iter(loader)
    assert data.are_read.wait(30)  # all but the first batch, before any is taken
    before = random.getstate()
    assert len(list(batches)) == 12 and random.getstate() == before
    assert "host_now" not in loader.state_dict() and not loader._draws.are_known


def test_a_script_that_draws_does_not_end_reading_ahead(device: torch.device) -> None:
    """Changes during reads in the background are tried out in the training thread, sixteen times at most."""
    draws = Draws()
    for _ in range(16):
        assert not draws.are_decided
        draws.note(True, is_in_background=True)
        assert draws.need_calling_thread
        draws.note(False, is_in_background=False)
        assert not draws.need_calling_thread
    draws.note(True, is_in_background=True)
    assert draws.are_decided and not draws.need_calling_thread and not draws.are_known

    data = Counted(num_awaited=10)
    loader = MpDeviceLoader(DataLoader(data, 2), device)
    loader._draws = draws
    batches = iter(loader)
    random.random()
    assert data.are_read.wait(30)
    assert len(list(batches)) == 12


class DrawsDuringRead(Dataset[torch.Tensor]):
    """While sample 2 is read in the background, the script draws; the dataset does not."""

    def __init__(self) -> None:
        self.is_reading, self.has_drawn = threading.Event(), threading.Event()
        self.threads: list[bool] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self.threads.append(threading.current_thread() is threading.main_thread())
        if index == 2:
            self.is_reading.set()
            assert self.has_drawn.wait(30)
        return torch.tensor(float(index))


def test_a_draw_of_the_script_during_a_read_is_tried_out_once(device: torch.device) -> None:
    data = DrawsDuringRead()
    loader = MpDeviceLoader(DataLoader(data, 1), device)
    batches = iter(loader)
    assert data.is_reading.wait(30)
    random.random()
    data.has_drawn.set()
    assert [float(b) for b in batches] == [0, 1, 2, 3, 4, 5]
    # The first batch and the trial after sample 2 are read in the training thread, the others ahead.
    assert data.threads == [True, False, False, True, False, False]
    assert not loader._draws.are_known


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_a_draw_from_any_generator_of_numpys_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(5))
    try:
        for draw in (np.random.rand, np.random.randn, lambda: np.random.bytes(1)):
            states = watched._states()
            assert not watched._differ(states, watched._states())
            draw()
            assert watched._differ(states, watched._states())
        monkeypatch.setitem(sys.modules, "numpy", None)
        assert not watched._differ(watched._states(), states)  # numpy was imported meanwhile
    finally:
        np.random.set_bit_generator(before)


class Positioned:
    """A loader that keeps its position, and draws."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 8:
            self.position += 1
            yield torch.tensor([self.position, random.random()], dtype=torch.float64)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("num_taken", [2, 3])
def test_a_loader_that_keeps_its_position_goes_on_with_the_numbers_it_would_have_had(
    device: torch.device, num_taken: int
) -> None:
    loader = MpDeviceLoader(Positioned(), device)
    batches = iter(loader)
    for _ in range(num_taken):
        step(next(batches))
    state = loader.state_dict()
    rest = [step(batch) for batch in batches]
    assert loader.state_dict() == {"loader": {"position": 0}}
    seed(99)
    resumed = MpDeviceLoader(Positioned(), device)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["host_now"]["python"] == state["host_now"]["python"]
    assert [step(batch) for batch in resumed] == rest


def test_several_devices_take_what_the_training_thread_reads(device: torch.device) -> None:
    seed(3)
    expected = [b.tolist() for b in LOADERS["numpy"]()]
    seed(3)
    loader = ParallelLoader(LOADERS["numpy"](), [device, device])
    got: list[Any] = []
    for _ in range(6):
        got += [loader._prefetch.take(k).cpu().tolist() for k in range(2)]
    for k in range(2):
        with pytest.raises(StopIteration):
            loader._prefetch.take(k)
    assert got == expected


def test_errors_and_the_end_of_a_loader_read_in_the_training_thread(device: torch.device) -> None:
    def failing() -> float:
        if random.random() < 0.2:
            raise LookupError("a sample is broken")
        return 1.0

    seed(3)
    loader = MpDeviceLoader(DataLoader(Samples(failing), 2), device)
    num_taken = 0
    with pytest.raises(LookupError, match="a sample is broken"):
        for _ in loader:
            num_taken += 1
    seed(3)
    expected = 0
    with pytest.raises(LookupError):
        for _ in DataLoader(Samples(failing), 2):
            expected += 1
    assert num_taken == expected > 0
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch-")]
