"""The table of what is in the store: docs/protocol.md has it in words, and the code has no other keys."""

import re
from pathlib import Path

import torch.distributed

from ltc_dist.job import protocol
from ltc_dist.job.protocol import FACTS, Fact

ROOT = Path(__file__).parents[3]


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    rows = [f"| `{f.pattern}` | {f.value} | {f.writer} | {f.ends} |" for f in FACTS]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows
    named = {value for value in vars(protocol).values() if isinstance(value, Fact)}
    assert named == set(FACTS)


def test_stores_are_written_through_the_table_alone() -> None:
    writes = re.compile(r"(?i)(store|keys)\w*(\(\))?\.(set|add|append|compare_set|delete_key)\(")
    paths = [p for folder in ("ltc_dist", "launch") for p in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 50
    found = [path.name for path in paths if writes.search(path.read_text())]
    assert found == ["protocol.py"]


def test_a_fact_is_told_heard_and_taken_back() -> None:
    store = torch.distributed.HashStore()
    assert protocol.LEASE.heard(store, rank=1) == b""
    protocol.LEASE.tell(store, "a 1", rank=1)
    assert protocol.LEASE.heard(store, rank=1) == b"a 1" and store.get("lease/1") == b"a 1"
    assert protocol.LEASE.heard(store, rank=2) == b""
    protocol.LEASE.take_back(store, rank=1)
    assert protocol.LEASE.heard(store, rank=1) == b""
    assert protocol.RUN.tell_first(store, "x", name="") == "x"
    assert protocol.RUN.tell_first(store, "y", name="") == "x"
