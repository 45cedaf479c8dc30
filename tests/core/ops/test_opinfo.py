"""PyTorch's own database of operators, run on the reference executor beside eager: values, gradients, errors.

Each operator with every sample PyTorch gives for it (at most `SAMPLES`), in float32 forward and backward and in
int64 forward. What is left out stands in `SKIPPED` with its reason; a test keeps that list short and true.
"""

import itertools
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import ltc_core as ltc

SAMPLES = 12
# The first samples are run several times: the third time, what was recorded is followed without Python.
REPEATED, TIMES = 2, 3
DTYPES = (torch.float32, torch.int64)

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

# Errors that depend on values come at the next sync, and operands that overlap in memory are no error here (they are
# values); both are tested elsewhere.
LATER = {
    "multinomial": "values", "scatter": "values", "scatter_add": "values", "gather": "values and overlap",
    "gradient": "one of its samples mixes in the device `meta`", "cat": "overlap", "take": "overlap",
    "masked_select": "overlap", "kthvalue": "overlap", "index_select": "overlap", "bernoulli": "overlap",
    **dict.fromkeys(
        ("uniform", "cauchy", "exponential", "geometric", "log_normal"),
        "the parameters are numbers, which are inputs of the graph",
    ),
    "complex": "the dtype of out=", "as_strided_scatter": "bounds of memory a move leaves behind",
}  # fmt: skip


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


OPS = {name_of(op): op for op in op_db}


def on(device: str) -> Any:
    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.detach().to(device).requires_grad_(item.requires_grad)
        return torch.device(device) if isinstance(item, torch.device) else item

    return move


def to_cpu(tree: Any) -> Any:
    return tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, tree)


def run(op: Any, sample: Any, device: str) -> Any:
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
    return to_cpu((result, grads))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in OPS if n not in SKIPPED])
def test_values_and_gradients_are_eagers(name: str) -> None:
    op = OPS[name]
    for dtype in DTYPES:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        with_grad = dtype is torch.float32 and op.supports_autograd
        samples = op.sample_inputs("cpu", dtype, requires_grad=with_grad)
        for k, sample in enumerate(itertools.islice(samples, SAMPLES)):
            try:
                expected = run(op, sample, "cpu")
            except (
                Exception
            ) as error:  # a sample eager itself refuses, such as a gradient it does not have
                with pytest.raises(Exception, match=".") as raised:
                    run(op, sample, ltc.settings.device_name)
                assert isinstance(raised.value, type(error))
                continue
            for _ in range(TIMES if k < REPEATED else 1):
                got = run(op, sample, ltc.settings.device_name)
                torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [n for n, op in OPS.items() if op.error_inputs_func and op.name not in LATER]
)
def test_wrong_calls_raise_what_eager_raises(name: str) -> None:
    op = OPS[name]
    for wrong in op.error_inputs("cpu"):
        sample = wrong.sample_input
        try:
            op(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:
            expected = error
        else:
            continue
        args, kwargs = tree_map(
            on(ltc.settings.device_name), ((sample.input, *sample.args), sample.kwargs)
        )
        with pytest.raises(type(expected), match=wrong.error_regex):
            op(*args, **kwargs)


def test_skipped_ops_exist_and_are_few() -> None:
    assert set(SKIPPED) <= set(OPS)
    assert len(SKIPPED) < 0.05 * len(OPS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in SKIPPED if "empty" not in n])
def test_what_is_skipped_is_not_as_eager(name: str) -> None:
    """A row that is not needed any more fails here."""
    op = OPS[name]
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64
    samples = list(itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES))
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        for sample in samples:
            expected = run(op, sample, "cpu")
            torch.testing.assert_close(run(op, sample, ltc.settings.device_name), expected)
