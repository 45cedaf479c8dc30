"""What tests of several files ask of the runtime."""

from collections.abc import Iterator

import pytest
from torch.distributions import Distribution

from ltc_core.runtime.devices import context
from ltc_core.settings import settings


@pytest.fixture
def marked_steps() -> Iterator[None]:
    """Count cuts in loops that mark their steps: until two marks came, the runtime looks for steps of its own."""
    with settings.override(steps="marked"):
        yield


@pytest.fixture
def exact_shapes() -> Iterator[None]:
    """Count graphs, one for each size: no dynamic step of another test serves them."""
    device = context(0)
    with settings.override(dynamic_shapes="never"):
        device.wait()
        device.trace.may_be_dynamic = False
        device.trace.forget()
        device.compiler.forget()
        yield


@pytest.fixture
def checked_distributions() -> Iterator[None]:
    """PyTorch checks arguments; its compiler turns that off for the whole process."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)
