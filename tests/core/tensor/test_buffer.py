"""Buffers: pending, ready or failed; and how the bytes of a device are counted."""

import gc
import importlib.util
import threading
import weakref

import pytest
import torch

import ltc_core as ltc
from ltc_core.runtime.devices import context
from ltc_core.tensor import buffer as buffers
from ltc_core.tensor import native_objects
from ltc_core.tensor.buffer import Buffer, MemoryCounter, fill_pending, pending_outputs
from ltc_core.tensor.handles import Value


@pytest.fixture(autouse=True, params=["of this machine", "without a compiler"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which classes the tests get: those of C, or those of Python that stand for them without a C++ compiler."""
    if request.param == "without a compiler":
        with monkeypatch.context() as without:
            without.setattr(native_objects, "native", None)
            spec = importlib.util.spec_from_file_location("python_buffers", buffers.__file__)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        for name in ("Buffer", "MemoryCounter", "fill_pending", "pending_outputs"):
            monkeypatch.setitem(globals(), name, getattr(module, name))
    return request.param  # type: ignore[no-any-return]


class FakeJob:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


# -- one buffer ------------------------------------------------------------------------------------


def test_a_ready_buffer_gives_its_data() -> None:
    data = torch.ones(3)
    buffer = Buffer.ready(MemoryCounter(), data, 12)
    assert not buffer.is_pending
    assert buffer.take() is data
    assert buffer.take() is data


def test_a_pending_buffer_becomes_ready() -> None:
    buffer = Buffer(MemoryCounter(), 12)
    assert buffer.is_pending
    data = torch.ones(3)
    buffer.set(data)
    assert not buffer.is_pending
    assert buffer.take() is data


def test_a_failed_buffer_raises_whenever_it_is_asked() -> None:
    buffer = Buffer(MemoryCounter(), 12)
    buffer.fail(ValueError("lost"))
    assert not buffer.is_pending
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            buffer.take()


def test_waiting_waits_for_the_job_that_makes_the_buffer() -> None:
    job = FakeJob()
    buffer = Buffer(MemoryCounter(), 12)
    buffer.made_by(job)
    buffer.wait_done()
    assert job.waited == 1


@pytest.mark.parametrize("ending", ["set", "fail"])
def test_nobody_waits_for_a_job_that_is_done(ending: str) -> None:
    """The job may end before the buffer is told of it."""
    for told_first in (True, False):
        job = FakeJob()
        buffer = Buffer(MemoryCounter(), 12)
        if told_first:
            buffer.made_by(job)
        if ending == "set":
            buffer.set(torch.ones(3))
        else:
            buffer.fail(ValueError("lost"))
        if not told_first:
            buffer.made_by(job)
        buffer.wait_done()
        assert job.waited == 0


def test_a_buffer_does_not_keep_its_job() -> None:
    """A job holds its inputs; a chain of steps would hold all of them."""
    job = FakeJob()
    buffer = Buffer(MemoryCounter(), 12)
    buffer.made_by(job)
    assert buffer.job is job
    found = weakref.ref(job)
    buffer.set(torch.ones(3))
    del job
    assert buffer.job is None and found() is None


# -- bytes -----------------------------------------------------------------------------------------


def test_bytes_are_counted_while_the_buffer_lives() -> None:
    memory = MemoryCounter()
    first = Buffer.ready(memory, torch.ones(3), 12)
    second = Buffer(memory, 100)
    memory.add(100)  # by whoever makes many at once
    assert (memory.used_bytes, memory.peak_bytes) == (112, 112)
    del second
    assert (memory.used_bytes, memory.peak_bytes) == (12, 112)
    del first
    assert memory.used_bytes == 0


def test_a_buffer_that_gave_up_its_bytes_counts_none() -> None:
    memory = MemoryCounter()
    old = Buffer.ready(memory, torch.ones(3), 12)
    assert (old.mark_donated(), old.nbytes) == (12, 0)
    new = Buffer(memory, 12)
    assert (memory.used_bytes, memory.peak_bytes) == (12, 12)
    del old
    assert memory.used_bytes == 12
    del new
    assert memory.used_bytes == 0


def test_a_failed_buffer_gives_its_bytes_back_too() -> None:
    memory = MemoryCounter()
    buffer = Buffer(memory, 12)
    memory.add(12)
    buffer.fail(ValueError("lost"))
    del buffer
    assert memory.used_bytes == 0


def test_a_buffer_that_never_was_made_holds_no_bytes() -> None:
    memory = MemoryCounter()
    buffer = Buffer.failed(memory, ValueError("no room"))
    assert not buffer.is_pending and buffer.nbytes == memory.used_bytes == 0
    with pytest.raises(ValueError, match="no room"):
        buffer.take()


def test_the_peak_counts_what_a_program_holds_beside_the_buffers() -> None:
    memory = MemoryCounter()
    buffer = Buffer.ready(memory, torch.ones(3), 12)
    memory.note_peak(50)
    memory.note_peak(20)
    assert (memory.used_bytes, memory.peak_bytes) == (12, 62)
    memory.reset_peak()
    assert memory.peak_bytes == 12
    del buffer
    memory.reset_peak()
    assert memory.peak_bytes == 0


def test_values_get_buffers_and_programs_fill_those_that_are_pending() -> None:
    memory = MemoryCounter()
    given = [Buffer.ready(memory, "a", 30), Buffer.ready(memory, "b", 50)]
    values = [Value(1, k) for k in range(3)]
    rows = [(value.index, value) for value in values]
    made = pending_outputs(memory, rows, ((8, -1), (50, 1), (4, -1)), given)
    assert [value.buffer for value in values] == made and all(each.is_pending for each in made)
    assert memory.used_bytes == 30 + 8 + 50 + 4 and given[1].nbytes == 0
    made[1].set("read before")
    fill_pending(made, ("x", "y", "z"))
    assert [each.take() for each in made] == ["x", "read before", "z"]
    assert memory.peak_bytes == 92 and not any(each.is_pending for each in made)
    with pytest.raises(ValueError):
        fill_pending(made, ["x"])
    del given, made, values, rows
    assert memory.used_bytes == 0


def test_bytes_counted_from_many_threads_add_up() -> None:
    memory = MemoryCounter()

    def count() -> None:
        for _ in range(500):
            buffers = [Buffer.ready(memory, None, 8) for _ in range(4)]
            del buffers

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.used_bytes == 0
    assert 32 <= memory.peak_bytes <= 4 * 32


# -- the device's figures --------------------------------------------------------------------------


def used_bytes() -> int:
    return context(0).memory.used_bytes


def test_a_tensor_counts_its_bytes_until_it_dies() -> None:
    before = used_bytes()
    t = torch.ones(1000).to(ltc.lazy_device())
    assert used_bytes() - before == 4000
    twin = t.clone()  # shares the value until one of the two is written
    assert used_bytes() - before == 4000
    twin.add_(1)
    ltc.mark_step(wait=True)
    assert used_bytes() - before == 8000
    del t, twin
    assert used_bytes() == before


def test_an_update_in_place_takes_no_more_memory() -> None:
    t = torch.ones(1000).to(ltc.lazy_device())
    ltc.mark_step(wait=True)
    before = used_bytes()
    context(0).memory.reset_peak()
    for _ in range(3):
        t.mul_(2).add_(1)
        ltc.mark_step(wait=True)
    assert used_bytes() == before
    assert context(0).memory.peak_bytes == before


def test_the_peak_of_a_device_is_pinned_for_a_known_program() -> None:
    """Two values of 4000 bytes at once beside the input, and one that stays."""
    x = torch.ones(1000).to(ltc.lazy_device())
    ltc.mark_step(wait=True)
    before = used_bytes()
    context(0).memory.reset_peak()
    y = ((x + 1) * 2).exp().sum()
    ltc.mark_step(wait=True)
    assert used_bytes() - before == y.element_size()
    assert context(0).memory.peak_bytes - before == 8000 + y.element_size()


def test_a_failed_step_gives_its_memory_back() -> None:
    x = torch.ones(1000).to(ltc.lazy_device())
    index = torch.tensor([5000]).to(ltc.lazy_device())
    gc.collect()  # what earlier tests left in cycles
    before = used_bytes()
    lost = x.index_select(0, index) + torch.zeros(1000).to(ltc.lazy_device())
    with pytest.raises(IndexError):
        ltc.mark_step(wait=True)
    del lost
    gc.collect()
    assert used_bytes() == before


def test_a_buffer_dies_while_its_thread_counts(kind: str) -> None:
    """As in a finalizer or a signal handler; what nobody waits for is counted, in order, by who comes next."""
    if kind != "without a compiler":
        pytest.skip("nothing comes between what C counts")
    memory = MemoryCounter()
    kept = Buffer.ready(memory, None, 100)
    dying = [Buffer.ready(memory, None, 20)]
    with memory._lock:  # not reentrant: whoever waited for it here would wait for ever
        dying.clear()
        memory.add(50)
        memory.note_peak(7)
    assert (memory.used_bytes, memory.peak_bytes) == (150, 157)
    with memory._lock:
        memory.reset_peak()
    assert (memory.used_bytes, memory.peak_bytes) == (150, 150)
    assert kept.nbytes == 100


def test_bytes_are_exact_whatever_threads_count_them() -> None:
    memory = MemoryCounter()

    def work() -> None:
        for _ in range(2000):
            Buffer.ready(memory, None, 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.used_bytes == 0 and 3 <= memory.peak_bytes <= 24000
