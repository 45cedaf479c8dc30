"""Build all C++ parts ahead of time: `python -m ltc_core.build`, for launchers and images.

Otherwise each part is built on first use: a few seconds, once for each user and torch version.
"""

import sys

from ltc_core.device import build as device
from ltc_core.executors import host_memory
from ltc_core.executors.inductor import launcher
from ltc_core.executors.reference import replay
from ltc_core.record import fast_path
from ltc_core.tensor import native_objects

__all__ = ["main"]

EXTENSIONS = (
    device.extension,
    native_objects.extension,
    fast_path.extension,
    replay.extension,
    launcher.extension,
    host_memory.extension,
)


def main() -> int:
    """Build the missing parts; return the number of parts that cannot be built."""
    missing = [extension for extension in EXTENSIONS if extension.load() is None]
    for extension in EXTENSIONS:
        if extension in missing:
            reason = extension.unavailable_reason
            print(f"{extension.name} cannot be built: {reason}.", file=sys.stderr)
        else:
            print(extension.library_path())
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
