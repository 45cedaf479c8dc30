"""`torch_xla.experimental.pjrt`, which was `torch_xla.runtime` before 2.1."""

from collections.abc import Iterable

from ltc_dist.compat.torch_xla import runtime
from ltc_dist.compat.torch_xla.core import xla_model
from ltc_dist.compat.torch_xla.core.xla_model import broadcast_master_param, xla_device
from ltc_dist.compat.torch_xla.runtime import *  # noqa: F403

__all__ = [*runtime.__all__, "broadcast_master_param", "rendezvous", "xla_device"]


def rendezvous(
    tag: str, payload: bytes = b"", ordinals: Iterable[int] | None = None, *, mesh_port: int = 0
) -> list[bytes]:
    """Wait until every process has come to `tag`, and exchange payloads. `mesh_port` is accepted."""
    return xla_model.rendezvous(tag, payload, ordinals or ())
