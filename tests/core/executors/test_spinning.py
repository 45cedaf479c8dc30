"""How long OpenMP threads spin: briefly where other processes need the cores, and as libgomp likes where none does."""

from __future__ import annotations

import pytest

from ltc_core import metrics
from ltc_core.executors import spinning
from ltc_core.executors.spinning import OthersWork
from tests.core import child
from tests.core.executors.test_openmp import PRELUDE as TEAMS
from tests.core.executors.test_openmp import needs_libgomp

PRELUDE = TEAMS + "for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'): os.environ.pop(name, None)\n"


class Cores:
    """What has been used of the cores, in seconds: by this process, by others, and by nice others."""

    def __init__(self) -> None:
        self.now = self.own = self.others = self.nice = 0.0
        self.work = OthersWork(
            lambda: (_ns(self.own + self.others + self.nice), _ns(self.nice)), lambda: _ns(self.own)
        )
        assert self.work.need_cores(0, 2, 2, False) is None

    def pass_by(self, own: float, others: float, nice: float = 0) -> None:
        """One second."""
        self.now += 1
        self.own += own
        self.others += others
        self.nice += nice

    def are_needed(
        self, num_cores: int = 2, num_threads: int = 2, is_nice: bool = False
    ) -> bool | None:
        return self.work.need_cores(_ns(self.now), num_cores, num_threads, is_nice)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@pytest.fixture
def cores() -> Cores:
    return Cores()


def test_nobody_else_works(cores: Cores) -> None:
    cores.pass_by(own=1.9, others=0.1)
    assert not cores.are_needed()


def test_another_process_computes(cores: Cores) -> None:
    cores.pass_by(own=1.2, others=0.8)
    assert cores.are_needed()
    cores.pass_by(own=2, others=0)
    assert not cores.are_needed()


def test_others_have_the_cores_that_are_left_free(cores: Cores) -> None:
    cores.pass_by(own=4, others=12)
    assert not cores.are_needed(num_cores=16, num_threads=4)
    cores.pass_by(own=4, others=12)
    assert cores.are_needed(num_cores=16, num_threads=8)


def test_what_is_nice_waits_for_this_process(cores: Cores) -> None:
    cores.pass_by(own=1, others=0, nice=1)
    assert not cores.are_needed()
    cores.pass_by(own=1, others=0, nice=1)
    assert cores.are_needed(is_nice=True)


def test_two_looks_at_the_same_time_say_nothing(cores: Cores) -> None:
    cores.others = 1
    assert cores.are_needed() is None


def test_what_others_did_while_this_process_was_idle_says_nothing(cores: Cores) -> None:
    cores.pass_by(own=0.7, others=1.2)
    assert cores.are_needed() is None
    cores.pass_by(own=0.05, others=1.7)
    assert cores.are_needed() is None
    cores.pass_by(own=1.9, others=0)
    assert cores.are_needed() is False


def test_a_late_look_counts_where_the_one_before_was_late_too(cores: Cores) -> None:
    """Two processes that take turns are each other's work; a step may take a second where cores are busy."""
    for seconds, counts in [
        (1.0, True),
        (0.1, True),
        (1.0, None),
        (0.1, True),
        (1.0, None),
        (1.0, True),
    ]:
        cores.now += seconds
        cores.own += 0.8 * seconds
        cores.others += 1.2 * seconds
        assert cores.are_needed() is counts


def test_the_kernel_counts_in_ticks(cores: Cores) -> None:
    cores.now, cores.own, cores.others = 0.05, 0.08, 0.02
    assert cores.are_needed() is False


