"""How each peer trains: its device, what it compiles, how a step ends, how to wait for it.

A row of `PEERS` imports what its peer needs and returns a `Peer`; nothing else is imported, so that
each peer runs in an environment that has only itself, and what its import takes can be measured.
What is asked of the runtime measured (is it compiling, how long do its programs run) is asked here
and nowhere else. Next: training.py.
"""

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


def _nothing() -> None:
    pass


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


@dataclass(frozen=True)
class Peer:
    """What the training loop asks of a peer.

    `cut` ends a step, `settle` blocks until the device is idle. `compile` is applied to the loss
    of a batch and to the optimizer's step. `wait_compiler` blocks until nothing is compiled in the
    background, so many seconds at most, and returns whether that is so; `is_compiled` tells whether
    the step now runs compiled. `execute_s` is the time the device spent on programs so far, 0 where
    that is not known. `counts` are what was compiled and moved so far, empty where nobody counts.
    """

    device: torch.device
    settle: Callable[[], object]
    cut: Callable[[], object] = _nothing
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is
    wait_compiler: Callable[[float], bool] = lambda timeout_s: True
    is_compiled: Callable[[], bool] = lambda: True
    execute_s: Callable[[], float] = lambda: 0.0
    counts: Callable[[], dict[str, int]] = dict
    versions: dict[str, str] = field(default_factory=dict)


def _versions(hardware: str, *packages: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found |= {name: importlib.metadata.version(name) for name in packages}
    return found | ({"gpu": torch.cuda.get_device_name()} if hardware == "cuda" else {})


# ---- PyTorch -------------------------------------------------------------------------------------


def _eager(hardware: str) -> Peer:
    settle = torch.cuda.synchronize if hardware == "cuda" else _nothing
    return Peer(torch.device(hardware), settle, versions=_versions(hardware))


def _compile(hardware: str) -> Peer:
    """The loss is compiled with the model, and the optimizer's step.

    On the MLP and the GPT of models.py a learning rate in a tensor and foreach=True took the same
    time within 2 %, the optimizer left as it is 6 to 30 % more.
    """
    eager = _eager(hardware)
    return Peer(eager.device, eager.settle, compile=torch.compile, versions=eager.versions)


def _lazy(hardware: str) -> Peer:
    """torch._lazy with its TorchScript backend; LTC_TS_CUDA=1 puts it on the GPU."""
    import torch._lazy
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()  # type: ignore[no-untyped-call]
    return Peer(
        torch.device("lazy"),
        torch._lazy.wait_device_ops,
        torch._lazy.mark_step,
        versions=_versions(hardware),
    )


# ---- other packages ------------------------------------------------------------------------------

_XLA_METRICS = {  # their samples are counted
    "compiles": "CompileTime",
    "sent": "TransferToDeviceTime",
    "fetched": "TransferFromDeviceTime",
}


def _xla(hardware: str) -> Peer:
    if hardware != "cpu":
        raise RuntimeError("torch_xla runs on the CPU only")
    torch_xla: Any = importlib.import_module("torch_xla")  # mypy's environment does not have it
    xm: Any = importlib.import_module("torch_xla.core.xla_model")
    versions = _versions(hardware, "torch_xla")
    return Peer(
        torch_xla.device(), xm.wait_device_ops, xm.mark_step, counts=_xla_counts, versions=versions
    )


def _xla_counts() -> dict[str, int]:
    """Ask the library that torch_xla and our executor for it share, so that both are counted alike."""
    library: Any = importlib.import_module("_XLAC")
    found = {name: library._xla_metric_data(metric) for name, metric in _XLA_METRICS.items()}
    return {name: data[0] if data else 0 for name, data in found.items()}


def _ltc(hardware: str) -> Peer:
    import ltc_core as ltc
    from ltc_core.settings import settings

    if settings.device != hardware:
        raise RuntimeError(f"the lazy device stands for {settings.device}, not for {hardware}")
    if hardware == "xla":  # compiles at the first run; a launch does not wait for what it started
        return _ltc_that_compiles_first(_ltc_xla_counts, _versions(hardware, "torch_xla"))
    return Peer(
        ltc.lazy_device(),
        ltc.wait_device_ops,
        ltc.mark_step,
        wait_compiler=_ltc_wait_compiler,
        is_compiled=_ltc_is_compiled,
        execute_s=_ltc_execute_s,
        counts=_ltc_counts,
        versions=_versions(hardware),
    )


def _ltc_on_jax(hardware: str) -> Peer:
    """Programs are compiled by XLA at their first run."""
    from ltc_core.settings import settings

    if hardware != "cpu" or settings.executor != "jax":
        raise RuntimeError(f"ltc runs on {settings.executor} and {hardware}, not on jax and cpu")
    return _ltc_that_compiles_first(_ltc_counts, _versions(hardware, "jax"))


def _ltc_that_compiles_first(
    counts: Callable[[], dict[str, int]], versions: dict[str, str]
) -> Peer:
    """ltc where a program is compiled before its first run."""
    import ltc_core as ltc

    return Peer(
        ltc.lazy_device(),
        ltc.wait_device_ops,
        ltc.mark_step,
        is_compiled=_ltc_is_compiled,
        counts=counts,
        versions=versions,
    )


def _ltc_wait_compiler(timeout_s: float) -> bool:
    from ltc_core.executors.inductor.compiler.service import service

    return service().wait_idle(timeout_s)


def _ltc_is_compiled() -> bool:
    """Look whether a program was swapped in: of the loop's graphs only that of the step comes back."""
    from ltc_core import metrics

    return bool(metrics.counter_value("CompiledProgram"))


def _ltc_execute_s() -> float:
    from ltc_core import metrics

    data = metrics.metric_data("ExecuteTime")
    return 0.0 if data is None else data[1] / 1e9


def _ltc_counts() -> dict[str, int]:
    from ltc_core import metrics

    counters = {"programs": "CompiledProgram", "graphs": "UncachedCompile"}
    return {name: metrics.counter_value(counter) or 0 for name, counter in counters.items()}


def _ltc_xla_counts() -> dict[str, int]:
    return _xla_counts() | _ltc_counts()


PEERS: dict[str, Callable[[str], Peer]] = {
    "eager": _eager,
    "compile": _compile,
    "lazy": _lazy,
    "xla": _xla,
    "ltc": _ltc,
    "jax": _ltc_on_jax,
}
