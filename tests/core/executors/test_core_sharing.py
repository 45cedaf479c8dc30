"""Replay in the worker leaves a core to the thread that records, and takes it back while that thread waits."""

import os

import pytest
import torch

from ltc_core.executors import core_sharing, openmp
from ltc_core.executors.reference import replay
from tests.core import child

pytestmark = pytest.mark.skipif(replay.extension.load() is None, reason="no C++ compiler")
of_libgomp = pytest.mark.skipif(
    not openmp.addresses()[0], reason="PyTorch's OpenMP runtime is not libgomp"
)

# `counts()`: threads that the ops of one step have, while the script does something else and while it waits for them.
PRELUDE = """
import threading
import torch
import ltc_core as ltc
from ltc_core.executors import core_sharing
from ltc_core.runtime import placement
from ltc_core.runtime.run_cost import RunCost
from ltc_core.settings import settings

device = ltc.lazy_device()
torch.set_num_threads(2)
core_sharing.num_cores = lambda: 2
RunCost.is_small = False  # the worker runs each step
RunCost.is_quicker_here = lambda cost, is_awaited: False
placement.Places._next = lambda *args: placement.Placement.WORKER
found, noted, waits = {}, threading.Event(), threading.Event()

def begin_wait(waiting, begin=core_sharing.begin_wait):
    begin(waiting)
    waits.set()

core_sharing.begin_wait = begin_wait

@torch.library.custom_op("sharing::note", mutates_args=())
def note(x: torch.Tensor, name: str) -> torch.Tensor:
    found[name] = torch.get_num_threads()
    noted.set()
    return x.clone()

@torch.library.custom_op("sharing::hold", mutates_args=())
def hold(x: torch.Tensor) -> torch.Tensor:
    assert waits.wait(60)
    return x.clone()

for op in (note, hold):
    op.register_fake(lambda x, *rest: torch.empty_like(x))

def step():
    for event in (noted, waits):
        event.clear()
    x = note(torch.ones(3, device=device) + 1, "goes on")
    x = note(hold(x) + 1, "waits")
    ltc.mark_step()
    assert noted.wait(60)  # the script does something else
    return x.tolist()

def counts():
    for _ in range(4):  # replayed from the second one on
        assert step() == [3.0] * 3
    return found["goes on"], found["waits"]
"""


def check(code: str, prelude: str = PRELUDE) -> None:
    """Run code in a process of its own, whose programs stay with replay."""
    env = {"LTC_COMPILE": "async", "LTC_COMPILE_AFTER": "1000000", "LTC_REPLAY": "always"}
    assert child.run(code, prelude=prelude, **env) == ("", "")


@of_libgomp
def test_a_replay_has_a_thread_less_until_somebody_waits_for_it() -> None:
    check(
        """
        assert counts() == (1, 2), found
        core_sharing.end_wait([])  # of a wait that began before the C++ part was there
        assert counts() == (1, 2), found
        with settings.override(compile="off"):  # each run rounds alike
            assert counts() == (2, 2), found
        torch.use_deterministic_algorithms(True)
        assert counts() == (2, 2), found
        torch.use_deterministic_algorithms(False)
        core_sharing.num_cores = lambda: 3
        assert counts() == (2, 2), found
        """,
    )


@of_libgomp
def test_a_program_has_a_thread_less_even_if_somebody_waits_for_it_where_that_is_quickest() -> None:
    check(
        """
        placement.Places._next = lambda *args: placement.Placement.SPARING
        assert counts() == (1, 1), found
        torch.use_deterministic_algorithms(True)  # each run rounds alike
        assert counts() == (2, 2), found
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        assert counts() == (1, 1), found
        """,
    )


