"""Step closures: once, in order, after the cut; asynchronous ones beside the loop, on that step's values.

Source of the semantics: torch_xla's `add_step_closure` and torch._lazy's closures.
"""

import threading
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.errors import ExecutionError
from ltc_core.settings import settings
from tests.core import child
from tests.core.counting import Counting
from tests.core.custom_ops import fail

PREVIOUSLY = "Cannot run asynchronous closure due to previously raised exception"


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


class TestInTheLoop:
    def test_it_runs_once_after_the_next_step(self, device: torch.device) -> None:
        seen: list[Any] = []
        x = torch.ones(3, device=device)
        ltc.add_step_closure(lambda *args: seen.append(args), (x, "loss", {"step": 1}))
        assert seen == []
        with Counting() as counted:
            ltc.mark_step()
        assert len(seen) == 1 and seen[0][0] is x and seen[0][1:] == ("loss", {"step": 1})
        assert counted.syncs == {"MarkStep": 1}
        ltc.mark_step()
        assert len(seen) == 1

    def test_in_the_order_they_were_added(self) -> None:
        seen: list[int] = []
        for i in range(5):
            ltc.add_step_closure(seen.append, (i,))
        ltc.mark_step()
        assert seen == [0, 1, 2, 3, 4]

    def test_it_sees_the_values_of_its_step(self, device: torch.device) -> None:
        losses: list[float] = []
        weight = torch.zeros((), device=device)
        for _ in range(4):
            weight += 1
            ltc.add_step_closure(lambda t: losses.append(t.item()), (weight,))
            ltc.mark_step()
        assert losses == [1.0, 2.0, 3.0, 4.0]

    def test_reading_in_it_adds_no_cut(self, device: torch.device) -> None:
        loss = torch.ones(3, device=device).sum()
        with Counting() as counted:
            ltc.add_step_closure(lambda t: t.item(), (loss,))
            ltc.mark_step()
        assert counted.syncs == {"MarkStep": 1}

    def test_one_that_adds_another(self) -> None:
        seen: list[str] = []

        def first() -> None:
            seen.append("first")
            ltc.add_step_closure(seen.append, ("second",))

        ltc.add_step_closure(first)
        ltc.mark_step()
        assert seen == ["first"]
        ltc.mark_step()
        assert seen == ["first", "second"]

    def test_what_it_raises_comes_out_of_mark_step(self, device: torch.device) -> None:
        def fails() -> None:
            raise KeyError("mine")

        ltc.add_step_closure(fails)
        with pytest.raises(KeyError, match="mine"):
            ltc.mark_step()
        ltc.mark_step()  # it is gone

    def test_those_behind_one_that_raises_come_with_the_next_step(self) -> None:
        seen: list[str] = []

        def fails() -> None:
            raise KeyError("mine")

        for closure, is_async in ((fails, False), (lambda: seen.append("beside"), True)):
            ltc.add_step_closure(closure, run_async=is_async)
        ltc.add_step_closure(seen.append, ("behind",))
        with pytest.raises(KeyError, match="mine"):
            ltc.mark_step()
        ltc.add_step_closure(seen.append, ("new",))
        assert seen == []
        ltc.mark_step()
        ltc.wait_device_ops()
        assert sorted(seen) == ["behind", "beside", "new"]
        assert seen.index("behind") < seen.index("new")

    def test_one_that_ends_a_step_and_waits(self, device: torch.device) -> None:
        seen: list[float] = []

        def closure(t: torch.Tensor) -> None:
            ltc.add_step_closure(lambda: seen.append(2), run_async=True)
            seen.append(1)
            (t + 1).sum().item()
            ltc.mark_step(wait=True)
            ltc.wait_device_ops()

        ltc.add_step_closure(closure, (torch.ones(2, device=device),))
        ltc.mark_step()
        assert seen == [1, 2]

    def test_each_thread_has_its_own(self) -> None:
        seen: list[str] = []

        def other() -> None:
            ltc.add_step_closure(seen.append, ("other",))
            ltc.mark_step()

        ltc.add_step_closure(seen.append, ("main",))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == ["other"]
        ltc.mark_step()
        assert seen == ["other", "main"]

    def test_a_step_that_failed_still_has_its_closures(self, device: torch.device) -> None:
        """Nothing is lost: they run at the next step that ends well."""
        seen: list[str] = []
        lost = fail(torch.ones(2, device=device))
        ltc.add_step_closure(seen.append, ("kept",))
        with pytest.raises(ValueError, match="this op fails"):
            ltc.mark_step(wait=True)
        del lost
        ltc.mark_step()
        assert seen == ["kept"]


