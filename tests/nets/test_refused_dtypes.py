"""PyTorch's operators on dtypes that eager refuses: a tenth of them, other ones for each commit."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import ltc_core as ltc
from tests.core.ops.test_opinfo import OPS, SKIPPED, on, to_cpu
from tests.seed import rotating

DTYPES = (
    torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.uint8, torch.int32,
)  # fmt: skip
SHARE = 10
SAMPLES = 4

# Operators that take more dtypes on the device, each with its reason.
WIDER = {"histc": "whole numbers are counted as CUDA counts them"}


def refused(name: str) -> Iterator[tuple[Any, Any, Exception]]:
    """Arguments that eager refuses for their dtype, and what it raises."""
    op = OPS[name]
    taken = op.supported_dtypes("cpu")
    made = next(
        (t for t in (torch.float32, torch.int64, torch.complex64, torch.bool) if t in taken), None
    )
    if made is None:  # of narrow floats alone
        return
    samples = list(itertools.islice(op.sample_inputs("cpu", made), SAMPLES))
    for dtype, sample in itertools.product(DTYPES, samples):
        if dtype in taken:
            continue
        given = ((sample.input, *sample.args), dict(sample.kwargs))
        args, kwargs = tree_map(lambda t, d=dtype, m=made: _cast(t, m, d), given)
        try:
            op(*args, **kwargs)
        except Exception as error:
            yield args, kwargs, error


def _cast(item: Any, made: torch.dtype, dtype: torch.dtype) -> Any:
    if isinstance(item, torch.Tensor) and item.dtype is made:
        return item.detach().to(dtype)
    return item


def test_what_eager_refuses_is_refused() -> None:
    found: dict[str, str] = {}
    count = 0
    names = [n for n in OPS if n not in SKIPPED and n not in WIDER and "sparse" not in n]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in rotating(names, SHARE):
            for args, kwargs, expected in refused(name):
                count += 1
                what = outcome(name, args, kwargs)
                if not isinstance(what, type(expected)):
                    dtypes = {t.dtype for t in tree_leaves((args, kwargs)) if hasattr(t, "dtype")}
                    found[name] = (
                        f"{dtypes}: eager raises {expected!r:.100}, the device {what!r:.100}"
                    )
    assert not found, found
    assert count > 50


def outcome(name: str, args: Any, kwargs: Any) -> Any:
    device = ltc.settings.device_name
    args, kwargs = tree_map(on(device), (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = device
    try:
        return to_cpu(OPS[name](*args, **kwargs))
    except Exception as error:
        return error