@of_libgomp
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no cores to choose from")
@pytest.mark.parametrize("may_use", ["cores", "list(cores)[:1]"])
def test_threads_of_a_team_go_apart_and_stay_free_to_move(may_use: str) -> None:
    """Those that wait for each other are not to share a core. With one core they do, and nobody waits for ever."""
    check(
        f"""
        import os

        cores = os.sched_getaffinity(0)
        wanted = set({may_use})
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), wanted)
        assert counts() == (1, 2), found
        x = torch.ones(1 << 18, device=device)
        for _ in range(10):
            x = (x * 0.5 + 0.5).sqrt()
            y = x.sum()
            ltc.mark_step()
            assert y.item() == 1 << 18
        found_cores = [os.sched_getaffinity(int(each)) for each in os.listdir("/proc/self/task")]
        assert len(found_cores) > 1 and all(each == wanted for each in found_cores), found_cores
        """,
    )


# `order()`: what comes first, the end of an op that runs with all threads, or that a script goes on which has waited.
# The op ends when the script is about to go on, or when it has.
ORDER = """
events, begun, may_end = [], threading.Event(), threading.Event()

@torch.library.custom_op("sharing::end", mutates_args=())
def end(x: torch.Tensor) -> torch.Tensor:
    begun.set()
    assert may_end.wait(60)
    events.append("op")
    return x.clone()

end.register_fake(lambda x: torch.empty_like(x))

def order(script_is_first):
    for _ in range(4):  # replayed from the second one on
        for event in (waits, begun, may_end):
            event.clear()
        del events[:]
        x = end(hold(torch.ones(3, device=device) + 1)) + 1
        ltc.mark_step()
        waiting = []
        core_sharing.begin_wait(waiting)
        assert begun.wait(60)
        if not script_is_first:
            may_end.set()
        core_sharing.wake(waiting)
        core_sharing.end_wait(waiting)
        events.append("script")
        may_end.set()
        assert x.tolist() == [3.0] * 3
    return events
"""


@of_libgomp
def test_who_has_waited_goes_on_when_there_is_a_core() -> None:
    check(
        """
        core_sharing._MOST_WAIT_MS = 60_000
        assert order(script_is_first=False) == ["op", "script"]
        """,
        PRELUDE + ORDER,
    )


@of_libgomp
def test_it_does_not_wait_for_an_op_that_blocks() -> None:
    check(
        """
        assert order(script_is_first=True) == ["script", "op"]
        """,
        PRELUDE + ORDER,
    )


def test_threads_are_set_only_where_the_calling_thread_keeps_them_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another runtime than libgomp would set them for all threads."""
    monkeypatch.setattr(openmp, "_set_threads", None)
    assert not any(openmp.addresses())


def test_a_thread_that_shares_has_its_threads_again_afterwards() -> None:
    before = torch.get_num_threads()
    core_sharing.sharing(before, torch.get_num_threads)
    assert torch.get_num_threads() == before


# `places()`: where the programs of a step run, the first of which a read cuts.
PARTS = """
import torch
import ltc_core as ltc
from ltc_core.executors import core_sharing
from ltc_core.runtime import placement as places_of
from ltc_core.runtime.launcher import Launcher
from ltc_core.runtime.run_cost import RunCost
from ltc_core.runtime.run_policy import RunPolicy

device = ltc.lazy_device()
torch.set_num_threads(2)
RunCost.is_quicker_here = lambda cost, is_awaited: False  # small as they are
RunPolicy.runs_here = lambda *args: False  # in C++
places_of.Places._next = lambda *args: places_of.Placement.WORKER
found = []

def placement(self, *args, of=Launcher.placement):
    place = of(self, *args)
    found.append(place.name)
    return place

Launcher.placement = placement

def places():
    x = torch.ones(64, 64, device=device)
    for step in range(40):
        if step == 10:
            del found[:]
        y = (x @ x).tanh()
        y.sum().item()
        y = (y @ x).exp()
        ltc.mark_step()
    assert len(found) == 60
    return set(found)
"""


@pytest.mark.parametrize(("num_cores", "is_here"), [(2, True), (4, False)])
def test_programs_of_one_step_with_a_thread_on_each_core_run_in_one_place(
    num_cores: int, is_here: bool
) -> None:
    check(
        f"""
        core_sharing.num_cores = lambda: {num_cores}
        assert (places() == {{"HERE"}}) is {is_here}, found
        """,
        PARTS,
    )