class TestBesideTheLoop:
    def test_the_loop_does_not_wait_for_it(self, device: torch.device) -> None:
        go, names = threading.Event(), []

        def slow() -> None:
            assert go.wait(10)
            names.append(threading.current_thread().name)

        ltc.add_step_closure(slow, run_async=True)
        for _ in range(3):
            ltc.mark_step()
        assert names == []
        go.set()
        ltc.wait_device_ops()
        assert len(names) == 1 and names[0] != threading.current_thread().name

    def test_in_order_one_at_a_time(self) -> None:
        seen: list[int] = []
        for i in range(20):
            ltc.add_step_closure(seen.append, (i,), run_async=True)
            if i % 3 == 0:
                ltc.mark_step()
        ltc.mark_step()
        ltc.wait_device_ops()
        assert seen == list(range(20))

    def test_tensors_keep_the_values_of_that_step(self, device: torch.device) -> None:
        """Also parts of tensors, and tensors inside of structures, that the loop writes meanwhile."""
        go, seen = threading.Event(), []

        def note(t: torch.Tensor, part: torch.Tensor, tree: dict[str, Any]) -> None:
            assert go.wait(10)
            seen.append((t.tolist(), part.item(), tree["w"][0].tolist(), part.shape))

        t, w = torch.zeros(3, device=device), torch.nn.Parameter(torch.zeros(2, device=device))
        for _ in range(3):
            ltc.add_step_closure(note, (t, t[1], {"w": (w,)}), run_async=True)
            ltc.mark_step()
            with torch.no_grad():
                t.add_(1)
                w.add_(10)
        go.set()
        ltc.mark_step()
        ltc.wait_device_ops()
        assert seen == [([float(i)] * 3, float(i), [10.0 * i] * 2, ()) for i in range(3)]

    def test_what_it_raises_comes_at_the_next_asynchronous_one(self, device: torch.device) -> None:
        def fails() -> None:
            raise KeyError("mine")

        ltc.add_step_closure(fails, run_async=True)
        ltc.mark_step()
        ltc.wait_device_ops()
        ltc.mark_step()  # nothing asynchronous runs here
        seen: list[str] = []
        ltc.add_step_closure(seen.append, ("not run",), run_async=True)
        with pytest.raises(RuntimeError, match=PREVIOUSLY) as raised:
            ltc.mark_step()
        assert isinstance(raised.value, ExecutionError)
        assert isinstance(raised.value.__cause__, KeyError)
        assert "KeyError: 'mine'" in str(raised.value) and "  Next: " in str(raised.value)
        # It is told once.
        ltc.add_step_closure(seen.append, ("run",), run_async=True)
        ltc.mark_step()
        ltc.wait_device_ops()
        assert seen == ["run"]

    def test_one_that_waits_does_not_wait_for_itself(self, device: torch.device) -> None:
        """Nor do those that follow, which wait too; the loop goes on meanwhile."""
        seen: list[float] = []

        def closure(t: torch.Tensor, how: int) -> None:
            if how == 0:
                ltc.wait_device_ops()
            elif how == 1:
                ltc.mark_step(wait=True)
            elif how == 2:
                (t * 2).sum().item()
            else:
                ltc.wait_device_ops([t.device])
            seen.append(t.sum().item() + how)

        t = torch.ones(2, device=device)
        for how in (0, 1, 2, 3):
            ltc.add_step_closure(closure, (t, how), run_async=True)
            t.add_(0)
            ltc.mark_step()
        ended = threading.Thread(target=ltc.wait_device_ops, daemon=True)
        ended.start()
        ended.join(20)
        assert seen == [2, 3, 4, 5]

    def test_one_that_raises_after_it_has_waited(self, device: torch.device) -> None:
        def closure() -> None:
            ltc.wait_device_ops()
            raise KeyError("mine")

        ltc.add_step_closure(closure, run_async=True)
        ltc.mark_step()
        ltc.wait_device_ops()
        ltc.add_step_closure(lambda: None, run_async=True)
        with pytest.raises(RuntimeError, match=PREVIOUSLY):
            ltc.mark_step()

    def test_what_it_adds_is_called_with_the_step_of_the_loop(self, device: torch.device) -> None:
        """Or with its own, if it ends one; more than may wait, since only it makes room."""
        seen: list[tuple[str, bool]] = []
        loop = threading.current_thread()

        def note(name: str) -> None:
            seen.append((name, threading.current_thread() is loop))

        def closure() -> None:
            for k in range(settings.max_async_queue + 2):
                ltc.add_step_closure(note, (f"beside {k}",), run_async=True)
            ltc.add_step_closure(note, ("own",))
            ltc.mark_step()
            ltc.add_step_closure(note, ("late",))

        ltc.add_step_closure(closure, run_async=True)
        ltc.mark_step()
        ltc.wait_device_ops()
        assert seen[0] == ("own", False) and len(seen) == settings.max_async_queue + 3
        assert seen[-1] == (f"beside {settings.max_async_queue + 1}", False)
        ltc.mark_step()
        assert seen[-1] == ("late", True)

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
    def test_one_that_exits_is_no_end(self, kind: type[BaseException]) -> None:
        def leaves() -> None:
            raise kind

        ltc.add_step_closure(leaves, run_async=True)
        ltc.mark_step()
        ltc.wait_device_ops()
        ltc.add_step_closure(lambda: None, run_async=True)
        with pytest.raises(RuntimeError, match=PREVIOUSLY):
            ltc.mark_step()
        done = threading.Event()
        ltc.add_step_closure(done.set, run_async=True)
        ltc.mark_step()
        assert done.wait(10)

    def test_a_failure_of_the_device_inside_of_it(self, device: torch.device) -> None:
        lost = fail(torch.ones(2, device=device))
        ltc.add_step_closure(lambda t: t.tolist(), (lost,), run_async=True)
        told = 0
        for _ in range(2):
            try:
                ltc.mark_step(wait=True)
                ltc.wait_device_ops()
            except ValueError:
                told += 1
        del lost
        ltc.add_step_closure(lambda: None, run_async=True)
        try:
            ltc.mark_step()
            ltc.wait_device_ops()
        except RuntimeError as error:
            assert isinstance(error.__cause__, ValueError)
            told += 1
        assert told


