"""`python -m ltc_launch` is `ltc-launch`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
