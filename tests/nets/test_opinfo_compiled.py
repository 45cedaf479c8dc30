"""PyTorch's operators in the tiers of the compiler: a twentieth lowered and compiled, other ones for each commit.

All of them: make test-opinfo.
"""

from pathlib import Path

import pytest

from tests.core.ops.test_opinfo import OPS
from tests.nets.command import expect_success
from tests.nets.run_opinfo import SKIPPED_IN


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tier", ["lowered", "compiled"])
def test_operators_are_as_eager(tier: str, tmp_path: Path) -> None:
    arguments = ["--tier", tier, "--share", "20"]
    expect_success("tests.nets.run_opinfo", *arguments, LTC_COMPILED_CACHE_DIR=str(tmp_path))


def test_skipped_operators_exist_and_are_few() -> None:
    for rows in SKIPPED_IN.values():
        assert set(rows) <= set(OPS) and len(rows) < 0.05 * len(OPS)
