"""PyTorch's own database of operators on XLA through JAX, beside eager: values and gradients.

A tenth of it, another one for each commit; OPINFO=all runs all. An operator's samples are one graph: each graph is
a compile. Ops without a rule run on the host and are checked as well.
"""

import os

import pytest
import torch

from tests.nets import opinfo
from tests.nets.opinfo import OPS, check
from tests.seed import rotating

pytestmark = pytest.mark.timeout(300)

SAMPLES = {torch.float32: 8, torch.int64: 3}
SAMPLES_OF_BFLOAT16 = 3
SKIPPED = {
    "linalg.eigh": "an eigenvector may have either sign",
    "svd_lowrank": "as linalg.eigh, for singular vectors",
    "native_batch_norm": "in evaluation eager's CPU gives no statistics and other devices do; this one does",
}
TIES = {
    "kthvalue": "which of equal numbers it names is not defined",
    "topk": "as kthvalue",
    "argsort": "as kthvalue: eager's sort is not stable on every CPU",
    "sort": "as argsort",
}
# Absolute tolerance for gradients that are differences of large numbers.
TOLERANCES = {
    "native_layer_norm": 1e-4,
    "nn.functional.layer_norm": 1e-4,
    "nn.functional.scaled_dot_product_attention": 5e-4,
}
# The same for bfloat16, where eager's kernel rounds once and ours after each op, or the other way.
TOLERANCES_OF_BFLOAT16 = {"addbmm": 0.5, "linalg.cross": 0.1, "nn.functional.avg_pool2d": 0.1}
NAMES = [n for n in OPS if n not in opinfo.SKIPPED | SKIPPED]
CHOSEN = NAMES if os.environ.get("OPINFO") == "all" else rotating(NAMES, 10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHOSEN)
def test_values_and_gradients_are_eagers(name: str) -> None:
    samples = {
        dtype: n for dtype, n in SAMPLES.items() if dtype.is_floating_point or name not in TIES
    }
    share = opinfo.Share(samples, atol=TOLERANCES.get(name), is_together=True)
    assert check([name], share) == {}
    if name not in TIES:
        atol = TOLERANCES_OF_BFLOAT16.get(name)
        assert (
            check(
                [name],
                opinfo.Share({torch.bfloat16: SAMPLES_OF_BFLOAT16}, atol=atol, is_together=True),
            )
            == {}
        )


def test_what_is_named_here_exists() -> None:
    named = {*SKIPPED, *TIES, *TOLERANCES, *TOLERANCES_OF_BFLOAT16}
    assert named <= set(OPS)
    assert len(SKIPPED) < 0.01 * len(OPS)
