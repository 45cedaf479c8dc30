"""What tests of several files ask of the runtime."""

from collections.abc import Iterator

import pytest

from ltc_core.settings import settings


@pytest.fixture
def marked_steps() -> Iterator[None]:
    """Count cuts in loops that mark their steps: until two marks came, the runtime looks for steps of its own."""
    with settings.override(steps="marked"):
        yield
