"""Build all C++ parts ahead of time: `python -m ltc_core.build`, for launchers and images.

Each is built on first use otherwise, which takes some seconds once for each user and torch.
"""

import sys

from ltc_core import follow
from ltc_core.device import build as device
from ltc_core.executors import allocator
from ltc_core.executors.inductor import launcher

__all__ = ["main"]

EXTENSIONS = (device.extension, follow.extension, launcher.extension, allocator.extension)


def main() -> int:
    """Build what is not built yet; give the number of parts that cannot be built."""
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
