"""Programs that copy and write, beside eager; two thousand of them, compiled: make test-copies."""

from pathlib import Path

import pytest
import torch

from tests.compiled_cache import empty_cache
from tests.nets import copies
from tests.nets.tiers import TIERS
from tests.seed import rotating_seed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tier", "count"), [*((tier, 40) for tier in TIERS if tier != "parts"), ("parts", 4)]
)
def test_copies_and_writes(
    tier: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty, others in each commit."""
    monkeypatch.setenv("LTC_COMPILED_CACHE_DIR", empty_cache(tmp_path / "compiled"))
    assert copies.main(["--tier", tier, "--count", str(count), "--seed", str(rotating_seed())]) == 0


def test_a_number_is_always_the_same_program() -> None:
    assert copies.generate(7) == copies.generate(7) != copies.generate(8)


def test_a_copy_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["t9 = t0.clone()", "cut", "t9.add_(1)"]
    monkeypatch.setattr(copies, "generate", lambda number: lines)
    assert copies.failures([1], "ops") == {}
    clone = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda t: clone(t) if t.device.type == "cpu" else t.view(t.shape)
    )
    assert "leaf 0 of" in copies.failures([1], "ops")[1]
