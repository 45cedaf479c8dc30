"""Loaders: order, structure, bounds, errors where they belong, nothing left behind, exact resumption."""

import gc
import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.errors import LoaderError
from ltc_core.settings import settings
from ltc_dist.checkpoint import random_state
from ltc_dist.data.loader import MpDeviceLoader, ParallelLoader
from tests.core.counting import Counting


def numbers(n: int = 10) -> list[torch.Tensor]:
    return [torch.tensor([float(k)]) for k in range(n)]


def seen(batches: Any) -> list[float]:
    return [float(batch) for batch in batches]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetch-")]


def has_no_threads(within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    return not threads()


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


class Loader:
    """An iterable that tells what was asked of it, and can be held up or fail."""

    def __init__(self, n: int = 10, fail_at: int = -1, hold_at: int = -1) -> None:
        self.n, self.fail_at, self.hold_at = n, fail_at, hold_at
        self.num_read = 0
        self.go_on = threading.Event()
        self.color = "green"

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[torch.Tensor]:
        for k in range(self.n):
            if k == self.fail_at:
                raise LookupError(f"sample {k} is broken")
            if k == self.hold_at:
                self.go_on.wait(30)
            self.num_read += 1
            yield torch.tensor([float(k)])


# -- what comes ------------------------------------------------------------------------------------


def test_batches_come_in_order_on_the_device(device: torch.device) -> None:
    loader = MpDeviceLoader(numbers(), device)
    batches = list(loader)
    assert {b.device for b in batches} == {device} and seen(batches) == list(range(10))
    assert len(loader) == 10 and has_no_threads()


def test_each_iteration_is_an_epoch(device: torch.device) -> None:
    loader = MpDeviceLoader(numbers(4), device)
    assert [seen(loader) for _ in range(3)] == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader(device: torch.device, workers: int) -> None:
    """Shuffled as a plain loop would: the same seed gives the same order."""
    data = TensorDataset(torch.arange(12.0), torch.arange(12) % 3)
    plain = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    torch.manual_seed(5)
    expected = [[x.tolist(), y.tolist()] for x, y in plain]
    torch.manual_seed(5)
    loader = MpDeviceLoader(plain, device)
    assert [[x.tolist(), y.tolist()] for x, y in loader] == expected
    assert loader.batch_size == 4 and loader.dataset is data
    assert has_no_threads()


def test_many_uploads_keep_the_order(device: torch.device) -> None:
    loader = MpDeviceLoader(numbers(200), device, host_to_device_transfer_threads=4)
    assert seen(loader) == list(range(200))


def test_none_is_a_batch_like_others(device: torch.device) -> None:
    assert list(MpDeviceLoader([None, 1, None], device)) == [None, 1, None]


def test_a_batch_comes_as_soon_as_it_is_loaded(device: torch.device) -> None:
    loader = Loader(hold_at=2)
    batches = iter(MpDeviceLoader(loader, device))
    assert [float(next(batches)), float(next(batches))] == [0, 1]  # the third is still held
    loader.go_on.set()
    assert seen(batches) == list(range(2, 10))


def test_attributes_are_those_of_the_loader(device: torch.device) -> None:
    loader = MpDeviceLoader(Loader(), device)
    assert loader.color == "green" and loader._loader.n == 10
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        loader.colour  # noqa: B018


# -- steps -----------------------------------------------------------------------------------------


def test_asking_for_a_batch_ends_the_step(device: torch.device) -> None:
    w = torch.ones(1, device=device)
    ltc.mark_step()
    with Counting() as counted:
        for x in MpDeviceLoader(numbers(6), device):
            w = w + x
    assert counted.syncs == {"MarkStep": 6} and float(w) == 16


def test_several_batches_a_step(device: torch.device) -> None:
    w = torch.ones(1, device=device)
    ltc.mark_step()
    with Counting() as counted:
        for x in MpDeviceLoader(numbers(6), device, batches_per_execution=3):
            w = w + x
    assert counted.syncs == {"MarkStep": 2} and float(w) == 16


# -- several devices -------------------------------------------------------------------------------


def test_batches_are_dealt_out(device: torch.device) -> None:
    """Two lanes to one device: who asks for which lane is what counts here."""
    with Counting() as counted:
        loader = ParallelLoader(numbers(7), [device, device])
        got = [[float(loader._prefetch.take(k)) for _ in range(3)] for k in range(2)]
        with pytest.raises(StopIteration):
            loader._prefetch.take(0)
    assert got == [[0, 2, 4], [1, 3, 5]] and len(loader) == 3
    assert counted._grown["DroppedBatch"] == 1
    with pytest.raises(LoaderError, match="deals its batches out to 2 devices"):
        iter(loader)


def test_one_device_may_be_iterated_over_directly(device: torch.device) -> None:
    assert seen(ParallelLoader(numbers(3), [device])) == [0, 1, 2]


def test_the_old_names(device: torch.device) -> None:
    loader = ParallelLoader(numbers(2), [device], 0, 1, 16, 8, 1)
    assert loader.batches_per_execution == 1 and loader.per_device_samples() == 2
    assert [loader.next_item(device) is None for _ in range(3)] == [False, False, True]


# -- bounds ----------------------------------------------------------------------------------------


def wait_until_read(loader: Loader, count: int) -> int:
    """Give how many batches were read once reading has come to rest."""
    deadline = time.monotonic() + 10
    while loader.num_read < count and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    return loader.num_read


def test_batches_under_way_are_bounded(device: torch.device) -> None:
    loader = Loader(100)
    batches = iter(MpDeviceLoader(loader, device, loader_prefetch_size=3, device_prefetch_size=2))
    assert wait_until_read(loader, 5) == 5
    next(batches)
    assert wait_until_read(loader, 6) == 6


def test_bytes_under_way_are_bounded(device: torch.device) -> None:
    loader = Loader(100)
    batches = iter(MpDeviceLoader(loader, device, prefetch_bytes=8))  # a batch has 4
    assert wait_until_read(loader, 2) == 2
    next(batches)
    assert wait_until_read(loader, 3) == 3


def test_a_batch_larger_than_the_bound_is_let_through(device: torch.device) -> None:
    assert seen(MpDeviceLoader(numbers(5), device, prefetch_bytes=1)) == [0, 1, 2, 3, 4]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 7])
