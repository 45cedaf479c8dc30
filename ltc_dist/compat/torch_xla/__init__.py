"""The top level of `torch_xla`: devices, steps, `launch`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core import step
from ltc_core.api.eager import eager_mode, is_eager_mode
from ltc_core.api.torch_compile import AROUND
from ltc_core.api.verbs import DeviceLike
from ltc_core.debug.report import compiling
from ltc_dist import multiprocessing as xmp
from ltc_dist.compat import buffer_donors
from ltc_dist.compat.different_graphs import DifferentGraphs, recorded_ops
from ltc_dist.compat.torch_xla import _XLAC
from ltc_dist.compat.torch_xla import runtime as xr
from ltc_dist.compat.torch_xla.core import xla_env_vars as xenv
from ltc_dist.compat.torch_xla.core import xla_model
from ltc_dist.compat.torch_xla.core import xla_model as xm
from ltc_dist.compat.torch_xla.distributed import (
    xla_backend,  # noqa: F401 - torch_xla registers it at its import, too
)
from ltc_dist.compat.torch_xla.stablehlo import save_as_stablehlo, save_torch_model_as_stablehlo
from ltc_dist.compat.torch_xla.utils import utils as xu
from ltc_dist.compat.torch_xla.version import __version__

__all__ = [
    "_XLAC",
    "__version__",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "save_as_stablehlo",
    "save_torch_model_as_stablehlo",
    "set_custom_compile_options",
    "step",
    "sync",
    "xenv",
    "xm",
    "xmp",
    "xr",
    "xu",
]

# torch_xla replaces torch.nn.GRU by its own and keeps PyTorch's here. Nothing is replaced here, so it is both.
_gru: Any = torch.nn.GRU
_gru._orig = torch.nn.GRU


def device(index: int | None = None) -> torch.device:
    """Return device `index` of this process, by default the current one.

    Raises:
        DeviceError: there is no such device.
    """
    return ltc.lazy_device(index)


def devices() -> list[torch.device]:
    """List the devices of this process."""
    return [torch.device(name) for name in xla_model.get_xla_supported_devices()]


def real_devices() -> list[str]:
    """Return what the devices compute on: ['CPU:0', 'CPU:1']."""
    return xla_model.xla_real_devices()


def device_count() -> int:
    """Return the number of devices of this process."""
    return len(devices())


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End the step; see `xm.mark_step`."""
    xla_model.mark_step(wait, reset_scope)


def manual_seed(seed: int, device: DeviceLike = None) -> None:
    """Seed a device's random numbers."""
    ltc.manual_seed(seed, device)


def set_custom_compile_options(options: dict[str, Any]) -> None:
    """Does nothing: they are XLA's."""


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Call `fn(rank, *args)`: here in a process of a job, else in new processes, as `xmp.spawn` does."""
    if "WORLD_SIZE" in os.environ:
        fn(ltd.get_local_ordinal(), *args)
    else:
        ltd.spawn(fn, args, nprocs=1 if debug_single_process else None, start_method=start_method)


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: dict[str, Any] | None = None,
) -> Any:
    """Make a function, or a block, one step: cut before and after it. Inside, ops are recorded in eager mode, too.

    Args:
        full_graph: raise at the line inside that would cut the graph. Code that catches the error goes on recording.
        name: what reports of PT_XLA_DEBUG call the graph; by default as the function is called.
        custom_compile_options: accepted.
        max_different_graphs: raise if there are more graphs, which differ by their ops or the shapes of these. All
            uses of a function count together.

    Raises:
        RuntimeError: see above; the texts are torch_xla's.
    """
    graphs = None if max_different_graphs is None else DifferentGraphs(f, max_different_graphs)
    block = _Compiled(full_graph, graphs, name or str(getattr(f, "__name__", "")))
    if f is None:
        return block
    function = f

    def call(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _openxla() -> Iterator[None]:
    """Around a call of what `torch.compile(..., backend="openxla")` returned, with tensors of the device.

    In eager mode its ops are one graph. A call that reads or replaces marked buffers is run at its end, and gets them.
    """
    if is_eager_mode():
        with compile(name="openxla"):
            yield
        return
    is_used = buffer_donors.watch()
    yield
    if is_used():
        xla_model.mark_step(reset_scope=False)


AROUND["openxla"] = _openxla

_CLEARING = "torch_xla.compile clear the pending graph prior calling the target function"


class _Compiled(contextlib.ContextDecorator):
    def __init__(self, full_graph: bool, graphs: DifferentGraphs | None, name: str) -> None:
        self._full_graph, self._graphs, self._name = full_graph, graphs, name
        # Eager mode and whether ops may run, before each entry: a function may call itself.
        self._entered: list[tuple[bool, bool]] = []

    def __enter__(self) -> None:
        with compiling(f"{self._name}_clear_pending" if self._name else "", _CLEARING):
            ltc.mark_step()
        self._entered.append((is_eager_mode(), _XLAC._get_allow_execution()))
        eager_mode(False)
        _XLAC._set_allow_execution(not self._full_graph)

    def __exit__(self, *exc: Any) -> None:
        was_eager, may_execute = self._entered.pop()
        _XLAC._set_allow_execution(may_execute)
        ops = recorded_ops() if self._graphs is not None else ()
        try:
            with compiling(self._name, "torch_xla.compile"):
                ltc.mark_step()
        finally:
            eager_mode(was_eager)
        if exc[0] is None and self._graphs is not None:
            self._graphs.add(ops)
