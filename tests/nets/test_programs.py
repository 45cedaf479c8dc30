"""The programs beside eager: all op by op, a share lowered, one compiled; other ones for each commit.

All of them: make test-programs, with the tier in ARGS.
"""

from pathlib import Path

import pytest

from tests.compiled_cache import empty_cache
from tests.nets.command import expect_success
from tests.nets.programs import find
from tests.nets.run_programs import check
from tests.nets.tiers import tier
from tests.seed import rotating

NAMES = list(find())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", sorted({name.split(".")[0] for name in NAMES}))
def test_op_by_op_they_are_as_eager(family: str) -> None:
    chosen = [n for n in NAMES if n.startswith(f"{family}.")]
    with tier("ops"):
        found = {name: what for name in chosen if (what := check(name))}
    assert not found, report(found)


@pytest.mark.timeout(300)
def test_lowered_they_are_as_eager() -> None:
    with tier("lowered"):
        found = {name: what for name in rotating(NAMES, 6) if (what := check(name))}
    assert not found, report(found)


@pytest.mark.timeout(400)
def test_compiled_they_are_as_eager(tmp_path: Path) -> None:
    arguments = [*rotating(NAMES, 200), "--tier", "compiled"]
    expect_success(
        "tests.nets.run_programs",
        *arguments,
        LTC_COMPILED_CACHE_DIR=empty_cache(tmp_path / "compiled"),
    )


def report(found: dict[str, str]) -> str:
    return "\n".join(f"{name}: {what}" for name, what in found.items())
