"""PyTorch's database of operators in the tiers of the compiler: `python -m tests.nets.run_opinfo` (make test-opinfo).

Each operator, with its first samples in float32 (`--dtype`: another) and its gradients, beside eager. In the tier
`compiled` many operators are one graph, which is one compile; each batch has a child process, and one that dies is
halved until the operator is found. Op by op is tests/core/ops/test_opinfo.py, with all samples. What is left out
stands in `SKIPPED_IN`, with its reason; a row that is not needed any more is an error.
"""

import argparse
import contextlib
import fnmatch
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import ltc_core as ltc
from ltc_core import metrics
from tests.core.ops.test_opinfo import OPS, SKIPPED, on, to_cpu
from tests.nets.tiers import tier
from tests.seed import rotating, seed

__all__ = ["SKIPPED_IN", "check", "main"]

SAMPLES = 2
BATCHES = {"lowered": 100, "compiled": 30}
HANG_S = 1800
# How far results may be from eager's; for other dtypes what torch.testing allows.
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}

# Operators that a tier leaves out, each with its reason.
SKIPPED_IN: dict[str, dict[str, str]] = {"lowered": {}, "compiled": {}}


def _calls(name: str, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    """The operator and its first samples that eager takes, each with eager's answer."""
    op = OPS[name]
    if dtype not in op.supported_dtypes("cpu"):
        if dtype is not torch.float32:
            return
        dtype = torch.int64
    with_grad = dtype.is_floating_point and dtype in op.supported_backward_dtypes("cpu")
    samples = op.sample_inputs("cpu", dtype, requires_grad=with_grad)
    for sample in itertools.islice(samples, SAMPLES):
        with contextlib.suppress(Exception):
            yield sample, to_cpu(_call(op, sample, "cpu"))


def _call(op: Any, sample: Any, device: str) -> Any:
    """Results and gradients, not yet read."""
    args, kwargs = tree_map(on(device), ((sample.input, *sample.args), dict(sample.kwargs)))
    if "device" in kwargs:
        kwargs["device"] = device
    torch.manual_seed(0)
    result = op(*args, **kwargs)
    outs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    ins = [
        t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    grads = None
    if outs and ins:
        total = sum((t.abs() if t.is_complex() else t).double().sum() for t in outs)
        grads = torch.autograd.grad(total, ins, allow_unused=True)
    return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, (result, grads))


def check(names: Sequence[str], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Which operators differ from eager in the current tier, recorded one after the other, and how."""
    found: dict[str, str] = {}
    answers: list[tuple[str, Any, Any]] = []
    for name in names:
        try:
            for sample, expected in _calls(name, dtype):
                answers.append((name, _call(OPS[name], sample, ltc.settings.device_name), expected))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):
        ltc.mark_step(wait=True)
    for name, got, expected in answers:
        try:
            _compare(to_cpu(got), expected, dtype)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):
        ltc.wait_device_ops()
    return found


def _compare(got: Any, expected: Any, dtype: torch.dtype) -> None:
    """Raise if they differ; floats of eight bits by a single bit."""
    narrow = any(
        isinstance(t, torch.Tensor) and t.is_floating_point() and t.itemsize == 1
        for t in tree_leaves(expected)
    )
    tolerance = {"rtol": 0.0, "atol": 0.0} if narrow else TOLERANCES.get(dtype, {})
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)


def _work(names: Sequence[str], chosen: str, dtype: torch.dtype) -> int:
    """Check a batch; where its graph fails as a whole, each operator by itself."""
    warnings.simplefilter("ignore")
    with tier(chosen):
        found = check(names, dtype)
        if metrics.counter_value("CompileRefused"):
            print("@refused", flush=True)
        for name, what in found.items():
            if len(names) > 1:
                what = check([name], dtype).get(name, "")
            if what:
                print(f"operator {name}: {what}\n", flush=True)
    print("@over", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.nets.run_opinfo")
    parser.add_argument("names", nargs="*", default=["*"], help="names or patterns (default: all)")
    parser.add_argument("--tier", choices=list(BATCHES), default="compiled")
    parser.add_argument(
        "--share", type=int, default=1, help="only one SHARE-th, another one for each seed"
    )
    parser.add_argument(
        "--dtype", default="float32", help="of the samples, such as bfloat16 or int64"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return _work(args.names, args.tier, getattr(torch, args.dtype))
    names = [n for n in OPS if any(fnmatch.fnmatch(n, p) for p in args.names) and n not in SKIPPED]
    names = rotating(names, args.share) if args.share > 1 else names
    skipped = SKIPPED_IN[args.tier]
    print(f"{len(names)} operators, {args.tier}, {args.dtype}, seed {seed()}", flush=True)
    options = ["--tier", args.tier, "--dtype", args.dtype]
    failed: set[str] = set()
    chosen = [n for n in names if n not in skipped]
    size = BATCHES[args.tier]
    for k in range(0, len(chosen), size):
        failed |= _run_child(chosen[k : k + size], options)
    for name in skipped.keys() & set(names):
        if not _run_child([name], options):
            print(f"operator {name}: it is as eager, and need not be skipped", flush=True)
            failed.add(name)
    print(
        f"{len(failed)} operators differ: {sorted(failed)}" if failed else "all as eager",
        flush=True,
    )
    return 1 if failed else 0


def _run_child(names: list[str], options: list[str]) -> set[str]:
    """The operators of a batch that differ. A batch that dies, or whose graph stays op by op, is halved."""
    out, code = _child(names, options)
    is_over, is_refused = code == 0 and "@over\n" in out, "@refused\n" in out
    if len(names) > 1 and (is_refused or not is_over):
        half = len(names) // 2
        return _run_child(names[:half], options) | _run_child(names[half:], options)
    if not is_over:
        print(f"operator {names[0]}: it ends its process with {code}\n", flush=True)
        return set(names)
    lines = [line for line in out.splitlines() if not line.startswith("@")]
    if is_refused:
        lines.append(f"note: {names[0]} stays op by op")
    print("".join(f"{line}\n" for line in lines), end="", flush=True)
    return {line.split()[1].rstrip(":") for line in lines if line.startswith("operator ")}


def _child(names: list[str], options: list[str]) -> tuple[str, int]:
    """What the child process of a batch prints, and its exit code."""
    command = [sys.executable, "-m", "tests.nets.run_opinfo", *options, "--child", *names]
    environment = {**os.environ, "LTC_COMPILE": "off"}
    try:
        child = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=HANG_S
        )
    except subprocess.TimeoutExpired as error:
        return str(error.stdout or ""), -1
    return child.stdout, child.returncode


if __name__ == "__main__":
    sys.exit(main())
