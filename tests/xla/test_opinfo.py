"""PyTorch's own database of operators on torch_xla's PJRT, here its CPU client, beside eager: values and gradients.

Every operator in float32 forward and backward, and in int64 forward with fewer samples; each sample is a compile of
XLA. Ops that torch_xla does not lower run on the host and are checked as well. `tests/nets/opinfo.py` has what is
compared, and what is skipped on every executor.
"""

import pytest
import torch

from tests.nets import opinfo
from tests.nets.opinfo import OPS, check

pytestmark = pytest.mark.timeout(300)  # hundreds of compiles for some

SAMPLES = {torch.float32: 12, torch.int64: 3}
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
@pytest.mark.parametrize("name", [n for n in OPS if n not in opinfo.SKIPPED | SKIPPED])
def test_values_and_gradients_are_eagers(name: str) -> None:
    samples = {
        dtype: n for dtype, n in SAMPLES.items() if dtype is torch.float32 or name not in TIES
    }
    # The first sample is run again: the second time its program is only launched.
    share = opinfo.Share(samples, repeated=1, times=2, atol=TOLERANCES.get(name))
    assert check([name], share) == {}


def test_what_is_named_here_exists() -> None:
    named = {*SKIPPED, *TIES, *TOLERANCES}
    assert named <= set(OPS)
    assert len(SKIPPED) < 0.01 * len(OPS)
