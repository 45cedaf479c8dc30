"""`python -m ltc_launch` is `ltc-launch`."""

import os
import sys

if __name__ == "__main__":
    # Python has put the working directory first, where a file may have the name of a module that PyTorch imports.
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]

    from .cli import main

    sys.exit(main())
