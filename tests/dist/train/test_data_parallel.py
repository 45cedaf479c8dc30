"""Threads: one replica a device, the mean of the gradients over them, errors, what is kept between calls."""

from pathlib import Path

import pytest

from tests.compiled_cache import empty_cache
from tests.core.child import run

pytestmark = pytest.mark.dist

PRELUDE = """
import threading
import time
import torch
import ltc_dist as ltd
import ltc_dist.data_parallel as dp
from ltc_core import metrics
from ltc_core.errors import CollectiveError, RankError

def fails(kind, call):
    try:
        call()
    except kind as error:
        return str(error) + str(getattr(error, "__notes__", ""))
    raise AssertionError("nothing was raised")

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

g = torch.Generator().manual_seed(1)
x, y = torch.randn(48, 4, generator=g), torch.randn(48, 1, generator=g)
parts = [(x[k : k + 4], y[k : k + 4]) for k in range(0, 48, 4)]

def loop(model, loader, device, context, losses=None):
    optimizer = context.getattr_or("optimizer", lambda: torch.optim.AdamW(model.parameters(), lr=0.01))
    context.epochs = context.getattr_or("epochs", 0) + 1
    seen = []
    for number, (a, b) in loader:
        seen.append(number)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        ltd.optimizer_step(optimizer)
    return device, seen, context.epochs, ltd.get_ordinal(), ltd.world_size(), threading.current_thread().name

# A loop whose second replica acts while the first one waits in its collective, in each step.
def while_it_waits(act, steps=1):
    # One permit for each collective: a read of the loss does not wait for the collective after it.
    waits = threading.Semaphore(0)

    def loop(model, loader, device, context):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x.to(device)).square().mean()
            loss.backward()
            if device.index == 1:
                assert waits.acquire(timeout=30)
                time.sleep(0.2)  # by now the other one waits
                act(device)
            else:
                waits.release()
            ltd.optimizer_step(optimizer)
            losses.append(loss.item())
        return losses + [p.sum().item() for p in model.parameters()]

    return loop
"""


def passes(code: str, **settings: str) -> None:
    run(code, prelude=PRELUDE, **{"LTC_NUM_DEVICES": "2", "LTC_COMPILE": "off", **settings})


def test_two_replicas_learn_what_one_model_does() -> None:
    passes("""
        parallel = dp.DataParallel(net)
        for epoch in range(1, 4):
            got = parallel(loop, parts)
            devices = [torch.device("ltc:0"), torch.device("ltc:1")]
            assert [g[0] for g in got] == devices == parallel.devices
            assert [g[1:5] for g in got] == [(list(range(6)), epoch, k, 2) for k in range(2)]
        assert len({g[5] for g in got}) == 2

        one = net()
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        for _ in range(3):
            for k in range(0, 48, 8):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(one(x[k : k + 8]), y[k : k + 8]).backward()
                optimizer.step()
        first, second = parallel.models
        for a, b, c in zip(first.parameters(), second.parameters(), one.parameters(), strict=True):
            assert torch.equal(a.cpu(), b.cpu())
            torch.testing.assert_close(a.detach().cpu(), c.detach(), rtol=1e-4, atol=1e-5)
        # For each device a first graph and one with the optimizer's state: none because there are two threads, and no
        # new ones in later epochs.
        assert metrics.counter_value("UncachedCompile") == 4
    """)


def test_each_device_has_one_program_for_the_same_step() -> None:
    passes("""
        def plain(model, loader, device, context):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _, (a, b) in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(a), b).backward()
                ltd.optimizer_step(optimizer)

        parallel = dp.DataParallel(net)
        parallel(plain, parts)
        assert metrics.counter_value("UncachedCompile") == 2
    """)


def test_without_devices_it_runs_here() -> None:
    passes("""
        parallel = dp.DataParallel(net(), device_ids=[])
        [(device, seen, epochs, *_, thread)] = parallel(loop, parts)
        assert device == torch.device("cpu") and seen == list(range(12)) and thread == "MainThread"

        def batches(model, loader, device, context):
            return [type(b) for b in loader]

        assert parallel(batches, parts, enumerate_batches=False) == [[tuple] * 12]
        assert dp.DataParallel(net(), enumerate_batches=False)(batches, parts) == [[tuple] * 6] * 2
    """)


