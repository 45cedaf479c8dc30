"""PyTorch's operators beside eager: all op by op with half of their samples, a fortieth lowered and compiled.

Other samples and other operators for each commit.

All of them in all tiers: make test-opinfo.
"""

import dataclasses
import warnings
from pathlib import Path

import pytest

from tests.compiled_cache import empty_cache
from tests.nets.opinfo import (
    LATER,
    OPS,
    SHARES,
    SKIPPED,
    SKIPPED_IN,
    WIDER,
    check,
    main,
    refused_dtypes,
    wrong_calls,
)
from tests.seed import rotating

SHARE_OF_DTYPES = 10
ALL_SAMPLES = SHARES["ops"]  # op by op, which the tests are (conftest.py)
SOME_SAMPLES = dataclasses.replace(ALL_SAMPLES, rotation=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in OPS if n not in SKIPPED])
def test_values_gradients_and_refusals_are_eagers(name: str) -> None:
    assert check([name], SOME_SAMPLES) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [n for n, op in OPS.items() if op.error_inputs_func and op.name not in LATER]
)
def test_wrong_calls_raise_what_eager_raises(name: str) -> None:
    assert not wrong_calls(name)


def test_dtypes_that_eager_refuses_are_refused() -> None:
    found: dict[str, str] = {}
    total = 0
    names = [n for n in OPS if n not in SKIPPED and n not in WIDER and "sparse" not in n]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in rotating(names, SHARE_OF_DTYPES):
            count, what = refused_dtypes(name)
            total += count
            if what:
                found[name] = what
    assert not found, found
    assert total > 50


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tier", ["lowered", "compiled"])
def test_a_share_of_them_in_a_tier_of_the_compiler(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTC_COMPILED_CACHE_DIR", empty_cache(tmp_path / "compiled"))
    assert main(["--tier", tier, "--share", "40"]) == 0


def test_skipped_operators_exist_and_are_few() -> None:
    for rows in (SKIPPED, *SKIPPED_IN.values()):
        assert set(rows) <= set(OPS) and len(rows) < 0.05 * len(OPS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in SKIPPED if "empty" not in n])
def test_what_is_skipped_is_not_as_eager(name: str) -> None:
    """A row that is not needed any more fails here."""
    assert check([name], ALL_SAMPLES)
