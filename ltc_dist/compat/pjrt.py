"""`torch_xla.experimental.pjrt`, which was `torch_xla.runtime` before 2.1."""

from ltc_dist.compat import runtime
from ltc_dist.compat.runtime import *  # noqa: F403
from ltc_dist.compat.xla_model import broadcast_master_param
from ltc_dist.compat.xla_model import xla_rendezvous as rendezvous

__all__ = [*runtime.__all__, "broadcast_master_param", "rendezvous", "using_pjrt"]


def using_pjrt() -> bool:
    """Tell that each process has its own devices."""
    return True
