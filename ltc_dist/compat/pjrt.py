"""`torch_xla.experimental.pjrt`, which was `torch_xla.runtime` before 2.1."""

from collections.abc import Iterable

from ltc_dist.compat import runtime, xla_model
from ltc_dist.compat.runtime import *  # noqa: F403
from ltc_dist.compat.xla_model import broadcast_master_param, xla_device

__all__ = [*runtime.__all__, "broadcast_master_param", "rendezvous", "xla_device"]


def rendezvous(
    tag: str, payload: bytes = b"", ordinals: Iterable[int] | None = None, *, mesh_port: int = 0
) -> list[bytes]:
    """Wait until every process has come to `tag`, and exchange payloads. `mesh_port` is accepted."""
    return xla_model.rendezvous(tag, payload, ordinals or ())
