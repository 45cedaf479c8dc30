"""One mesh of the devices of all processes of a job."""

from __future__ import annotations

from ltc_core import errors, source
from ltc_core.runtime.devices import contexts
from ltc_core.settings import settings
from ltc_dist.job.ranks import ranks

__all__ = ["use_spmd"]


def use_spmd() -> None:
    """Let a mesh have the devices of all processes; in one process it has them anyway.

    All processes then run the same steps, with the same seed: a tensor that nobody divides has the same values in each,
    and each passes the whole of a tensor that it divides, or with `ShardingSpec(..., minibatch=True)` its own part of a
    batch. `optimizer_step` averages nothing: gradients are those of the whole batch. LTC_SPMD=1 does the same.

    Raises:
        DeviceError: LTC_EXECUTOR is not jax, or the device is in use already.

    Source: `torch_xla.runtime.use_spmd`.
    """
    if settings.spmd or ranks().world_size == 1:
        return
    if settings.executor != "jax":
        raise errors.DeviceError(
            f"the devices of {ranks().world_size} processes cannot be one mesh",
            got=f"LTC_EXECUTOR={settings.executor}",
            where=source.user_line(),
            next="LTC_EXECUTOR=jax, with the package jax; or average gradients by optimizer_step, without use_spmd()",
        )
    if contexts():
        raise errors.DeviceError(
            "use_spmd comes too late: this process has made its device",
            where=source.user_line(),
            next="call it before the first use of the device, or set LTC_SPMD=1",
        )
    settings.spmd = True