def test_an_error_is_raised_where_its_batch_would_have_come(device: torch.device, at: int) -> None:
    got: list[float] = []
    with pytest.raises(LookupError, match=f"sample {at} is broken") as caught:
        for batch in MpDeviceLoader(Loader(20, fail_at=at), device):
            got.append(float(batch))
    assert got == list(range(at))
    assert any("raise LookupError" in str(entry.statement) for entry in caught.traceback)
    assert has_no_threads()


class Broken(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise LookupError("sample 7 is broken")
        return torch.tensor(float(index))


def test_an_error_in_a_worker_process_has_its_traceback(device: torch.device) -> None:
    loader = MpDeviceLoader(DataLoader(Broken(), batch_size=2, num_workers=2), device)
    got = 0
    with pytest.raises(LookupError, match=r"DataLoader worker process(?s:.*)in __getitem__"):
        for _ in loader:
            got += 1
    assert got == 3 and has_no_threads()


def test_what_cannot_be_uploaded_is_an_error_of_its_batch(device: torch.device) -> None:
    sparse = torch.eye(2).to_sparse()
    batches = iter(MpDeviceLoader([torch.ones(1), sparse, torch.ones(1)], device))
    next(batches)
    with pytest.raises(NotImplementedError):
        next(batches)
    assert float(next(batches)) == 1


def test_a_loader_that_hangs_is_reported(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = Loader(hold_at=1)
    batches = iter(MpDeviceLoader(loader, device))
    next(batches)
    with settings.override(data_warning_s=0.1, data_timeout_s=0.3):
        with pytest.raises(
            LoaderError, match=r"has waited \d+ s for batch 1(?s:.*)self.go_on.wait"
        ):
            next(batches)
    told = capsys.readouterr().err
    assert told.count("[ltc] the training loop has waited") == 1 and "prefetch-read is at" in told
    loader.go_on.set()
    assert seen(batches) == list(range(1, 10))  # nothing is lost


# -- ends ------------------------------------------------------------------------------------------


def test_leaving_the_loop_leaves_nothing_behind(device: torch.device) -> None:
    gc.disable()
    try:
        for _ in MpDeviceLoader(Loader(1000), device):
            break
        assert has_no_threads()
        for _ in ParallelLoader(Loader(1000), [device]).per_device_loader(device):
            break
        assert has_no_threads()
    finally:
        gc.enable()


def test_an_iteration_that_was_read_to_its_end_stays_so(device: torch.device) -> None:
    """Loops of libraries hold it until they have begun the next one, and ask it once more."""
    loader = MpDeviceLoader(numbers(2), device)
    first = iter(loader)
    assert [float(next(first)), float(next(first)), next(first, None), next(first, None)] == [
        0,
        1,
        None,
        None,
    ]
    second = iter(loader)
    assert float(next(second)) == 0
    assert next(first, None) is None
    assert float(next(second)) == 1 and next(second, None) is None


def test_a_new_iteration_ends_the_one_before(device: torch.device) -> None:
    loader = MpDeviceLoader(Loader(1000), device)
    first, second = iter(loader), iter(loader)
    with pytest.raises(
        LoaderError, match="another loop(?s:.*)begun at .*test_loader.py:[0-9]+(?s:.*)of its own"
    ):
        next(first)
    assert float(next(second)) == 0 and len(threads()) == 2
    loader.close()
    loader.close()
    assert has_no_threads()


def test_a_loader_may_reuse_the_memory_of_a_batch(device: torch.device) -> None:
    """As a loop that fills one buffer again and again."""

    class Reusing:
        def __iter__(self) -> Iterator[torch.Tensor]:
            buffer = torch.zeros(300_000)
            for k in range(6):
                buffer.fill_(k)
                yield buffer

    class Buffers(Dataset[torch.Tensor]):
        kept = torch.zeros(300_000)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, k: int) -> torch.Tensor:
            return self.kept.fill_(k)

    expected = [(float(k), float(k)) for k in range(6)]
    for loader in (Reusing(), DataLoader(Buffers(), batch_size=None)):
        found = [(b.min().item(), b.max().item()) for b in MpDeviceLoader(loader, device)]
        assert found == expected


def test_an_exhausted_parallel_loader_says_so(device: torch.device) -> None:
    loader = ParallelLoader(numbers(2), [device])
    assert seen(loader.per_device_loader(device)) == [0, 1]
    with pytest.raises(LoaderError, match="read to its end(?s:.*)MpDeviceLoader"):
        iter(loader.per_device_loader(device))
    assert list(MpDeviceLoader([], device)) == []


def test_a_loader_that_is_stuck_does_not_hold_up_the_end(device: torch.device) -> None:
    loader = Loader(hold_at=1)
    batches = iter(MpDeviceLoader(loader, device))
    next(batches)
    threading.Timer(0.2, loader.go_on.set).start()
    started = time.monotonic()
    del batches
    assert time.monotonic() - started < 5 and has_no_threads()


# -- resuming --------------------------------------------------------------------------------------


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0)), batch_size=2, shuffle=True)


