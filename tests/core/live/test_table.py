"""The table: what each process does, who is slowest, who waits for whom; nothing in it is obeyed by a terminal."""

import os
from dataclasses import replace

from ltc_core.live.board import Seen
from ltc_core.live.sampler import WAITS_FOR_OTHERS
from ltc_core.live.state import State, Wait
from ltc_core.live.table import lines

NOW_NS = 100_000_000_000
SIZE = os.terminal_size((200, 50))
RANK = State(
    pid=100, job="a:1", rank=0, local_size=4, step=20, steps_per_s=4.0, doing="recording",
    since_ns=NOW_NS - 100_000_000, written_ns=NOW_NS, programs=3, used_bytes=2048, ran="compiled",
)  # fmt: skip


def rank(number: int, **fields: object) -> State:
    return replace(RANK, rank=number, local_rank=number, pid=100 + number, **fields)  # type: ignore[arg-type]


def waiting(number: int, at: str, since_s: float) -> State:
    since_ns = NOW_NS - int(since_s * 1e9)
    wait = Wait(at, (0, 1, 2, 3), since_ns)
    return rank(number, doing=WAITS_FOR_OTHERS, since_ns=since_ns, waits=(wait,))


def text(*states: State | Seen, size: os.terminal_size = SIZE) -> list[str]:
    found = [s if isinstance(s, Seen) else Seen(s) for s in states]
    return lines(found, size, NOW_NS)


def test_no_process_is_no_text() -> None:
    assert text() == []


def test_a_row_says_what_a_process_does() -> None:
    cause = "first graph: nothing was recorded before"
    state = State(
        pid=7, script="train.py", step=5, steps_per_s=1.25, doing="waiting for a batch", since_ns=NOW_NS - 3 * 10**9,
        written_ns=NOW_NS, queue=2, used_bytes=1 << 20, peak_bytes=1 << 21, programs=4, ran="replay", cpu_share=0.75,
        rss_bytes=1 << 30, cause=cause, cause_number=1, cause_ns=NOW_NS - 60 * 10**9,
    )  # fmt: skip
    head, row, compiled = text(state)
    assert dict(zip(head.split(), row.split(maxsplit=11), strict=True)) == {
        "rank": "-", "pid": "7", "step": "5", "steps/s": "1.2", "ran": "replay", "programs": "4", "queue": "2",
        "memory": "1.00MB", "peak": "2.00MB", "CPU": "0.8", "RSS": "1.00GB",
        "doing": "waiting for a batch, since 3 s (train.py)",
    }  # fmt: skip
    assert compiled == f"last new program: 1, 60 s ago: {cause}"


def test_a_straggler_is_named_by_those_who_wait_for_it() -> None:
    at = "0,1,2,3 17"
    found = text(waiting(0, at, 4), rank(1), waiting(2, at, 4), waiting(3, at, 3))
    assert found[1].endswith("waiting for other processes, rank 1, since 4 s")
    assert found[-2:] == [
        "slowest: rank 1, which others wait for now",
        "ranks 0, 2, 3 wait for rank 1",
    ]


def test_a_rank_at_another_meeting_is_waited_for() -> None:
    found = text(
        waiting(0, "x 2", 4), waiting(1, "x 1", 4), waiting(2, "x 2", 4), waiting(3, "x 2", 4)
    )
    assert "ranks 0, 2, 3 wait for rank 1" in found


def test_short_waits_name_nobody_and_their_share_does() -> None:
    states = [waiting(0, "x 2", 0.1), rank(1), rank(2), rank(3)]
    assert text(*states)[-1] == "slowest: no rank stands out"
    states = [replace(s, others_share=0.02 if s.rank == 2 else 0.6) for s in states]
    assert (
        text(*states)[-1] == "slowest: rank 2, which waits for others 2% of the time; rank 0: 60%"
    )
    assert (
        text(rank(0, step=9), rank(1), rank(2), rank(3))[-1]
        == "slowest: rank 0, at step 9; rank 1: 20"
    )


def test_a_killed_rank_is_ended_and_those_who_wait_for_it_are_named() -> None:
    killed = Seen(rank(1), is_ended=True)
    found = text(waiting(0, "x 2", 4), killed, waiting(2, "x 2", 4), waiting(3, "x 2", 4))
    assert found[2].endswith("  ended")
    assert found[-1] == "ranks 0, 2, 3 wait for rank 1, of which rank 1 ended"


def test_stopped_silent_and_absent_processes() -> None:
    silent = rank(1, written_ns=NOW_NS - 9 * 10**9)
    found = text(Seen(rank(0), is_stopped=True), silent)
    assert found[1].endswith("stopped by a signal") and found[2].endswith("no news for 9 s")
    assert found[-1] == "not there: ranks 2, 3 (ended, or not begun)"


def test_of_many_ranks_those_that_wait_least_are_shown() -> None:
    states = [rank(k, local_size=300, others_share=0.0 if k == 250 else 0.9) for k in range(300)]
    found = text(*states, size=os.terminal_size((80, 24)))
    assert len(found) <= 24
    assert any(line.split()[0] == "250" for line in found)
    assert any(line.startswith("and 2") and "more ranks" in line for line in found)


def test_a_narrow_terminal_has_fewer_columns() -> None:
    states = [waiting(0, "x 2", 4), rank(1)]
    head, row, *_ = text(*states, size=os.terminal_size((80, 24)))
    assert len(row) < 80 and row.endswith("waiting for other processes, rank 1, since 4 s")
    assert "pid" not in head and head.split()[:3] == ["rank", "step", "steps/s"]
    assert "pid" in text(*states)[0]


def test_compiles_are_said_once_for_ranks_that_had_the_same() -> None:
    same = {"cause": "shapes", "cause_number": 2}
    found = text(
        rank(0, **same), rank(1, **same), rank(2, **same), rank(3, cause="new", cause_number=9)
    )
    assert [line for line in found if line.startswith("last")] == [
        "last new program of ranks 0, 1, 2: 2, 100 s ago: shapes",
        "last new program of rank 3: 9, 100 s ago: new",
    ]


def test_jobs_are_apart() -> None:
    found = text(rank(0), rank(1), replace(rank(0), job="b:2"), replace(rank(1), job="b:2"))
    assert [line.split()[0] for line in found].count("rank") == 2


def test_escape_sequences_are_shown_and_not_obeyed() -> None:
    evil = "\x1b[2J\n\u202e\x07"
    state = State(
        pid=1, script=evil, doing=evil, ran=evil, cause=evil, written_ns=NOW_NS, cause_number=1
    )
    for line in text(state):
        assert line.isprintable()
    assert r"\x1b[2J\n\u202e\x07" in text(state)[-1]
