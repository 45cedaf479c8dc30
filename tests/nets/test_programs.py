"""The programs beside eager: all op by op, a share at once and lowered, one compiled; other ones for each commit.

All of them: make test-programs, with the tier in ARGS.
"""

from pathlib import Path

import pytest

from tests.compiled_cache import empty_cache
from tests.nets.programs import find
from tests.nets.run_programs import check, main
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
def test_at_once_they_are_as_eager() -> None:
    with tier("at_once"):
        found = {name: what for name in rotating(NAMES, 3) if (what := check(name))}
    assert not found, report(found)


@pytest.mark.timeout(300)
def test_lowered_they_are_as_eager() -> None:
    with tier("lowered"):
        found = {name: what for name in rotating(NAMES, 6) if (what := check(name))}
    assert not found, report(found)


@pytest.mark.timeout(400)
def test_compiled_they_are_as_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTC_COMPILED_CACHE_DIR", empty_cache(tmp_path / "compiled"))
    assert main([*rotating(NAMES, 200), "--tier", "compiled"]) == 0


def report(found: dict[str, str]) -> str:
    return "\n".join(f"{name}: {what}" for name, what in found.items())
