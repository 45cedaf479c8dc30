"""OpenMP's teams: freed by the thread that has one, made anew when it computes again, in no child's way.

Each program is a process of its own, because teams belong to threads of the process.
"""

import pytest

from ltc_core.executors import openmp
from tests.core import child

# `team()` counts the threads OpenMP started, once they are `wanted` (the kernel ends them a moment after the call).
PRELUDE = """
import os, threading, time
import torch
from ltc_core.executors.openmp import release_team
torch.set_num_threads(2)

def tasks():
    return len(os.listdir("/proc/self/task"))

def team(wanted):
    deadline = time.monotonic() + 20
    while (found := tasks() - alone) != wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    return found

def compute():
    return torch.ones(1_000_000).add(1).sum().item()

alone = tasks()
"""

needs_libgomp = pytest.mark.skipif(
    not openmp.has_teams(), reason="PyTorch computes with another OpenMP runtime than libgomp"
)


@needs_libgomp
def test_a_team_is_freed_and_made_anew() -> None:
    out, err = child.run(
        """
        for _ in range(3):
            assert compute() == 2e6
            print(team(1), end=" ")
            release_team()
            print(team(0))
        """,
        prelude=PRELUDE,
    )
    assert (out, err) == ("1 0\n" * 3, "")


@needs_libgomp
def test_only_the_calling_threads_team_is_freed() -> None:
    out, err = child.run(
        """
        computed, go = threading.Event(), threading.Event()

        def work():
            compute()
            computed.set()
            go.wait()
            release_team()
            go.clear()
            computed.set()
            done.wait()

        done = threading.Event()
        thread = threading.Thread(target=work)
        thread.start()
        computed.wait()
        computed.clear()
        alone += 1  # the thread itself
        compute()
        print(team(2))
        release_team()
        print(team(1))
        go.set()
        computed.wait()
        print(team(0))
        done.set()
        thread.join()
        """,
        prelude=PRELUDE,
    )
    assert (out.split(), err) == (["2", "1", "0"], "")


def test_without_a_team_and_over_and_over() -> None:
    out, err = child.run(
        """
        release_team()
        for _ in range(3):
            compute()
            release_team()
            release_team()
        print(compute())
        """,
        prelude=PRELUDE,
    )
    assert (out, err) == ("2000000.0\n", "")


def test_a_forked_child_computes() -> None:
    """It would wait for ever for the threads of a team that only its parent has."""
    out, err = child.run(
        """
        compute()
        pid = os.fork()
        if not pid:
            print(compute(), flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), compute())
        """,
        prelude=PRELUDE,
    )
    assert (out, err) == ("2000000.0\n0 2000000.0\n", "")


@needs_libgomp
def test_a_step_is_handed_over_without_a_team() -> None:
    """The worker then has the only one, as it needs to be quick."""
    out, err = child.run(
        """
        import ltc_core as ltc
        x = torch.ones(3, device=ltc.lazy_device()) + 1
        ltc.mark_step(wait=True)
        release_team()
        time_to_settle = team(0)
        alone = tasks()
        compute()
        print(team(1))
        y = x + 1
        ltc.mark_step()
        print(team(0))
        """,
        prelude=PRELUDE,
        LTC_EXECUTOR="null",
    )
    assert (out.split(), err) == (["1", "0"], "")


def test_where_the_runtime_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runtimes free the teams of all threads: they are left alone."""
    monkeypatch.setattr(openmp, "_file_of", lambda function: "libiomp5.so")
    assert openmp._find_runtime() is None
    monkeypatch.setattr(openmp, "_pause", None)
    openmp.release_team()


@needs_libgomp
def test_a_thread_uses_fewer_and_the_others_keep_theirs() -> None:
    out, err = child.run(
        """
        from ltc_core.executors.openmp import use_threads
        torch.set_num_threads(3)

        def fewer():
            use_threads(1)
            compute()
            torch.ones(300, 300) @ torch.ones(300, 300)
            print(torch.get_num_threads(), tasks() - alone)

        thread = threading.Thread(target=fewer)
        thread.start()
        thread.join()
        assert compute() == 2e6
        print(torch.get_num_threads(), team(2))
        """,
        prelude=PRELUDE,
    )
    assert (out, err) == ("1 1\n3 2\n", "")


@needs_libgomp
def test_an_upload_makes_no_team() -> None:
    """Its threads would spin where a program computes. What is as large as a model is copied by all threads."""
    out, err = child.run(
        """
        import ltc_core as ltc
        device = ltc.lazy_device()
        torch.ones(3, device=device).tolist()
        batch, model = torch.ones(300, 1000).t(), torch.ones(9_000_000)
        release_team()
        time.sleep(0.5)
        alone = tasks()
        for what in (batch, model):
            what.to(device)
            print(team(int(what is model)), torch.get_num_threads())
        """,
        prelude=PRELUDE,
    )
    assert (out, err) == ("0 2\n1 2\n", "")