def test_the_first_error_stops_all() -> None:
    passes("""
        parallel = dp.DataParallel(net)

        def failing(model, loader, device, context):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number, (a, b) in loader:
                if number == 2 and device.index == 1:
                    raise LookupError("no such word")
                optimizer.zero_grad()
                model(a).sum().backward()
                ltd.optimizer_step(optimizer)

        text = fails(LookupError, lambda: parallel(failing, parts))
        assert "no such word" in text and "raised by the loop on ltc:1" in text
        assert not [t for t in threading.enumerate() if "replica" in t.name or "prefetch" in t.name]
        assert len(parallel(loop, parts)) == 2  # and it can be used again
    """)


def test_loops_that_do_not_fit_together() -> None:
    passes("""
        parallel = dp.DataParallel(net)

        def uneven(model, loader, device, context):
            for k in range(2 + device.index):
                ltd.all_reduce("sum", torch.ones(2, device=device))
                ltd.mark_step(device=device)

        def different(model, loader, device, context):
            ltd.all_reduce("sum", torch.ones(2 + device.index, device=device))

        assert "replica 0 has ended while replica 1 waits" in fails(CollectiveError, lambda: parallel(uneven, parts))
        assert "are at different collectives" in fails(CollectiveError, lambda: parallel(different, parts))
    """)


@pytest.mark.parametrize("mode", ["off", "sync"])
def test_a_replica_that_waits_in_its_step_keeps_nobody_out(mode: str, tmp_path: Path) -> None:
    """The other one looks at the report, and at a value of that device, before it comes to the collective."""
    passes(
        """
        from ltc_core.runtime.devices import count_pending_ops
        values = [torch.ones(2, device=f"ltc:{k}") for k in range(2)]
        steps = 4  # op by op, and replayed or compiled

        def look(device):
            assert count_pending_ops()
            assert values[0].tolist() == [1, 1]

        ltd.mark_step()
        first, second = dp.DataParallel(net)(while_it_waits(look, steps), parts)
        assert first == second and len(first) == steps + 4
    """,
        LTC_COMPILE=mode,
        LTC_COMPILED_CACHE_DIR=empty_cache(tmp_path / "compiled"),
    )


def test_a_replica_starts_processes_while_another_one_waits_for_it() -> None:
    passes(
        """
        def read(device):
            numbers = torch.utils.data.DataLoader(torch.arange(6.0), 3, num_workers=1)
            assert [batch.sum().item() for batch in numbers] == [3, 12]

        first, second = dp.DataParallel(net)(while_it_waits(read), parts)
        assert first == second
    """,
        LTC_COLLECTIVE_TIMEOUT_S="20",
    )


def test_a_replica_ends_a_timeline_while_another_one_waits_for_it(tmp_path: Path) -> None:
    passes(
        f"""
        import ltc_core as ltc
        import ltc_core.profiler

        def watch(device):
            with ltc.profiler.timeline({str(tmp_path / "timeline")!r}):
                torch.ones(2, device=device).sum().item()

        first, second = dp.DataParallel(net)(while_it_waits(watch), parts)
        assert first == second
    """,
        LTC_COLLECTIVE_TIMEOUT_S="20",
    )


def test_the_first_replica_saves(tmp_path: Path) -> None:
    passes(f"""
        def loop(model, loader, device, context):
            ltd.save({{"rank": ltd.get_ordinal(), "x": torch.ones(2, device=device)}}, {str(tmp_path / "a.pt")!r})

        dp.DataParallel(net)(loop, parts)
        saved = torch.load({str(tmp_path / "a.pt")!r})
        assert saved["rank"] == 0 and saved["x"].tolist() == [1, 1]
    """)


