"""PyTorch's database of operators beside eager, in a tier: `python -m tests.nets.opinfo --tier compiled`.

`check` runs operators with the samples that PyTorch gives for them, and compares results, gradients and refusals;
`SHARES` says how many samples a tier takes. `wrong_calls` and `refused_dtypes` compare what eager refuses. Op by op
each sample is read before the next. In the tiers of the compiler many operators are one graph, which is one compile.

The command runs each batch in a child process, and halves one that dies until the operator is found (make
test-opinfo). What is left out stands in a table with its reason; a row that is not needed any more is an error.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import itertools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import ltc_core as ltc
from ltc_core import metrics
from tests.core.beside_eager import Raised, attempt, difference, on_cpu
from tests.nets.tiers import tier
from tests.seed import rotating, rotating_seed, seed

__all__ = [
    "LATER", "OPS", "SHARES", "SKIPPED", "SKIPPED_IN", "WIDER", "Share", "check", "main", "refused_dtypes",
    "wrong_calls",
]  # fmt: skip

HANG_S = 1800


@dataclasses.dataclass(frozen=True)
class Share:
    """What is run of each operator.

    Args:
        samples: the most samples, for each dtype that the operator takes.
        repeated: how many of them are run `times` times.
        atol: how far results may be from eager's, where that is not the rule of the dtype.
        is_together: the operators are recorded one after the other, and read at the end, without what eager refuses.
        batch: operators of a child process.
        rotation: only one in so many of an operator's samples, others for each commit.
    """

    samples: Mapping[torch.dtype, int]
    repeated: int = 0
    times: int = 1
    atol: float | None = None
    is_together: bool = False
    batch: int = 60
    rotation: int = 1


SHARES = {
    # The third time, what was recorded is followed without Python.
    "ops": Share({torch.float32: 12, torch.int64: 12}, repeated=2, times=3),
    "at_once": Share({torch.float32: 12, torch.int64: 12}, repeated=2, times=3),
    "lowered": Share({torch.float32: 2}, is_together=True, batch=100),
    "compiled": Share({torch.float32: 2}, is_together=True, batch=30),
}
# How far results may be from eager's; for other dtypes what torch.testing allows.
TOLERANCES = {
    torch.float32: (1e-4, 2e-5),
    torch.int64: (1e-4, 2e-5),  # of operators that give floats
    torch.float64: (1e-10, 1e-12),
    torch.bfloat16: (2e-2, 1e-2),
}
# What operators that do not take a dtype are asked for.
REFUSED_DTYPES = (
    torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.uint8, torch.int32,
)  # fmt: skip
REFUSED_SAMPLES = 4

SKIPPED = {
    "empty": "what is in memory that nobody wrote is not defined",
    "empty_like": "as empty",
    "empty_permuted": "as empty",
    "empty_strided": "as empty",
    "new_empty": "as empty",
    "new_empty_strided": "as empty",
    "as_strided.partial_views": "its samples see memory outside the tensor, which a move to a device leaves behind",
    "sparse.mm.reduce": "its operand is a sparse tensor; the device holds strided ones",
    "tensor_split": "wants its index tensor on the CPU, as on other devices",
    "to_sparse": "its result is a sparse tensor; the device holds strided ones",
}

# Operators that a tier leaves out as well, each with its reason.
SKIPPED_IN: dict[str, dict[str, str]] = {"ops": {}, "at_once": {}, "lowered": {}, "compiled": {}}

# Errors that depend on values come at the next sync, and operands that overlap in memory are no error here (they are
# values); both are tested elsewhere.
LATER = {
    "multinomial": "values", "scatter": "values", "scatter_add": "values", "gather": "values and overlap",
    "gradient": "one of its samples mixes in the device `meta`", "cat": "overlap", "take": "overlap",
    "masked_select": "overlap", "kthvalue": "overlap", "index_select": "overlap", "bernoulli": "overlap",
    "aminmax": "overlap of the two out=, which torch 2.15 refuses",
    **dict.fromkeys(
        ("uniform", "cauchy", "exponential", "geometric", "log_normal"),
        "the parameters are numbers, which are inputs of the graph",
    ),
    "complex": "the dtype of out=", "as_strided_scatter": "bounds of memory a move leaves behind",
}  # fmt: skip

# Operators that take more dtypes on the device, each with its reason.
WIDER = {"histc": "whole numbers are counted as CUDA counts them"}


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


OPS: dict[str, Any] = {name_of(op): op for op in op_db}


# -- one call --------------------------------------------------------------------------------------


def _moved(tree: Any, device: str) -> Any:
    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.detach().to(device).requires_grad_(item.requires_grad)
        return torch.device(device) if isinstance(item, torch.device) else item

    return tree_map(move, tree)


def _arguments(sample: Any) -> Any:
    return (sample.input, *sample.args), dict(sample.kwargs)


def _call(op: Any, arguments: Any, device: str) -> Any:
    """Results and gradients, not yet read."""
    args, kwargs = _moved(arguments, device)
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
        grads = torch.autograd.grad(total, ins, allow_unused=True)  # type: ignore[arg-type]
    return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, (result, grads))


def _here(op: Any, arguments: Any) -> Any:
    return _call(op, arguments, ltc.settings.device_name)


# -- samples that PyTorch gives --------------------------------------------------------------------


class _Case(NamedTuple):
    name: str
    which: str
    arguments: Any
    times: int
    expected: Any  # eager's outcome
    tolerance: tuple[float | None, float | None]

    def difference(self, got: Any) -> str:
        """How an outcome of the device differs; floats of eight bits may differ by no bit."""
        is_narrow = any(
            isinstance(t, torch.Tensor) and t.is_floating_point() and t.itemsize == 1
            for t in tree_leaves(self.expected)
        )
        what = difference(got, self.expected, *((0.0, 0.0) if is_narrow else self.tolerance))
        return what and f"{self.which}: {what}"


def _cases(name: str, share: Share) -> Iterator[_Case]:
    op = OPS[name]
    taken = op.supported_dtypes("cpu")
    samples = {dtype: count for dtype, count in share.samples.items() if dtype in taken}
    if not samples and torch.float32 in share.samples and torch.int64 in taken:
        samples = {torch.int64: share.samples[torch.float32]}
    for dtype, most in samples.items():
        with_grad = dtype.is_floating_point and op.supports_autograd
        if share.is_together:
            with_grad = with_grad and dtype in op.supported_backward_dtypes("cpu")
        rtol, atol = TOLERANCES.get(dtype, (None, None))
        found = op.sample_inputs("cpu", dtype, requires_grad=with_grad)
        numbered = list(enumerate(itertools.islice(found, most)))
        if len(numbered) >= share.rotation:
            numbered = numbered[rotating_seed() % share.rotation :: share.rotation]
        for number, sample in numbered:
            arguments = _arguments(sample)
            expected = attempt(_call, op, arguments, "cpu")
            if isinstance(expected, Raised) and share.is_together:
                continue  # a sample eager itself refuses, such as a gradient it does not have
            times = share.times if number < share.repeated else 1
            tolerance = rtol, atol if share.atol is None else share.atol
            yield _Case(name, f"{dtype}, sample {number}", arguments, times, expected, tolerance)


def check(names: Sequence[str], share: Share) -> dict[str, str]:
    """Which operators differ from eager in the current tier, and how."""
    found: dict[str, str] = {}
    unread: list[tuple[_Case, Any]] = []
    for name in names:
        for case in _cases(name, share):
            if share.is_together:
                try:
                    unread.append((case, _here(OPS[name], case.arguments)))
                except Exception as error:
                    found[name] = case.difference(Raised(error))
                continue
            for _ in range(case.times):
                what = case.difference(attempt(_here, OPS[name], case.arguments))
                if what:
                    found[name] = what
    if share.is_together:
        with contextlib.suppress(Exception):
            ltc.mark_step(wait=True)
    for case, result in unread:
        what = case.difference(attempt(on_cpu, result))
        if what:
            found[case.name] = what
    if share.is_together:
        with contextlib.suppress(Exception):
            ltc.wait_device_ops()
    return found


# -- what eager refuses ----------------------------------------------------------------------------


def wrong_calls(name: str) -> str:
    """How the error of a call that PyTorch's database calls wrong differs from eager's; "" if it is raised at once."""
    op = OPS[name]
    for wrong in op.error_inputs("cpu"):
        arguments = _arguments(wrong.sample_input)
        expected = _refusal(op, arguments)
        if expected is None:
            continue
        got = _refusal(op, _moved(arguments, ltc.settings.device_name))
        what = difference(got, expected)
        if got is not None and not re.search(wrong.error_regex, got.text):
            what = f"the device raises {got!r}, not {wrong.error_regex!r}"
        if what:
            return what
    return ""


def _refusal(op: Any, arguments: Any) -> Raised | None:
    args, kwargs = arguments
    try:
        op(*args, **kwargs)
    except Exception as error:
        return Raised(error)
    return None


def refused_dtypes(name: str) -> tuple[int, str]:
    """How many calls eager refuses for the dtypes of their operands, and how the device differs in one of them."""
    op = OPS[name]
    taken = op.supported_dtypes("cpu")
    from_dtypes = (torch.float32, torch.int64, torch.complex64, torch.bool)
    made = next((dtype for dtype in from_dtypes if dtype in taken), None)
    if made is None:  # of narrow floats alone
        return 0, ""
    count, found = 0, ""
    samples = list(itertools.islice(op.sample_inputs("cpu", made), REFUSED_SAMPLES))
    for dtype, sample in itertools.product(REFUSED_DTYPES, samples):
        if dtype in taken:
            continue
        args, kwargs = tree_map(lambda t, d=dtype: _cast(t, made, d), _arguments(sample))
        expected = _refusal(op, (args, kwargs))
        if expected is None:
            continue
        count += 1
        if "device" in kwargs:
            kwargs["device"] = ltc.settings.device_name
        args, kwargs = _moved((args, kwargs), ltc.settings.device_name)
        what = difference(attempt(lambda a=args, k=kwargs: op(*a, **k)), expected)
        if what:
            dtypes = {t.dtype for t in tree_leaves((args, kwargs)) if hasattr(t, "dtype")}
            found = f"{dtypes}: {what:.250}"
    return count, found


def _cast(item: Any, made: torch.dtype, dtype: torch.dtype) -> Any:
    if isinstance(item, torch.Tensor) and item.dtype is made:
        return item.detach().to(dtype)
    return item


# -- the command -----------------------------------------------------------------------------------


def _work(names: Sequence[str], chosen: str, share: Share) -> int:
    """Check a batch; where its graph fails as a whole, each operator by itself."""
    warnings.simplefilter("ignore")
    with tier(chosen):
        found = check(names, share)
        if metrics.counter_value("CompileRefused"):
            print("@refused", flush=True)
        for name, what in found.items():
            if share.is_together and len(names) > 1:
                what = check([name], share).get(name, "")
            if what:
                print(f"operator {name}: {what}\n", flush=True)
        for name in names if chosen == "ops" else ():
            wrong = OPS[name].error_inputs_func and OPS[name].name not in LATER
            refused = name not in WIDER and "sparse" not in name
            for what in (
                wrong_calls(name) if wrong else "",
                refused_dtypes(name)[1] if refused else "",
            ):
                if what:
                    print(f"operator {name}: {what}\n", flush=True)
    print("@over", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.nets.opinfo")
    parser.add_argument("names", nargs="*", default=["*"], help="names or patterns (default: all)")
    parser.add_argument("--tier", choices=list(SHARES), default="compiled")
    parser.add_argument(
        "--share", type=int, default=1, help="only one SHARE-th, another one for each seed"
    )
    parser.add_argument("--dtype", help="of the samples, such as bfloat16 (default: of the tier)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    share = SHARES[args.tier]
    if args.dtype:
        most = max(share.samples.values())
        share = dataclasses.replace(share, samples={getattr(torch, args.dtype): most})
    if args.child:
        return _work(args.names, args.tier, share)
    names = [n for n in OPS if any(fnmatch.fnmatch(n, p) for p in args.names) and n not in SKIPPED]
    names = rotating(names, args.share) if args.share > 1 else names
    skipped = SKIPPED_IN[args.tier]
    dtypes = [str(dtype) for dtype in share.samples]
    print(f"{len(names)} operators, {args.tier}, {dtypes}, seed {seed()}", flush=True)
    options = ["--tier", args.tier, *(["--dtype", args.dtype] if args.dtype else [])]
    failed: set[str] = set()
    chosen = [n for n in names if n not in skipped]
    for k in range(0, len(chosen), share.batch):
        failed |= _run_child(chosen[k : k + share.batch], options)
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
    command = [sys.executable, "-m", "tests.nets.opinfo", *options, "--child", *names]
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