def test_so_many_may_wait_and_no_more() -> None:
    """The loop is held up rather than the queue grown (LTC_MAX_ASYNC_QUEUE)."""
    out, _ = child.run(
        """
        import threading
        go, begun, marked = threading.Event(), threading.Event(), []
        def closure(i):
            begun.set()
            go.wait(20)
        def steps():
            for i in range(6):
                ltc.add_step_closure(closure, (i,), run_async=True)
                ltc.mark_step()
                marked.append(i)
        thread = threading.Thread(target=steps)
        thread.start()
        begun.wait(10)
        thread.join(0.5)
        print(thread.is_alive(), marked)
        go.set()
        thread.join()
        ltc.wait_device_ops()
        print(marked)
        """,
        LTC_MAX_ASYNC_QUEUE="2",
    )
    assert out.splitlines() == ["True [0, 1, 2]", "[0, 1, 2, 3, 4, 5]"]


def test_at_exit_they_finish_and_their_errors_are_told() -> None:
    out, err = child.run(
        """
        import time
        def last(t):
            time.sleep(0.3)
            print("logged", t.item(), flush=True)
            raise KeyError("nobody sees this")
        ltc.add_step_closure(last, (torch.ones((), device=device) * 2,), run_async=True)
        ltc.mark_step()
        """
    )
    assert out == "logged 2.0\n"
    assert "nobody sees this" in err and "Traceback" not in err
