"""Optimizers with what people build around them, beside eager; all of them: `python -m tests.nets.optimizers`."""

import pytest

from tests.core.programs.test_optimizers import VARIANTS
from tests.nets.optimizers import AROUND, difference
from tests.nets.tiers import tier
from tests.seed import rotating

NAMES = [f"{around}-{name}-{variant}" for around in AROUND for name, variant in VARIANTS]


@pytest.mark.parametrize("which", rotating(NAMES, 15))
def test_optimizer(which: str) -> None:
    """A dozen, others in each commit, as they are lowered for the compiler."""
    around, name, variant = which.split("-")
    with tier("lowered"):
        assert not difference(name, variant, around)
