"""Compiles a request into a shared library with PyTorch's inductor. Used by `child`, in the compiler's process only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.lowering  # decompositions look it up there
from torch._guards import TracingContext, tracing
from torch._inductor import codecache
from torch._inductor.virtualized import V

from ltc_core.executors.inductor.compiler import kernels, shared_runtime
from ltc_core.executors.inductor.compiler.request import decode
from ltc_core.executors.inductor.lowering.lower import lower
from ltc_core.executors.inductor.lowering.own_memory_lowering import Lowerings
from ltc_core.executors.inductor.lowering.repairs import repaired

__all__ = ["OPTIONS", "build"]

OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    # The wrapper code runs once a step. To optimise it would take most of the compile time:
    # MLP of `benchmarks.peers`: 10.3 s with O0, 15.5 with O1, the same 1.4 ms a step.
    "aot_inductor.compile_wrapper_opt_level": "O0",
    # Else x.bfloat16().float() is x, and a chain of 16-bit ops is rounded at its end only, so that `(half * 100).int()`
    # differs from eager. The tracer marks the results to round: `lower` needs the option, too.
    "emulate_precision_casts": True,
    "cpp.dynamic_threads": True,  # else a run with more threads than at compile time writes out of bounds
    "size_asserts": False,  # checked before the launch
}

# To precompile PyTorch's headers takes 20 s of a core once, and saves 4.5 s of each program after it.
_MIN_PROGRAMS_FOR_HEADERS = 4

# Code that was made for one thread computes wrong numbers with more: each thread of a parallel region runs the loops in
# it that are not parallel. The script may set another number later.
_FEWEST_THREADS = 2
_LIBRARY = "model.so"
_KEPT = (".so", ".json", ".cubin")
_PROXY_EXECUTOR = ".wrapper.json"  # its table of the ATen ops that compiled code calls through it


def build(payload: bytes, directory: Path) -> dict[str, Any]:
    """Compile an encoded request into a library in `directory`.

    Returns:
        Name of the library, the outputs that it returns (`lower.Lowered.returned`), its kernel calls (`kernels.noted`).
    Raises:
        Refused: an op cannot be traced.
        AliasingError: the compiled code would return other memory than the plan counts on.
        Exception: any error of the compiler.
    """
    request = decode(payload)
    torch.set_num_threads(max(request.num_threads, _FEWEST_THREADS))
    request.flags.apply()
    lowerings = Lowerings()
    options = {
        **OPTIONS,
        "aot_inductor.output_path": str(directory / _LIBRARY),
        "aot_inductor.precompile_headers": _headers_pay(directory.parents[1]),
    }
    with inductor_config.patch(options):
        lowered = lower(request.subgraph, request.device)
    with (
        tracing(TracingContext(lowered.mode)),
        V.set_fake_mode(lowered.mode),
        V.set_aot_compilation(True),
        inductor_config.patch(options),
        repaired(),
        shared_runtime.shared(),
        kernels.noted() as calls,
    ):
        compiled = compile_fx.compile_fx_inner(
            lowered.module, lowered.fakes, cpp_wrapper=True, aot_mode=True
        )
    metas = request.subgraph.graph.metas()
    lowerings.check([metas[value] for value in lowered.returned])
    library = Path(str(getattr(compiled, "filename", compiled))).name
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name.endswith(_PROXY_EXECUTOR):
            path.rename((directory / library).with_suffix(".json"))  # where the loader expects it
        elif path.suffix not in _KEPT or "metadata" in path.name:
            path.unlink()
    return {"library": library, "returned": list(lowered.returned), "kernels": calls}


def _headers_pay(root: Path) -> bool:
    """Whether precompiled headers pay: there are some already, or many programs in the directory of the artifacts."""
    is_there = any(Path(codecache._HEADER_DIR).glob("*.[gp]ch"))
    return is_there or len(list(root.glob(f"*/{_LIBRARY}"))) >= _MIN_PROGRAMS_FOR_HEADERS
