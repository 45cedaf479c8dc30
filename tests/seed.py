"""What a test run chooses among more tests than it has time for.

Names rotate with the number of commits: another share each time, and the same one in every clone of a commit, so that a
failure is repeated where it is mended. Random programs have one seed. TEST_SEED chooses both.
"""

import functools
import os
import subprocess
from pathlib import Path

__all__ = ["rotating", "seed"]

_SEED = 3


def seed() -> int:
    """TEST_SEED, or the seed of CI."""
    return int(os.environ.get("TEST_SEED") or _SEED)


@functools.cache
def _num_commits() -> int:
    command = ["git", "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else _SEED  # an archive without its history


def rotating(names: list[str], share: int) -> list[str]:
    """One `share`-th of the names: all of them in as many commits."""
    first = seed() if os.environ.get("TEST_SEED") else _num_commits()
    return [name for k, name in enumerate(sorted(names)) if (k - first) % share == 0]
