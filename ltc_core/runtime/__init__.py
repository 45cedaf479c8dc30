"""The devices of this process: cuts, the program cache, launches, the worker thread, waiting, leaving and forking."""