@pytest.mark.parametrize("taken", [0, 1, 5, 12])
def test_a_state_goes_on_after_the_batches_that_were_taken(
    device: torch.device, taken: int
) -> None:
    torch.manual_seed(3)
    loader = MpDeviceLoader(shuffled(), device)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = loader.state_dict()
    rest = [b[0].tolist() for b in batches]

    torch.manual_seed(99)
    before = torch.get_rng_state()
    resumed = MpDeviceLoader(shuffled(), device)
    resumed.load_state_dict(state)
    assert [b[0].tolist() for b in resumed] == rest
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(resumed)) == 12


def test_a_state_after_the_loop_is_that_of_the_next_epoch(device: torch.device) -> None:
    loader = MpDeviceLoader(shuffled(), device)
    assert len(list(loader)) == 12
    resumed = MpDeviceLoader(shuffled(), device)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 12


def test_a_state_survives_leaving_the_loop(device: torch.device) -> None:
    loader = MpDeviceLoader(numbers(), device)
    for k, _ in enumerate(loader):
        if k == 3:
            break
    resumed = MpDeviceLoader(numbers(), device)
    resumed.load_state_dict(loader.state_dict())
    assert seen(resumed) == [4, 5, 6, 7, 8, 9]
    assert seen(resumed) == list(range(10))


