"""Kept memory: what is freed serves the next request, within a limit, and nobody sees another's data.

The allocator is the process's: each program is a process of its own.
"""

from pathlib import Path

import pytest

from ltc_core.executors import host_memory
from ltc_core.native_extension import Extension
from ltc_core.settings import settings
from tests.core import child

PRELUDE = """
import os, threading
import torch
from ltc_core.executors.host_memory import figures, release_kept, keep_memory
MIB = 1 << 20

def block(size, value=0):
    return torch.full((size,), value, dtype=torch.uint8)

def is_all(t, value):  # makes no block of its own
    return all(extreme == value for extreme in t.aminmax())
"""

pytestmark = pytest.mark.skipif(
    host_memory.extension.load() is None, reason=host_memory.extension.unavailable_reason
)


def passes(code: str, **settings: str) -> None:
    """Run a program whose assertions must hold."""
    assert child.run(code, prelude=PRELUDE, **settings) == ("", "")


def test_what_is_freed_serves_the_next_request() -> None:
    passes("""
        assert figures() == (0, 0, 0)
        assert keep_memory() and keep_memory()
        x = block(3 * MIB)
        assert figures().live_bytes == 3 * MIB and figures().kept_bytes == 0
        address = x.data_ptr()
        del x
        assert (figures().live_bytes, figures().kept_bytes) == (0, 3 * MIB)
        y = block(2 * MIB, 7)  # a part of it
        assert y.data_ptr() == address
        assert (figures().live_bytes, figures().kept_bytes) == (2 * MIB, MIB)
        assert is_all(y, 7)
        del y
        assert figures().kept_bytes == 3 * MIB  # in one piece again
        parts = [block(MIB) for _ in range(3)]
        assert figures().kept_bytes == 0
        for k in (0, 2, 1):  # the last one joins what is before it and what is after it
            parts[k] = None
        assert block(3 * MIB).data_ptr() == address
    """)


def test_small_blocks_and_those_made_before_are_left_to_pytorch() -> None:
    passes("""
        before = block(5 * MIB, 3)
        keep_memory()
        small = [block(100_000) for _ in range(10)]
        assert figures()[:2] == (0, 0)
        assert is_all(before, 3)
        del before, small
        assert figures()[:2] == (0, 0)
    """)


def test_it_never_holds_more_than_the_limit() -> None:
    """The limit is the peak of what was live lately, a sixteenth of that, and 16 MiB."""
    passes("""
        import random
        keep_memory()
        draw = random.Random(0)
        held, peak = [], 0
        for _ in range(3000):
            if held and draw.random() < 0.5:
                held.pop(draw.randrange(len(held)))
            elif len(held) < 12:
                held.append(torch.empty(draw.randrange(MIB // 8, 6 * MIB), dtype=torch.uint8))
            live, kept, limit = figures()
            peak = max(peak, live)
            assert live + kept <= limit == peak + peak // 16 + 16 * MIB, (live, kept, limit, peak)
        assert kept > 0
    """)


def test_the_peak_of_long_ago_is_forgotten() -> None:
    passes("""
        keep_memory()
        x = torch.empty(200 * MIB, dtype=torch.uint8)
        del x
        assert figures().kept_bytes == 200 * MIB
        for _ in range(2 * 4096 + 1):  # two windows of allocations
            torch.empty(MIB, dtype=torch.uint8)
        assert figures().live_bytes + figures().kept_bytes <= figures().limit_bytes < 20 * MIB
    """)


def test_release_kept() -> None:
    passes("""
        release_kept()  # before there is anything: nothing to do
        keep_memory()
        x, y = block(4 * MIB, 5), block(8 * MIB)
        del y
        assert figures().kept_bytes == 8 * MIB
        release_kept()
        assert (figures().live_bytes, figures().kept_bytes) == (4 * MIB, 0)
        assert is_all(x, 5)
        del x
        assert figures().kept_bytes == 4 * MIB  # kept again
    """)


def test_threads_never_share_a_block() -> None:
    """Each fills its blocks with its own number, and finds it when it looks again."""
    passes("""
        keep_memory()
        wrong = []

        def work(number):
            held = []
            for k in range(300):
                held.append(block((1 + (k * number) % 5) * MIB // 4, number))
                if len(held) == 4:
                    wrong.extend(x for x in (held.pop(k % 4), held[0]) if not is_all(x, number))

        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and figures().live_bytes == 0
    """)


def test_a_forked_child_has_memory_of_its_own() -> None:
    passes("""
        keep_memory()
        x = block(2 * MIB, 1)
        del x
        pid = os.fork()
        if not pid:
            y = block(2 * MIB, 2)
            os._exit(0 if is_all(y, 2) and figures().live_bytes == 2 * MIB else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert figures()[:2] == (0, 2 * MIB)
    """)


def test_a_setting_switches_it_off() -> None:
    passes(
        """
        assert not keep_memory()
        x = block(4 * MIB)
        del x
        assert figures() == (0, 0, 0)
        """,
        LTC_KEEP_MEMORY="0",
    )


def test_the_device_keeps_memory() -> None:
    passes("""
        import ltc_core as ltc
        x = torch.ones(MIB, device=ltc.lazy_device()) + 1
        ltc.mark_step(wait=True)
        assert figures().live_bytes >= 4 * MIB
    """)


def test_no_compiler_for_our_own_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setattr(
        host_memory, "extension", Extension("_ltc_memory", host_memory.extension.source, "-O1")
    )
    with settings.override(cache_dir=str(tmp_path)):
        assert not host_memory.keep_memory()
        assert host_memory.figures() == (0, 0, 0)
        host_memory.release_kept()


def test_the_allocator_of_somebody_else_stays(tmp_path: Path) -> None:
    """A second copy of ours stands for it: it has not been told of the first."""
    passes(
        f"""
        from ltc_core.executors import host_memory as allocator
        from ltc_core.native_extension import Extension
        from ltc_core.settings import settings
        assert keep_memory()
        with settings.override(cache_dir={str(tmp_path)!r}):
            other = Extension("_ltc_memory", allocator.extension.source, "-O0").load()
            assert other is not allocator.extension.loaded
            assert not other.install()
        x = block(2 * MIB)
        assert figures().live_bytes == 2 * MIB
        """
    )
