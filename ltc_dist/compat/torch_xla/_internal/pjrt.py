"""`torch_xla._internal.pjrt`: call a function in every process, or in a thread for each device."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch

import ltc_dist as ltd
from ltc_core.settings import Settings, settings
from ltc_dist.compat.torch_xla.distributed.data_parallel import DataParallel
from ltc_dist.job.ranks import ranks

__all__ = ["run_multiprocess", "spawn", "spawn_threads"]


def run_multiprocess(
    fn: Callable[..., Any], *args: Any, start_method: str = "spawn", **kwargs: Any
) -> dict[int, Any]:
    """Call `fn(*args, **kwargs)` in a process for each device; returns the results by rank.

    The processes are new ones, also where there is one device, and as many as the environment says now. In a process of
    a job the function is called in this process; the result has this rank only.

    Raises:
        Exception: that of the first process that failed.
    """
    if ranks().world_size > 1:
        return {ranks().rank: fn(*args, **kwargs)}
    with tempfile.TemporaryDirectory(prefix="ltc-results-") as directory:
        call = partial(_call_and_keep, directory=directory, payload=(fn, args, kwargs))
        count = settings.num_devices if start_method == "fork" else Settings().num_devices
        started = ltd.spawn(call, nprocs=count, join=False, start_method=start_method)
        assert started is not None
        while not started.join():
            pass
        files = sorted(Path(directory).iterdir(), key=lambda path: int(path.name))
        return {int(path.name): pickle.loads(path.read_bytes()) for path in files}


def _call_and_keep(rank: int, directory: str, payload: tuple[Any, ...]) -> None:
    fn, args, kwargs = payload
    Path(directory, str(rank)).write_bytes(cloudpickle.dumps(fn(*args, **kwargs)))


def spawn(
    fn: Callable[..., Any],
    nprocs: int | None = None,
    start_method: str = "spawn",
    args: Sequence[Any] = (),
) -> None:
    """Call `fn(rank, *args)` in several processes; the same as `xmp.spawn`."""
    ltd.spawn(fn, args, nprocs, start_method=start_method)


def spawn_threads(fn: Callable[..., Any], args: Sequence[Any] = ()) -> None:
    """Call `fn(rank, *args)` in a thread of this process for each device."""

    def loop(model: Any, loader: Any, device: Any, context: Any) -> None:
        fn(ranks().rank, *args)

    DataParallel(torch.nn.Identity)(loop, [])
