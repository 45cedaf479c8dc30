"""What a test run chooses among more tests than it has time for.

Names and programs that copy rotate with the number of commits: others each time, and the same ones in every clone of a
commit, so that a failure is repeated where it is mended. Other random programs have one seed. TEST_SEED chooses all.
"""

import functools
import os
import subprocess
from pathlib import Path

__all__ = ["rotating", "rotating_seed", "seed"]

_SEED = 3


def seed() -> int:
    """TEST_SEED, or the seed of CI."""
    return int(os.environ.get("TEST_SEED") or _SEED)


@functools.cache
def _num_commits() -> int:
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else _SEED  # an archive without its history


def rotating_seed() -> int:
    """TEST_SEED, or the number of commits."""
    return seed() if os.environ.get("TEST_SEED") else _num_commits()


def rotating(names: list[str], share: int) -> list[str]:
    """One `share`-th of the names: all of them in as many commits."""
    first = rotating_seed()
    return [name for k, name in enumerate(sorted(names)) if (k - first) % share == 0]
