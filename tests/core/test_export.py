"""Exports where JAX is not installed; `tests/jax/test_export.py` has the others."""

import importlib.util
from typing import Any

import pytest
import torch

from ltc_core import export
from ltc_core.errors import DeviceError


def test_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without_jax(name: str, package: str | None = None) -> Any:
        return None if name == "jax" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_jax)
    with pytest.raises(
        DeviceError,
        match=r"(?s)ltc_core.export needs the package jax.*got: no such package.*Next: pip install '.\[jax\]' .*$",
    ) as raised:
        export.stablehlo(torch.nn.Linear(2, 1), (torch.ones(2),))
    assert "LTC_EXECUTOR" not in str(raised.value)
