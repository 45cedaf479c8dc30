"""The seed of what a test run chooses among more tests than it has time for: TEST_SEED, or one and the same number.

Every clone of a commit chooses what every other clone of it chooses, so a failure of CI is repeated where it is mended.
"""

import os

__all__ = ["rotating", "seed"]

_SEED = 3


def seed() -> int:
    """TEST_SEED, or the seed of CI."""
    return int(os.environ.get("TEST_SEED") or _SEED)


def rotating(names: list[str], share: int) -> list[str]:
    """One `share`-th of the names, another one for each seed: all of them in that many seeds."""
    return [name for k, name in enumerate(sorted(names)) if (k - seed()) % share == 0]
