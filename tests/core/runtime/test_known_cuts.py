"""A cut is made again in C++ where the trace holds what it held when it was made first: with the same results."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.executors.reference import replay
from ltc_core.runtime import run_cost
from ltc_core.runtime.device_context import DeviceContext
from ltc_core.runtime.devices import context
from ltc_core.runtime.known_reads import KnownReads
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.placement import Placement
from ltc_core.runtime.worker import Job
from ltc_core.settings import settings

pytestmark = pytest.mark.skipif(replay.extension.load() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each cut whether it was one that C++ made again."""
    found: list[bool] = []
    plain = DeviceContext._cut_known

    def noted(self: DeviceContext, reason: str, is_awaited: bool) -> bool:
        found.append(plain(self, reason, is_awaited))
        return found[-1]

    monkeypatch.setattr(DeviceContext, "_cut_known", noted)
    monkeypatch.setattr(KnownReads, "resume", lambda self: None)  # they would cut without Python
    monkeypatch.setattr(run_cost, "_AWAITED_NS", 1 << 62)  # however busy the machine is
    with settings.override(replay="always", steps="marked"):
        context(0).wait()
        yield found


def repeated(read: Callable[[], float], times: int = 6) -> list[float]:
    return [read() for _ in range(times)]


def test_where_it_repeats(known: list[bool]) -> None:
    x = torch.ones(4, device="ltc")
    repeated(lambda: (x * 5.0).sum().item(), 8)
    assert known[-4:] == [True] * 4


def test_where_sizes_vary(known: list[bool]) -> None:
    """One program takes any size; a cut of larger values than all before is planned by Python."""
    x = torch.arange(64.0, device="ltc")
    used, sizes = [], [3, 5, 9, 7, 31, 8, 6, 20, 4, 12, 40, 10, 11]
    for n in sizes:
        y = x[:n] * 2 + torch.ones(n, device="ltc")
        total = y.sum()
        assert total.item() == n * (n - 1) + n
        del total
        gc.collect()
        used.append(context(0).memory.used_bytes)
        assert y.tolist() == [2.0 * k + 1 for k in range(n)]
        del y
    assert [b - a for a, b in zip(used, used[1:], strict=False)] == [
        4 * (b - a) for a, b in zip(sizes, sizes[1:], strict=False)
    ]
    is_new_largest = [n == max(sizes[: k + 1]) for k, n in enumerate(sizes)]
    assert known[-2:] == [True] * 2 and sum(known) >= 4
    assert not any(k and new for k, new in zip(known, is_new_largest, strict=False))


def test_an_op_of_varying_sizes_that_fails(known: list[bool]) -> None:
    """What does not depend on it is computed, with the sizes of this run."""
    table = torch.arange(64.0, device="ltc")
    for round_ in range(3):
        for n in (3, 5, 9, 7, 8, 6, 4):
            at = torch.arange(n, device="ltc")
            kept, found = at + 1, table.index_select(0, at)
            assert found.sum().item() == n * (n - 1) / 2 and kept.tolist()[-1] == n
        at = torch.arange(6, device="ltc") + 100 * round_ + 60
        kept, found = at + 1, table.index_select(0, at)
        with pytest.raises(IndexError, match="out of range"):
            found.sum().item()
        assert kept.tolist() == [100 * round_ + 61 + k for k in range(6)]


