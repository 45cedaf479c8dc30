"""Threads that reduce with each other: as replicas of one program."""

import threading
from collections.abc import Callable

import pytest

from ltc_core.errors import CollectiveError, CollectiveTimeoutError
from ltc_core.settings import settings
from ltc_dist.collectives.thread_group import Stopped, ThreadGroup, ThreadTransport


def both(
    call: Callable[[ThreadTransport, int], object], devices: tuple[int, ...] = (0, 1)
) -> list[object]:
    """What `call` gives, or raises, in each of two threads."""
    group = ThreadGroup(len(devices))
    found: list[object] = [None, None]

    def run(k: int) -> None:
        try:
            found[k] = call(ThreadTransport(group, k, devices), k)
        except CollectiveError as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_replicas_are_counted_as_their_devices() -> None:
    assert both(lambda t, k: t.replicas(k, 2), (1, 0)) == [(1, 0), (1, 0)]


@pytest.mark.parametrize(("devices", "count"), [((0, 1), 4), ((0, 2), 2)])
def test_some_of_the_devices_are_no_replicas(devices: tuple[int, ...], count: int) -> None:
    assert both(lambda t, k: t.replicas(devices[k], count), devices) == [None, None]


def test_a_program_is_launched_by_all_before_any_goes_on() -> None:
    launched: set[int] = set()

    def launch(transport: ThreadTransport, k: int) -> int:
        transport.agree("sum of float32[2]; program 7")
        launched.add(k)
        transport.launched("sum of float32[2]; program 7")
        return len(launched)

    assert both(launch) == [2, 2]


def test_different_programs_are_an_error_in_both() -> None:
    found = both(lambda t, k: t.agree(f"sum of float32[2]; program {k}"))
    assert all(isinstance(error, CollectiveError) for error in found)
    assert any("replica 1: sum of float32[2]; program 1" in str(error) for error in found)


def test_a_thread_that_does_not_come_is_named_and_all_are_stopped() -> None:
    group = ThreadGroup(3)
    transport = ThreadTransport(group, 1, (0, 1, 2))
    text = r"replica 0 did not come within 0.1 s(?s:.*)missing: replicas 0, 2"
    with (
        settings.override(collective_timeout_s=0.1),
        pytest.raises(CollectiveTimeoutError, match=text),
    ):
        transport.agree("a program")
    assert group.is_stopped
    with pytest.raises(Stopped, match="replica 0 did not come"):
        ThreadTransport(group, 0, (0, 1, 2)).agree("a program")