def test_replicas_meet_by_tag() -> None:
    passes("""
        def loop(model, loader, device, context):
            k = ltd.get_ordinal()
            summed = ltd.all_reduce("sum", torch.ones(2, device=device))  # recorded, handed over by the meeting
            found = [ltd.rendezvous(f"round {n}", bytes([10 * n + k])) for n in range(3)]
            backwards = ltd.rendezvous("backwards", bytes([k]), (1, 0))
            losses = ltd.mesh_reduce("losses", [torch.full((2,), k + 1.0, device=device), k], list)
            alone = ltd.rendezvous("alone", b"me", (k,))
            called = ltd.do_on_ordinals(lambda: "done")
            return found, backwards, ltd.to_cpu(losses), alone, called, ltd.to_cpu(summed).tolist()

        for k, got in enumerate(dp.DataParallel(net)(loop, parts)):
            found, backwards, losses, alone, called, summed = got
            assert found == [[bytes([10 * n]), bytes([10 * n + 1])] for n in range(3)], found
            assert backwards == [b"\\1", b"\\0"] and alone == [b"me"] and called == (None if k else "done")
            assert [(t.tolist(), n) for t, n in losses] == [([1, 1], 0), ([2, 2], 1)]
            assert summed == [2, 2]
    """)


def test_a_meeting_of_replicas_leaves_a_step_whole_that_another_one_records() -> None:
    passes("""
        recorded, met = threading.Event(), threading.Event()

        def loop(model, loader, device, context):
            x = torch.ones(2, device=device)
            ltd.mark_step(device=device)
            x = ltd.all_reduce("sum", x)
            if device.index == 1:
                recorded.set()
                assert met.wait(30)
                assert count_pending_ops()
            else:
                assert recorded.wait(30)
                threading.Timer(0.5, met.set).start()
            ltd.rendezvous("there")
            return x.tolist()

        from ltc_core.runtime.devices import count_pending_ops
        assert dp.DataParallel(net)(loop, parts) == [[2, 2]] * 2
    """)


def test_a_meeting_where_a_replica_does_not_come() -> None:
    passes(
        """
        parallel = dp.DataParallel(net)

        def ending(model, loader, device, context):
            if device.index == 0:
                ltd.rendezvous("there")

        def failing(model, loader, device, context):
            if device.index == 0:
                ltd.mesh_reduce("there", 1, sum)
            time.sleep(0.2)
            raise LookupError("no such word")

        def astray(model, loader, device, context):
            ltd.rendezvous(f"place {device.index}")

        def some(model, loader, device, context):
            ltd.rendezvous("some", b"", (0, 1))

        text = fails(CollectiveError, lambda: parallel(ending, parts))
        assert "replica 1 has ended while replica 0 waits" in text and "at rendezvous 'there'" in text
        assert "no such word" in fails(LookupError, lambda: parallel(failing, parts))
        text = fails(CollectiveError, lambda: parallel(astray, parts))
        assert "replica 1: rendezvous 'place 1'" in text
        three = dp.DataParallel(net, ["ltc:0", "ltc:1", "ltc:2"])
        assert "threads meet all together" in fails(RankError, lambda: three(some, parts))
    """,
        LTC_NUM_DEVICES="3",
    )


def test_all_collectives() -> None:
    passes("""
        def collect(model, loader, device, context):
            k = ltd.get_ordinal()
            x = torch.arange(4.0, device=device) + 10 * k
            both = [x.clone()]
            ltd.collective_broadcast(both, 1)
            return ltd.to_cpu([
                ltd.all_reduce("sum", x), ltd.all_reduce("max", x, 0.5), ltd.all_gather(x), *both,
                ltd.reduce_scatter("sum", x, 1.0, 0, 2), ltd.all_to_all(x, 0, 0, 2),
                ltd.collective_permute(x, [[0, 1]]),
            ])

        a = torch.arange(4.0)
        b = a + 10
        parallel = dp.DataParallel(net)
        for k, got in enumerate(parallel(collect, parts)):
            want = [a + b, b / 2, torch.cat([a, b]), b, (a + b)[2 * k : 2 * k + 2],
                    torch.cat([t[2 * k : 2 * k + 2] for t in (a, b)]), a if k else 0 * a]
            assert all(map(torch.equal, got, want)), (got, want)
    """)


def test_a_process_of_a_job_has_no_threads() -> None:
    passes(
        """
        assert "is one of a job" in fails(RankError, lambda: dp.DataParallel(net))
        """,
        RANK="0",
        WORLD_SIZE="2",
    )
