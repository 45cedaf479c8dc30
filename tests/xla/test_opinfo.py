"""PyTorch's own database of operators on torch_xla's PJRT, here its CPU client, beside eager: values and gradients.

Every operator in float32 forward and backward, and in int64 forward with fewer samples; each sample is a compile of
XLA. Ops that torch_xla does not lower run on the host and are checked as well. `tests/core/ops/test_opinfo.py` has the
samples and what is skipped on every executor.
"""

import itertools

import pytest
import torch

import ltc_core as ltc
from tests.core.ops import test_opinfo as core

pytestmark = pytest.mark.timeout(300)  # hundreds of compiles for some

SAMPLES = {torch.float32: 12, torch.int64: 3}
# The first sample is run again: the second time its program is only launched.
TIMES = 2

SKIPPED = {
    "linalg.eigh": "an eigenvector may have either sign, and XLA chooses another than LAPACK",
    "svd_lowrank": "as linalg.eigh, for singular vectors",
    "native_batch_norm": "in evaluation eager's CPU gives no statistics and other devices do; this one does",
}
TIES = {
    "cummax": "which of equal numbers it names is not defined",
    "kthvalue": "as cummax",
    "topk": "as cummax",
}
# Absolute tolerance for gradients that are differences of large numbers.
TOLERANCES = {
    "native_layer_norm": 1e-4,
    "nn.functional.layer_norm": 1e-4,
    "nn.functional.scaled_dot_product_attention": 5e-4,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n in core.OPS if n not in core.SKIPPED | SKIPPED])
def test_values_and_gradients_are_eagers(name: str) -> None:
    op = core.OPS[name]
    for dtype, count in SAMPLES.items():
        if dtype not in op.supported_dtypes("cpu") or (dtype is torch.int64 and name in TIES):
            continue
        with_grad = dtype is torch.float32 and op.supports_autograd
        samples = op.sample_inputs("cpu", dtype, requires_grad=with_grad)
        for k, sample in enumerate(itertools.islice(samples, count)):
            try:
                expected = core.run(op, sample, "cpu")
            except Exception as error:  # a sample eager itself refuses
                with pytest.raises(type(error), match="."):
                    core.run(op, sample, ltc.settings.device_name)
                continue
            for _ in range(1 if k else TIMES):
                got = core.run(op, sample, ltc.settings.device_name)
                torch.testing.assert_close(
                    got, expected, equal_nan=True, rtol=1e-4, atol=TOLERANCES.get(name, 2e-5)
                )


def test_what_is_named_here_exists() -> None:
    named = {*SKIPPED, *TIES, *TOLERANCES}
    assert named <= set(core.OPS)
    assert len(SKIPPED) < 0.01 * len(core.OPS)
