"""What `import ltc_dist` does to the process besides what `import ltc_core` does, in order, each call with its reason.

One effect comes earlier: `expected_name` names the device as old scripts expect, before ltc_core registers it.
"""

from __future__ import annotations

import atexit
import importlib
import os

from ltc_core import source
from ltc_core.api import c10d
from ltc_core.executors import companions
from ltc_core.settings import settings
from ltc_dist import libraries
from ltc_dist.checkpoint import checkpointer, lock
from ltc_dist.collectives import c10d_lines, c10d_recorded
from ltc_dist.job import companions as companions_of_job
from ltc_dist.job import host_collectives
from ltc_dist.job.ranks import own_rank

__all__ = ["set_up"]


def set_up() -> None:
    """Register what runs at a fork and at the end of the process; serve old scripts if LTC_COMPAT asks for it.

    With LTC_AUTOLOAD libraries choose the device, too.
    """
    source.skip_frames_of(os.path.dirname(__file__))  # a user's line is never one of this package
    atexit.register(
        companions_of_job.outlive_others
    )  # after `leave_at_exit`, which tells that this process ends
    own_rank()  # before the script starts processes
    os.register_at_fork(after_in_child=lock.after_fork_in_child)
    # Runs before the handlers of ltc_core, which were registered earlier: the last collectives need the devices.
    atexit.register(host_collectives.leave_at_exit)
    host_collectives.before_leaving(checkpointer.close_all)
    c10d.begin = c10d_lines.begin  # its collectives are compared with those of the other processes
    c10d.record = c10d_recorded.record  # those of divided tensors are in the graph
    companions.find = companions_of_job.find  # devices of one job can be joined
    libraries.serve_torch()
    if settings.compat:
        importlib.import_module("ltc_dist.compat")
    elif settings.autoload:
        libraries.use_device()