class Bucketed(Sampler[list[int]]):
    """Shuffles all at once where the generator is everybody's, and draws batch by batch where it has its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(12))
        if self.rng in (random, np.random):
            self.rng.shuffle(left)
        while left:
            if self.rng not in (random, np.random):
                self.rng.shuffle(left)
            yield [left.pop(), left.pop()]

    def __len__(self) -> int:
        return 6


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


TWELVE = TensorDataset(torch.arange(12))
LOADERS: dict[str, Any] = {
    "no generator": lambda: DataLoader(TWELVE, 2, shuffle=True),
    "generator": lambda: DataLoader(TWELVE, 2, shuffle=True, generator=seeded()),
    "sampler": lambda: DataLoader(TWELVE, 2, sampler=RandomSampler(TWELVE, generator=seeded())),
    "replacement": lambda: DataLoader(
        TWELVE, 2, sampler=RandomSampler(TWELVE, True, 40, generator=seeded())
    ),
    "batch sampler": lambda: DataLoader(
        TWELVE, batch_sampler=BatchSampler(RandomSampler(TWELVE, generator=seeded()), 2, False)
    ),
    "epochs": lambda: DataLoader(
        TWELVE, 2, sampler=DistributedSampler(TWELVE, 2, 1, seed=3, drop_last=True)
    ),
    "numpy": lambda: DataLoader(TWELVE, batch_sampler=Bucketed(np.random.default_rng(3))),
    "old numpy": lambda: DataLoader(TWELVE, batch_sampler=Bucketed(np.random.RandomState(3))),
    "python": lambda: DataLoader(TWELVE, batch_sampler=Bucketed(random.Random(3))),
    "global numpy": lambda: DataLoader(TWELVE, batch_sampler=Bucketed(np.random)),
    "global python": lambda: DataLoader(TWELVE, batch_sampler=Bucketed(random)),
}
PROCESSES: dict[str, Any] = {
    "processes": lambda: DataLoader(TWELVE, 2, shuffle=True, generator=seeded(), num_workers=1),
    "persistent": lambda: DataLoader(
        TWELVE, 2, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "persistent, no generator": lambda: DataLoader(
        TWELVE, 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def epoch_of(loader: Any, epoch: int) -> list[Any]:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    return [b[0].tolist() for b in loader]


@pytest.mark.parametrize("name", [*LOADERS, *PROCESSES])
def test_a_later_epoch_goes_on_as_if_nothing_had_been(device: torch.device, name: str) -> None:
    """Each sample once: the rest of the second epoch, and the third; and so from the end of the second on."""
    make = {**LOADERS, **PROCESSES}[name]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = MpDeviceLoader(make(), device)
    first = epoch_of(loader, 0)
    batches = iter(loader)
    if name == "epochs":
        loader.sampler.set_epoch(1)
        batches = iter(loader)
    second = [next(batches)[0].tolist() for _ in range(2)]
    in_epoch, globals_then = loader.state_dict(), random_state.get()
    rest = [b[0].tolist() for b in batches]
    at_end, globals_at_end = loader.state_dict(), random_state.get()
    third = epoch_of(loader, 2)
    assert first != second + rest

    torch.manual_seed(99)
    for state, told, expected in (
        (in_epoch, globals_then, [rest, third]),
        (at_end, globals_at_end, [third]),
    ):
        resumed = MpDeviceLoader(make(), device)
        resumed.load_state_dict(state)
        random_state.put(told)
        found = [epoch_of(resumed, 3 - len(expected) + k) for k in range(len(expected))]
        assert found == expected
    resumed.load_state_dict(in_epoch)  # in a loader that has been read
    random_state.put(globals_then)
    assert [epoch_of(resumed, 1), epoch_of(resumed, 2)] == [rest, third]


def test_the_epoch_that_goes_on_is_that_of_the_state(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    loader = MpDeviceLoader(LOADERS["epochs"](), device)
    loader.sampler.set_epoch(4)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [b[0].tolist() for b in batches]
    resumed = MpDeviceLoader(LOADERS["epochs"](), device)
    resumed.load_state_dict(state)
    with caplog.at_level(logging.WARNING, logger="ltc"):
        assert epoch_of(resumed, 0) == rest
    assert "sampler.epoch was set to 0, and the epoch that goes on is 4" in caplog.text


def test_a_state_of_other_generators_is_refused(device: torch.device) -> None:
    loader = MpDeviceLoader(LOADERS["generator"](), device)
    next(iter(loader))
    other = MpDeviceLoader(LOADERS["no generator"](), device)
    other.load_state_dict(loader.state_dict())
    loader.close()
    words = r"come in another order\n  got: the state has batch_sampler.sampler.generator, this loader none"
    with pytest.raises(LoaderError, match=words):
        iter(other)


def test_a_state_of_an_older_version_is_read(device: torch.device) -> None:
    torch.manual_seed(3)
    loader = MpDeviceLoader(shuffled(), device)
    before = torch.get_rng_state()
    expected = [b[0].tolist() for b in loader]
    loader.load_state_dict({"num_batches": 5, "rng_state": before})
    assert [b[0].tolist() for b in loader] == expected[5:]


class Stateful(Loader):
    """As torchdata's loaders: it knows by itself where it is."""

    position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < self.n:
            self.position += 1
            yield torch.tensor([float(self.position - 1)])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_loader_with_a_state_of_its_own_is_asked_for_it(device: torch.device) -> None:
    loader = MpDeviceLoader(Stateful(), device)
    batches = iter(loader)
    assert loader.state_dict() == {"loader": {"position": 0}}
    assert [float(next(batches)) for _ in range(3)] == [0, 1, 2]
    assert loader.state_dict() == {"loader": {"position": 3}}  # though all were loaded ahead
    other = MpDeviceLoader(Stateful(), device)
    other.load_state_dict(loader.state_dict())
    assert seen(other) == [3, 4, 5, 6, 7, 8, 9]
    assert other.state_dict() == {"loader": {"position": 0}}


