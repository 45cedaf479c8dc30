"""Timelines: what is in the file, who may read it, what is left of it when a process is killed, what is refused."""

import json
import os
import signal
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core import profiler
from ltc_core.errors import ProfilerError, SettingsError
from ltc_core.timeline import slices
from ltc_core.timeline.merge import files_of_ranks, merge, merge_if_whole
from ltc_core.timeline.trace_file import TraceFile, events_of
from tests.compiled_cache import empty_cache
from tests.core import child

Events = list[dict[str, Any]]

TRAIN = """
model = torch.nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for k in range(steps):
        x = torch.ones(8, 4).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        ltc.mark_step()
        if k % 2:
            loss.item()
"""


@pytest.fixture(autouse=True)
def no_timeline_is_left() -> Iterator[None]:
    ltc.wait_device_ops()
    yield
    assert slices.on is None


def read(path: Path) -> Events:
    """The events of a whole file, as any program reads JSON."""
    events = json.loads(path.read_text())
    check(events)
    return events  # type: ignore[no-any-return]


def check(events: Events) -> None:
    """Check each event against the trace-event format, and the slices of each thread against each other."""
    slices_of = defaultdict(list)
    open_lanes = {}
    flows = defaultdict(list)
    for event in events:
        assert event["ph"] in "XMCbestf", event
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert event["ts"] >= 0 and event["name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices_of[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        elif event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        elif event["ph"] == "b":
            open_lanes[event["cat"], event["id"]] = event
        elif event["ph"] == "e":
            begun = open_lanes.pop((event["cat"], event["id"]))
            assert begun["ts"] <= event["ts"] and begun["name"] == event["name"]
        elif event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert not open_lanes
    for rows in slices_of.values():
        ends: list[float] = []
        for ts, minus_dur in sorted(rows):
            while ends and ends[-1] <= ts + 0.0015:
                ends.pop()
            assert (
                not ends or ts - minus_dur <= ends[-1] + 0.0015
            )  # ends inside of the one around it
            ends.append(ts - minus_dur)
    for of_one in flows.values():
        in_time = sorted(of_one, key=lambda event: event["ts"])
        assert [event["ph"] for event in in_time] in (["s"], ["s", "t"], ["s", "t", "f"])
        for event in in_time:  # each end lies in a slice of its thread
            rows = slices_of[event["pid"], event["tid"]]
            assert any(ts <= event["ts"] <= ts - minus + 0.0015 for ts, minus in rows)


def named(events: Events, name: str) -> Events:
    return [e for e in events if e["name"] == name and e["ph"] in "Xb"]


def lanes(events: Events) -> set[str]:
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return threads | {e["cat"] for e in events if e["ph"] == "b"}


def step() -> None:
    x = torch.ones(4, 4, device=ltc.lazy_device())
    y = torch.mm(x, x)
    ltc.mark_step()
    del y


class TestOfARun:
    def test_a_training_loop(self, tmp_path: Path) -> None:
        code = TRAIN + "import gc\ntrain(6)\ngc.collect()\nltc.wait_device_ops()"
        script = tmp_path / "train.py"
        script.write_text(child.PRELUDE + code)
        path = tmp_path / "run.json"
        run = f"import runpy; runpy.run_path({str(script)!r})"
        _, err = child.run(run, prelude="", LTC_TRACE=str(path), LTC_COMPILE="off")
        assert err == ""
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        events = read(path)
        assert {"MainThread", "ltc-worker-0", "transfers", "garbage collection"} <= lanes(events)
        marked = [e for e in named(events, "cut") if e["args"]["reason"] == "MarkStep"]
        assert [e["args"]["step"] for e in marked] == list(range(6))
        assert all(f"{script}:" in e["args"]["line"] for e in marked)
        assert all("a graph of" in e["args"]["program"] for e in marked)
        assert len(marked[0]["args"]["graph"]) == 32
        runs = [e["args"] for e in named(events, "run")]
        assert [r["step"] for r in runs] == list(range(6))
        assert {r["tier"] for r in runs} <= {"op by op", "replay"} and runs[0]["tier"] == "op by op"
        uploads = [e["args"] for e in named(events, "upload")]
        assert uploads[-1]["bytes"] == 8 * 4 * 4 and uploads[-1]["line"].startswith(f"{script}:")
        fetches = [e["args"] for e in named(events, "fetch") if e["ph"] == "b"]
        assert [f["bytes"] for f in fetches] in ([], [4, 4, 4])
        starts = {e["id"] for e in events if e["ph"] == "s"}
        assert starts == {e["id"] for e in events if e["ph"] == "t"} and len(starts) == 6
        counters = {e["name"] for e in events if e["ph"] == "C"}
        assert {"ltc:0 memory", "ltc:0 programs"} <= counters

    def test_off_there_is_no_file_and_no_hook(self, tmp_path: Path) -> None:
        code = f"""
            import gc, os, threading
            os.chdir({str(tmp_path)!r})
            from ltc_core.timeline import slices
            x = torch.ones(3, device=device) + 1
            ltc.mark_step()
            ltc.wait_device_ops()
            assert slices.on is None and slices.begin("cut") is None
            assert not any("timeline" in str(hook) for hook in gc.callbacks)
            assert "ltc-timeline" not in [thread.name for thread in threading.enumerate()]
        """
        assert child.run(code, LTC_COMPILE="off")[1] == ""
        assert list(tmp_path.iterdir()) == []

    def test_a_killed_process_leaves_a_file_that_can_be_read(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        code = (
            TRAIN
            + "train(4)\nltc.wait_device_ops()\nimport time\ntime.sleep(1.2)\nprint(1, flush=True)\n"
        )
        with child.start(code + "train(10**9)", LTC_TRACE=str(path), LTC_COMPILE="off") as process:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
            time.sleep(0.7)
            process.send_signal(signal.SIGKILL)
        with path.open("ab") as file:  # as if it had been killed in the middle of a line
            file.write(b'{"ph":"X","name":"ru')
        events = list(events_of(path))
        assert len(named(events, "cut")) >= 4
        assert path.read_text().startswith("[\n{")
        assert "]\n" not in path.read_text()[-100:]

    def test_a_forked_child_leaves_the_file_to_its_parent(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        code = """
            import os
            x = (torch.ones(3, device=device) + 1).tolist()
            pid = os.fork()
            if pid == 0:
                from ltc_core.timeline import slices
                assert slices.on is None
                assert (torch.ones(3, device=device) + 2).tolist() == [3, 3, 3]
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            x = (torch.ones(3, device=device) + 3).tolist()
        """
        assert child.run(code, LTC_TRACE=str(path), LTC_COMPILE="off")[1] == ""
        events = read(path)
        assert len({e["pid"] for e in events}) == 1 and len(named(events, "cut")) == 2

    def test_a_file_that_cannot_be_written_is_told_when_the_device_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        missing = tmp_path / "none" / "run.json"
        with (
            ltc.settings.override(trace=str(missing)),
            pytest.raises(
                SettingsError,
                match=r"(?s)cannot be written to .*run.json \(set in LTC_TRACE\)\n  got: No such file.*Next: make",
            ),
        ):
            slices.start_as_set()

    @pytest.mark.timeout(300)  # the compiler runs
    def test_compiling_has_a_lane(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        child.run(
            TRAIN + "train(3)",
            timeout_s=280,
            LTC_TRACE=str(path),
            LTC_COMPILE="sync",
            LTC_COMPILED_CACHE_DIR=empty_cache(tmp_path / "compiled"),
            LTC_CHECK_GRAPHS="0",
        )
        events = read(path)
        outcomes = {e["args"]["outcome"] for e in named(events, "compile")}
        assert outcomes and outcomes <= {"compiled", "found in the cache"}
        assert all("a graph of" in e["args"]["program"] for e in named(events, "compile"))
        assert "compiler" in lanes(events)
        assert "compiled" in {e["args"]["tier"] for e in named(events, "run")}


class TestOfABlock:
    def test_a_block(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        with profiler.timeline(path):
            for _ in range(3):
                step()
        step()
        ltc.wait_device_ops()
        events = read(path)
        assert len(named(events, "cut")) == len(named(events, "run")) == 3

    def test_an_arrow_ends_where_the_value_is_waited_for(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        with profiler.timeline(path):
            x = torch.ones(300, 300, device=ltc.lazy_device())
            for _ in range(40):
                x = x @ x / 300
            ltc.mark_step()
            assert x.sum().item() == 300 * 300
        events = read(path)
        assert "f" in {e["ph"] for e in events}
        (fetch,) = [e for e in named(events, "fetch") if e["ph"] == "X"]
        assert "test_timeline.py:" in fetch["args"]["line"]

    def test_one_at_a_time(self, tmp_path: Path) -> None:
        with profiler.timeline(tmp_path / "a.json"):
            with pytest.raises(
                ProfilerError, match=r"(?s)recorded already.*a\.json.*b\.json.*Next"
            ):
                profiler.timeline(tmp_path / "b.json").start()
        with pytest.raises(ProfilerError, match="no timeline is recorded"):
            profiler.timeline(tmp_path / "a.json").stop()
        assert not (tmp_path / "b.json").exists()

    def test_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(
            ProfilerError, match=r"(?s)cannot be written.*got: .*Next: make its dir"
        ):
            profiler.timeline(tmp_path / "none" / "a.json").start()

    def test_a_file_that_another_process_writes(self, tmp_path: Path) -> None:
        file = TraceFile(str(tmp_path / "a.json"))
        file.write(['{"ph":"M"}'])
        with pytest.raises(ProfilerError, match="being written by another process"):
            profiler.timeline(tmp_path / "a.json").start()
        file.drop()
        assert list(events_of(tmp_path / "a.json")) == [{"ph": "M"}]

    def test_an_old_file_of_others_becomes_private(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text("much longer than what is written now" * 1000)
        path.chmod(0o644)
        with profiler.timeline(path):
            pass
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        read(path)

    def test_names_are_text(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        name = '<script>alert("1")</script>\\\n\udc80'
        with profiler.timeline(path):
            seen = slices.begin("cut")
            assert seen is not None
            seen.note(slices.facts(line=name), program=name)
            seen.end()
            thread = threading.Thread(target=step, name=name)
            thread.start()
            thread.join()
        assert "<" not in path.read_text()
        events = read(path)
        shown = named(events, "cut")[0]["args"]
        assert shown == {"line": name, "program": name}
        assert name in lanes(events)

    def test_threads_of_one_name_share_a_lane_if_they_follow_each_other(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "run.json"
        with profiler.timeline(path):
            for _ in range(3):
                thread = threading.Thread(target=step, name="again")
                thread.start()
                thread.join()
        names = [e["args"]["name"] for e in read(path) if e["name"] == "thread_name"]
        assert names.count("again") == 1

    def test_what_cannot_be_written_any_more_ends_it_with_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        timeline = profiler.timeline(tmp_path / "a.json")
        timeline.start()
        running = slices.on
        assert running is not None

        def full(lines: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(running._file, "write", full)
        with pytest.warns(UserWarning, match="No space left on device. Nothing more is written"):
            running._give_up(OSError(28, "No space left on device"))
        with pytest.raises(ProfilerError, match="no timeline"):
            timeline.stop()
        running._ending.set()
        running._thread.join()

    def test_what_cannot_be_written_at_the_end_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        timeline = profiler.timeline(tmp_path / "a.json")
        timeline.start()
        running = slices.on
        assert running is not None

        def full(last: str) -> None:
            running._file.drop()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(running._file, "close", full)
        with pytest.raises(ProfilerError, match=r"(?s)not be written to its end.*No space.*Next"):
            timeline.stop()

    @pytest.mark.parametrize("num_before", [0, 200])
    def test_the_torch_profiler_shows_the_same_regions(self, num_before: int) -> None:
        """Also of a program that has come so often that C++ cuts it."""
        for _ in range(num_before):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
            ltc.wait_device_ops()
        assert "ltc::cut" in {event.name for event in profile.events()}


class TestOfAJob:
    def write(self, path: Path, pid: int, ts: float, **clock: Any) -> None:
        file = TraceFile(str(path))
        facts = {"ph": "M", "name": "ltc_clock", "pid": pid, "tid": 0, "ts": 0, "args": clock}
        slice = {"ph": "X", "name": "cut", "pid": pid, "tid": 1, "ts": ts, "dur": 1.0, "args": {}}
        file.write([json.dumps(facts), json.dumps(slice)])
        file.drop()  # as a killed process

    def test_files_of_two_hosts_come_on_one_clock(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        clock = {"rank": 0, "boot": "a", "wall_ns": 5_000_000_000, "monotonic_ns": 1_000_000_000}
        self.write(tmp_path / "run.rank0.json", 7, 1_000_000.0, **clock)
        self.write(tmp_path / "run.rank1.json", 8, 1_000_500.0, **clock)
        away = {"rank": 2, "boot": "b", "wall_ns": 5_000_000_000, "monotonic_ns": 9_000_000_000}
        self.write(tmp_path / "run.rank2.json", 7, 9_000_700.0, **away)
        (tmp_path / "run.rankx.json").touch()
        files = files_of_ranks(str(path))
        assert [file.name for file in files] == [f"run.rank{k}.json" for k in range(3)]
        merge(str(path), files)
        cuts = named(read(path), "cut")
        assert [e["ts"] for e in cuts] == [1_000_000.0, 1_000_500.0, 1_000_700.0]
        assert len({e["pid"] for e in cuts}) == 3
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]

    def test_a_measured_offset_counts_more_than_wall_clocks(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        clock = {"rank": 0, "boot": "a", "wall_ns": 5_000_000_000, "monotonic_ns": 1_000_000_000}
        self.write(tmp_path / "run.rank0.json", 7, 10.0, **clock)
        for rank, boot in ((1, "a"), (2, "b")):
            name = tmp_path / f"run.rank{rank}.json"
            self.write(name, 7, 20.0, **{**clock, "rank": rank, "boot": boot, "wall_ns": 0})
            offset = {"ph": "M", "name": "ltc_offset", "pid": 7, "args": {"offset_ns": 3_000}}
            with name.open("a") as file:
                file.write(json.dumps({**offset, "tid": 0, "ts": 0}) + ",\n")
        merge(str(path), files_of_ranks(str(path)))
        assert [e["ts"] for e in named(read(path), "cut")] == [10.0, 20.0, 23.0]

    def test_the_parents_own_file_is_not_written_over(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        last = '{"ph":"M","name":"ltc_end"}'
        TraceFile(str(tmp_path / "run.rank0.json")).close(last)
        parent = TraceFile(str(path))
        assert not merge_if_whole(str(path), 1)
        parent.close(last)
        assert merge_if_whole(str(path), 1)

    def test_the_command(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        run = f"""
            import runpy, sys
            sys.argv = ["timeline", "merge", {str(path)!r}]
            runpy.run_module("ltc_core.timeline", run_name="__main__")
        """
        _, err = child.run(run, prelude="", returncode=1)
        assert "there are no timelines to merge" in err and "Next: copy the files" in err
        self.write(tmp_path / "run.rank0.json", 7, 1.0, rank=0, boot="a")
        out, err = child.run(run, prelude="")
        assert err == "" and "1 processes; open it in https://ui.perfetto.dev" in out
        assert len(named(read(path), "cut")) == 1
