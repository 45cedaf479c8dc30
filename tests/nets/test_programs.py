"""The programs beside eager: all op by op, a share lowered, one compiled; other ones for each commit.

All of them: make test-programs, with the tier in ARGS.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nets.programs import find
from tests.nets.run_programs import check
from tests.nets.tiers import tier
from tests.seed import rotating

ROOT = Path(__file__).parents[2]
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
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.nets.run_programs",
            *rotating(NAMES, 200),
            "--tier",
            "compiled",
        ],
        cwd=ROOT,
        env={**os.environ, "LTC_COMPILED_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def report(found: dict[str, str]) -> str:
    return "\n".join(f"{name}: {what}" for name, what in found.items())