def test_not_while_the_worker_is_busy(known: list[bool]) -> None:
    """It may read what the program would overwrite."""
    x = torch.ones(4, device="ltc")
    assert repeated(lambda: (x * 13.0).sum().item(), 8)[-1] == 52.0 and known[-1]
    gate, worker = threading.Event(), context(0).worker
    assert worker.start()
    worker.submit(Job(gate.wait))
    later = threading.Timer(0.2, gate.set)
    later.start()
    assert (x * 13.0).sum().item() == 52.0
    later.join()
    assert not known[-1]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_beside_a_program_in_the_worker(
    num_threads: int, known: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread has no OpenMP team, which would keep the cores from the program here."""

    def placed(
        self: Any, compiled: Any, num_threads: int, is_awaited: bool, *rhythm: bool
    ) -> Placement:
        return Placement.HERE if is_awaited else Placement.WORKER

    monkeypatch.setattr(Launcher, "placement", placed)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        x = torch.ones(4, device="ltc")
        for _ in range(8):
            kept = x + 17.0
            ltc.mark_step()
            context(0).worker.drain()
            assert (x * 17.0).sum().item() == 68.0
        assert known[-1] is (num_threads == 1)
        assert kept.tolist() == [18.0] * 4
    finally:
        torch.set_num_threads(before)


def test_not_where_another_value_is_alive(known: list[bool]) -> None:
    x = torch.ones(4, device="ltc")
    kept = []
    for k in range(9):
        y = x * 7.0
        total = y.sum()
        if k == 5:
            kept.append(y)
        del y
        assert total.item() == 28.0
    assert known[4] and not known[5] and known[8]
    assert kept[0].tolist() == [7.0] * 4


def test_not_where_an_input_is_held_that_was_not(known: list[bool]) -> None:
    """Else the program would overwrite what another tensor still has."""
    x = torch.ones(4, device="ltc")
    olds = []
    for k in range(9):
        if k == 6:
            olds.append(x.detach().clone())
            before = x
            x = x + 0
            olds.append(before)
        x.add_(1.0)
        x[0].item()
    assert any(known)
    assert olds[0].tolist() == olds[1].tolist() == [7.0] * 4
    assert x.tolist() == [10.0] * 4


def test_other_numbers_are_inputs(known: list[bool]) -> None:
    x = torch.ones(4, device="ltc")
    assert [(x * k).sum().item() for k in range(9)] == [4.0 * k for k in range(9)]
    assert known[-1]


def test_a_number_of_another_type_is_computed_as_in_eager() -> None:
    x = torch.ones(4, device="ltc", dtype=torch.int64)
    found = [(x + k).sum().item() for k in [1, 2, 3, 4, True, 1 << 40]]
    assert found == [8, 12, 16, 20, 8, 4 + (1 << 42)]


def test_values_whose_op_failed_are_not_taken() -> None:
    x = torch.arange(6.0, device="ltc")
    picked = x
    for index in [1, 2, 3, 4, 50]:
        at = torch.tensor([index], device="ltc")
        picked = x.index_select(0, at)
        if index < 50:
            (picked + 1.0).sum().item()
    lost = picked + 1.0
    for _ in range(2):
        with pytest.raises(IndexError):
            lost.sum().item()
    assert (x + 1.0).sum().item() == 21.0


def test_what_a_timeline_sees_is_not_one(known: list[bool], tmp_path: Path) -> None:
    x = torch.ones(4, device="ltc")
    repeated(lambda: (x * 9.0).sum().item(), 5)
    with ltc.profiler.timeline(tmp_path / "run.json"):
        del known[:]
        repeated(lambda: (x * 9.0).sum().item(), 3)
    assert not any(known)
    assert (tmp_path / "run.json").read_text().count('"cut"') >= 3


def test_a_finalizer_that_records_while_it_runs_keeps_its_values() -> None:
    x = torch.ones(4, device="ltc")
    made = []

    class Noisy:
        def __del__(self) -> None:
            made.append(x + 1.0)

    for _ in range(20):
        ring = [Noisy()]
        ring.append(ring)
        del ring
        assert (x * 11.0).sum().item() == 44.0
    gc.collect()
    assert {tuple(t.tolist()) for t in made} == {(2.0,) * 4} and len(made) == 20


def test_threads_that_read_one_device() -> None:
    x = torch.ones(4, device="ltc")

    def read(factor: float) -> list[float]:
        return repeated(lambda: (x * factor).sum().item(), 200)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, [1.0, 2.0, 3.0, 4.0]))
    assert found == [[4.0 * k] * 200 for k in (1.0, 2.0, 3.0, 4.0)]