class TestFollower:
    @pytest.fixture
    def brief(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        """What was wanted, a look after the other."""
        wanted: list[bool] = []
        monkeypatch.setattr(spinning, "spin_briefly", wanted.append)
        monkeypatch.setattr(spinning, "can_spin_briefly", lambda: True)
        monkeypatch.setattr(spinning.torch, "get_num_threads", lambda: 2)
        return wanted

    def looks(
        self, monkeypatch: pytest.MonkeyPatch, *are_needed: bool | None, now_ns: int = 10**18
    ) -> None:
        answers = iter(are_needed)
        monkeypatch.setattr(OthersWork, "need_cores", lambda *_: next(answers))
        follower = spinning._Follower()
        for _ in are_needed:
            assert follower.due_ns <= now_ns
            follower.look(now_ns)
            assert follower.due_ns > now_ns
            now_ns = follower.due_ns

    def test_busy_cores_count_at_once(
        self, brief: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.looks(monkeypatch, False, True, False)
        assert brief == [True]

    def test_cores_are_quiet_after_a_while(
        self, brief: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.looks(monkeypatch, None, True, *[False] * 2, None, True, *[False] * 3)
        assert brief == [True, True, False]

    def test_the_user_is_told(self, brief: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
        names = "LooksAtCores", "LooksAtBusyCores"
        before = [metrics.counter_value(name) or 0 for name in names]
        self.looks(monkeypatch, *[True, False, None, False] * 30)
        counted = [(metrics.counter_value(name) or 0) for name in names]
        counters = {name: n - old for name, n, old in zip(names, counted, before, strict=True)}
        (told,) = spinning.sentences(counters)
        assert told.startswith("For 33 % of the time other processes used cores")
        assert "(2 now)" in told and brief[:2] == [True, True]

    @pytest.mark.parametrize(("busy", "looks"), [(0, 0), (19, 40), (30, 400)])
    def test_a_moment_is_not_told(self, busy: int, looks: int) -> None:
        assert not spinning.sentences({"LooksAtCores": looks, "LooksAtBusyCores": busy})

    def test_a_system_that_does_not_tell_is_not_asked_again(
        self, brief: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> bool:
            raise FileNotFoundError

        monkeypatch.setattr(OthersWork, "need_cores", fail)
        follower = spinning._Follower()
        follower.look(5)
        assert follower.due_ns > 10**18
        assert not brief


@needs_libgomp
def test_brief_spinning_is_a_crowd_of_idle_threads() -> None:
    """With more OpenMP threads than cores, libgomp spins briefly. They go when it is to spin again."""
    out, err = child.run(
        """
        from ltc_core.executors.spinning import can_spin_briefly, spin_briefly

        crowd = len(os.sched_getaffinity(0))
        assert can_spin_briefly()
        spin_briefly(False)
        assert tasks() == alone
        for _ in range(3):
            spin_briefly(True)
            spin_briefly(True)
            print(team(crowd + 1) - crowd, end=" ")  # the thread that has the team
            assert compute() == 2e6
            release_team()
            spin_briefly(False)
            print(team(1))
        spin_briefly(True)
        pid = os.fork()
        if not pid:
            spin_briefly(True)  # of its own
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
        prelude=PRELUDE,
    )
    assert (out, err) == ("1 1\n" * 3 + "0\n", "")


def test_a_user_who_has_said_how_threads_wait_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    assert not spinning.can_spin_briefly()


@needs_libgomp
def test_steps_beside_busy_processes_spin_briefly() -> None:
    out, err = child.run(
        """
        import subprocess, sys
        from ltc_core.executors import spinning

        cores = sorted(os.sched_getaffinity(0))
        torch.set_num_threads(max(2, len(cores)))
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
        try:
            model = torch.nn.Linear(8, 8).to("ltc")
            x = torch.ones(4, 8, device="ltc")
            deadline = time.monotonic() + 60
            while not spinning._is_crowded and time.monotonic() < deadline:
                model(x).sum().item()
            print(spinning._is_crowded, compute())
        finally:
            for each in busy:
                each.kill()
                each.wait()
        """,
        prelude=PRELUDE,
    )
    assert (out, err) == ("True 2000000.0\n", "")