class Live(Stateful):
    """Its state is one dict, which reading changes: a number in it, a list in it, and a tensor in it."""

    def __init__(self, n: int = 27) -> None:
        super().__init__(n)
        self.state: dict[str, Any] = {"at": 0, "in": {"read": []}, "sum": torch.zeros(4)[:1]}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["at"] < self.n:
            k = self.state["at"]
            self.state["at"] += 1
            self.state["in"]["read"].append(k)
            self.state["sum"] += k
            yield torch.tensor([float(k)])

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_that_is_live_is_that_of_the_batches_taken(device: torch.device) -> None:
    loader = MpDeviceLoader(Live(), device)
    fresh = loader.state_dict()
    batches = iter(loader)
    started = loader.state_dict()
    assert [float(next(batches)) for _ in range(3)] == [0, 1, 2]
    state = loader.state_dict()
    rest = seen(batches)
    end = loader.state_dict()["loader"]
    for at_first in (fresh, started):
        assert at_first == {"loader": {"at": 0, "in": {"read": []}, "sum": torch.zeros(1)}}
    assert state == {"loader": {"at": 3, "in": {"read": [0, 1, 2]}, "sum": torch.tensor([3.0])}}
    assert state["loader"]["sum"].untyped_storage().nbytes() == 4  # of the part, not of the whole
    assert end["at"] == 27 and rest == list(range(3, 27))
    for _ in range(2):  # the second time too: a loader changes the state it was given
        other = MpDeviceLoader(Live(), device)
        other.load_state_dict(state)
        assert seen(other) == rest


