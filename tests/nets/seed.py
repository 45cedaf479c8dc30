"""The seed of a run of the nets: that of NETS_SEED, or of the day, so that each day's CI looks at other programs."""

import datetime
import os

__all__ = ["rotating", "seed"]


def seed() -> int:
    return int(os.environ.get("NETS_SEED") or datetime.datetime.now(datetime.UTC).toordinal())


def rotating(names: list[str], share: int) -> list[str]:
    """One `share`-th of the names, another one each day: all of them in that many days."""
    return [name for k, name in enumerate(sorted(names)) if (k - seed()) % share == 0]
