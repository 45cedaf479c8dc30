"""The versions of PyTorch that the tests run with; imported before anything that a version may lack.

The runtime is built on parts of PyTorch that are not public, such as the dispatch of subclasses and the compiler's
lowering. An older one fails somewhere inside; of a newer one it is not known.
"""

from __future__ import annotations

import re
import warnings

import torch

from ltc_core.errors import VersionError

__all__ = ["check_version", "is_tested", "tested"]

OLDEST, NEWEST = (2, 9), (2, 15)


def tested() -> str:
    """The tested versions, as text."""
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


def is_tested(version: str) -> bool:
    """Whether a version is among them; a build of the user's own, whose version is no number, counts as such."""
    release = _release(version)
    return release is None or OLDEST <= release <= NEWEST


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def check_version(version: str) -> None:
    """Refuse a PyTorch that is too old, and warn of one that is newer than the tested ones.

    Raises:
        VersionError: it is too old.
    """
    if is_tested(version):
        return
    if (_release(version) or OLDEST) < OLDEST:
        raise VersionError(
            "this PyTorch is too old for ltc",
            got=f"torch {version}, expected {tested()}",
            next="pip install 'torch>=2.9'",
        )
    warnings.warn(
        f"torch {version} is newer than what ltc is tested with ({tested()}). Next: compare the losses of some "
        "steps with those of the CPU, or install a tested one.",
        stacklevel=2,
    )


check_version(str(torch.__version__))
