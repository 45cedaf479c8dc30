"""Compiled code computes under the script's numeric flags, which may change while it runs; by the real compiler."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ltc_core.executors.inductor.numeric_flags import NumericFlags
from tests.compiled_cache import empty_cache
from tests.core import child

SCRIPT = """
x = torch.linspace(-1, 1, 1 << 20)
at = torch.arange(1 << 20) * 7919 % 13
a, b = torch.rand(512, 256), torch.rand(256, 512)


def program(x, at, a, b):
    sums = torch.zeros(13, device=x.device).scatter_add_(0, at, x * 1.5)
    return [sums, a @ b]


here = [t.to(device) for t in (x, at, a, b)]
set_flags = [
    lambda: None,
    lambda: torch.use_deterministic_algorithms(True),
    lambda: torch.backends.mkldnn.set_flags(_enabled=False),
    lambda: None,
]
for change in set_flags:
    change()
    for step in range(2):
        got = program(*here)
        ltc.mark_step()
        got = [t.cpu() for t in got]
    sums, product = (torch.equal(*pair) for pair in zip(got, program(x, at, a, b), strict=True))
    exact = [sums or not torch.are_deterministic_algorithms_enabled(), product or torch.backends.mkldnn.enabled]
    print(*exact, ltc.metrics.counter_value("CompiledProgram"))
"""


@pytest.mark.timeout(300)
def test_each_setting_has_its_program(tmp_path: Path) -> None:
    """Deterministic sums are those of eager to the last bit, and so are products without oneDNN."""
    settings = {"LTC_COMPILE": "sync", "LTC_COMPILED_CACHE_DIR": empty_cache(tmp_path / "compiled")}
    out, err = child.run(SCRIPT, timeout_s=280, **settings)
    assert err == ""
    assert out.splitlines() == [f"True True {programs}" for programs in (1, 2, 3, 3)]


def precision(value: str) -> Callable[[], None]:
    def change() -> None:
        torch.backends.mkldnn.matmul.fp32_precision = value  # type: ignore[attr-defined]

    return change


CHANGES: dict[str, Callable[[], object]] = {
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic, warns only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "uninitialized": lambda: torch._C._set_deterministic_fill_uninitialized_memory(False),
    "onednn": lambda: torch.backends.mkldnn.set_flags(_enabled=False),  # type: ignore[no-untyped-call]
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "precision": precision("bf16"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_flags_are_read_and_set(name: str) -> None:
    before = NumericFlags.now()
    try:
        CHANGES[name]()
        changed = NumericFlags.now()
        assert changed != before
        before.apply()
        assert NumericFlags.now() == before
        changed.apply()
        assert NumericFlags.now() == changed
    finally:
        before.apply()
