"""The C types of recording: handles with the attributes of Python's classes, a lock that its owner may take again."""

import signal
import threading
import time
import weakref

import pytest
import torch

import ltc_core as ltc
from ltc_core.tensor import handles
from ltc_core.tensor.native_objects import native

pytestmark = pytest.mark.skipif(native is None, reason="no C++ compiler")


def _make_lock():
    return native.Lock()


class TestHandles:
    def test_types_are_native(self):
        assert (handles.Value, handles.Cell, handles.View) == (
            native.Value,
            native.Cell,
            native.View,
        )

    def test_value_of_a_buffer_has_no_number(self):
        buffer = object()
        value = handles.Value.of(buffer)
        assert (value.buffer, value.epoch, value.index) == (buffer, -1, -1)

    def test_value_can_be_referred_to_weakly(self):
        value = handles.Value(3, 4)
        weak = weakref.ref(value)
        assert weak() is value
        del value
        assert weak() is None

    def test_rebinding_counts(self):
        first, second = handles.Value(1, 0), handles.Value(1, 1)
        cell = handles.Cell("trace", first, "meta")
        cell.rebind(second)
        assert (cell.value, cell.version) == (second, 1)

    def test_view_has_the_trace_and_version_of_its_cell(self):
        cell = handles.Cell("trace", handles.Value(1, 0), "meta")
        cell.rebind(handles.Value(1, 1))
        view = handles.View(base=cell, lens=("step",), meta="part", value=handles.Value(-1, -1))
        assert (view.trace, view.base, view.lens, view.meta, view.version) == (
            "trace",
            cell,
            ("step",),
            "part",
            1,
        )

    def test_view_of_a_view_is_refused(self):
        with pytest.raises(TypeError):
            handles.View("no cell", (), "meta", handles.Value(-1, -1))

    def test_what_a_handle_refers_to_is_freed_with_it(self):
        class Held:
            pass

        held = Held()
        weak = weakref.ref(held)
        cell = handles.Cell("trace", handles.Value.of(held), "meta")
        del held
        assert weak() is not None
        del cell
        assert weak() is None


class TestHandleOfATensor:
    """The attribute `_h`, which C++ keeps for tensors that it makes, and Python for the others."""

    def test_result_and_parameter(self):
        parameter = torch.nn.Linear(2, 2).to("ltc").weight
        result = parameter + 1
        for t in (parameter, result):
            assert type(t._h) is handles.Cell
            # Before torch 2.13 Python makes the tensor, and keeps the attribute.
            assert ("_h" in vars(result)) == (
                torch.__version__ < torch.torch_version.TorchVersion("2.13")
            )

    def test_set_and_deleted(self):
        t = torch.ones(2, device="ltc") + 1
        other = torch.ones(2, device="ltc") * 5
        t._h = other._h
        assert t.tolist() == [5, 5]
        del t._h
        with pytest.raises(AttributeError):
            t._h  # noqa: B018
        with pytest.raises(AttributeError):
            del t._h
        t._h = other._h
        assert t.tolist() == [5, 5]

    def test_swapped_tensors_swap_handles(self):
        a, b = torch.ones(2, device="ltc") + 1, torch.ones(3, device="ltc") * 7
        torch.utils.swap_tensors(a, b)
        assert (a.tolist(), b.tolist()) == ([7, 7, 7], [2, 2])

    def test_swapped_with_a_tensor_of_the_cpu(self):
        a, b = torch.ones(2, device="ltc") + 1, torch.zeros(3)
        torch.utils.swap_tensors(a, b)
        assert (a.tolist(), b.tolist()) == ([0, 0, 0], [2, 2])

    def test_tensors_freed_by_another_thread_free_their_memory(self):
        def used_bytes():
            ltc.mark_step()
            ltc.wait_device_ops()
            return ltc.get_memory_info()["bytes_used"]

        before = used_bytes()
        held = [torch.ones(64, 1024, device="ltc") + i for i in range(4)]
        assert used_bytes() == before + 4 * 64 * 1024 * 4
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert used_bytes() == before


class TestLock:
    def test_owner_takes_it_again(self):
        lock = _make_lock()
        with lock, lock:
            assert lock.acquire(blocking=False)
            lock.release()
        with pytest.raises(RuntimeError, match="un-acquired"):
            lock.release()

    def test_only_the_owner_gives_it_back(self):
        lock, errors = _make_lock(), []

        def release():
            try:
                lock.release()
            except RuntimeError as error:
                errors.append(error)

        with lock:
            thread = threading.Thread(target=release)
            thread.start()
            thread.join()
        assert len(errors) == 1

    def test_another_thread_waits_so_long_as_it_says(self):
        lock, taken = _make_lock(), []

        def try_it():
            taken.append(lock.acquire(blocking=False))
            taken.append(lock.acquire(timeout=0.05))

        with lock:
            thread = threading.Thread(target=try_it)
            thread.start()
            thread.join()
        assert taken == [False, False]

    def test_all_who_wait_get_it(self):
        lock, inside, most, turns = _make_lock(), [], [], 300

        def take():
            for _ in range(turns):
                with lock:
                    inside.append(None)
                    most.append(len(inside))
                    if len(most) % 50 == 0:
                        time.sleep(0.0005)  # others run, and find it taken
                    inside.pop()

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(most) == 6 * turns and max(most) == 1

    def test_signal_handler_ends_the_wait(self):
        lock, begun, done = _make_lock(), threading.Event(), threading.Event()

        def hold():
            with lock:
                begun.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        begun.wait(60)

        def stop(number, frame):
            raise InterruptedError

        before = signal.signal(signal.SIGUSR2, stop)
        try:
            main = threading.main_thread().ident
            threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR2)).start()
            with pytest.raises(InterruptedError):
                lock.acquire()
        finally:
            signal.signal(signal.SIGUSR2, before)
            done.set()
            thread.join()
        assert lock.acquire(blocking=False)

    def test_signal_handler_may_wait_for_it_too(self):
        lock, begun, in_handler = _make_lock(), threading.Event(), threading.Event()
        taken = []

        def hold():
            with lock:
                begun.set()
                in_handler.wait(60)
                time.sleep(0.05)  # the handler waits by now

        def handler(number, frame):
            in_handler.set()
            with lock:
                taken.append("in the handler")

        thread = threading.Thread(target=hold)
        before = signal.signal(signal.SIGUSR2, handler)
        try:
            thread.start()
            begun.wait(60)
            main = threading.main_thread().ident
            threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR2)).start()
            with lock:
                taken.append("after it")
        finally:
            signal.signal(signal.SIGUSR2, before)
            thread.join()
        assert taken == ["in the handler", "after it"]
        assert lock.acquire(blocking=False)
