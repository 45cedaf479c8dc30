"""The seed of what a test run chooses: TEST_SEED, or the number of commits: each commit looks at other programs.

A clone of a commit chooses what every other clone of it chooses, so a failure of CI is repeated where it is mended.
"""

import functools
import os
import subprocess
from pathlib import Path

__all__ = ["rotating", "seed"]


@functools.cache
def seed() -> int:
    """TEST_SEED; else the number of commits; 0 where the tests are not in a git checkout."""
    if given := os.environ.get("TEST_SEED"):
        return int(given)
    count = ["git", "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(count, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:  # no git on this machine
        return 0
    return int(done.stdout) if done.returncode == 0 else 0


def rotating(names: list[str], share: int) -> list[str]:
    """One `share`-th of the names, another one for each seed: all of them in that many seeds."""
    return [name for k, name in enumerate(sorted(names)) if (k - seed()) % share == 0]