def test_a_state_that_cannot_be_copied_is_refused_when_it_is_asked_for(
    device: torch.device,
) -> None:
    class Locked(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position, "lock": threading.Lock()}

    loader = MpDeviceLoader(Locked(3), device)
    words = r"state cannot be copied\n  got: TypeError: cannot pickle '_thread.lock'(.|\n)*let its state_dict return"
    with pytest.raises(LoaderError, match=words):
        loader.state_dict()
    batches = iter(loader)
    next(batches)
    with pytest.raises(LoaderError, match=words):
        loader.state_dict()
    assert seen(batches) == [1, 2]


def test_the_state_of_another_kind_of_loader_is_refused(device: torch.device) -> None:
    with pytest.raises(LoaderError, match="the names loader, expected num_batches, rng_state"):
        MpDeviceLoader(numbers(), device).load_state_dict({"loader": {}})
    with pytest.raises(LoaderError, match="the names num_batches, expected loader"):
        MpDeviceLoader(Stateful(), device).load_state_dict({"num_batches": 3})


# -- misuse ----------------------------------------------------------------------------------------


def test_misuse_is_told(device: torch.device) -> None:
    with pytest.raises(LoaderError, match="needs a list of devices(?s:.*)MpDeviceLoader"):
        ParallelLoader(numbers(), device)  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="input_sharding is no ShardingSpec"):
        MpDeviceLoader(numbers(), device, input_sharding=object())
    with pytest.raises(LoaderError, match="device_prefetch_size must be at least 1"):
        ParallelLoader(numbers(), [device], device_prefetch_size=0)
    with pytest.raises(LoaderError, match="no batches for cpu"):
        ParallelLoader(numbers(), [device]).per_device_loader("cpu")


def test_waiting_is_measured(device: torch.device) -> None:
    metrics.clear_all()
    list(MpDeviceLoader(numbers(3), device))
    data = metrics.metric_data("WaitForBatchTime")
    assert data is not None and data[0] == 3


def test_a_loader_that_refuses_to_tell_its_state() -> None:
    """As accelerate's adapter: it has the methods, whether or not there is a state."""

    class Adapter(list[torch.Tensor]):
        def state_dict(self) -> Any:
            return self.nothing  # type: ignore[attr-defined]

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    loader = MpDeviceLoader(Adapter(numbers(4)), ltc.lazy_device())
    taken = iter(loader)
    assert float(next(taken)) == 0
    state = loader.state_dict()
    loader.close()
    other = MpDeviceLoader(Adapter(numbers(4)), ltc.lazy_device())
    other.load_state_dict(state)
    assert seen(other) == [1, 2, 3]


def test_a_report_says_that_the_loader_ended_the_step(capfd: pytest.CaptureFixture[str]) -> None:
    with settings.override(debug=1):
        for batch in MpDeviceLoader([torch.ones(1031)] * 2, ltc.lazy_device()):
            kept = batch.exp().sum()
    assert (
        "Compilation Analysis:   mark_step in parallel loader at step end\n"
        in capfd.readouterr().err
    )
    assert kept.item() > 0
