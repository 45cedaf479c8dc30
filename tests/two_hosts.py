"""Two hosts on one machine: network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest

__all__ = ["ADDRESSES", "two_hosts"]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_IP = shutil.which("ip") or "/usr/sbin/ip"


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Make them for the length of a `with` block.

    Returns:
        For each host what to put before a command. Its interface to the other one is called `cable`.
    """
    if not os.path.exists(_IP):
        pytest.skip("there is no command `ip` to make network namespaces with")
    mark = uuid.uuid4().hex[:8]
    names = [f"ltc-{mark}-{k}" for k in range(2)]
    made: list[str] = []
    try:
        for name in names:
            done = _ip("netns", "add", name, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces can be made here: {done.stderr.strip()}")
            made.append(name)
        done = _ip("link", "add", "cable", "netns", names[0], "type", "veth",
                   "peer", "name", "cable", "netns", names[1], check=False)  # fmt: skip
        if done.returncode:
            pytest.skip(f"no pair of interfaces can be made here: {done.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [[_IP, "netns", "exec", name] for name in names]
    finally:
        for name in made:
            _ip("netns", "delete", name, check=False)


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_IP, *words], check=check, capture_output=True, text=True)
