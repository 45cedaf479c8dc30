"""The models of `benchmarks.breadth` on XLA through JAX: eager's losses, and hardly an op on the host.

A model's convolutions amplify the last bit of a float from step to step; its losses are compared less closely. Those of
a ResNet differ by 5 % after 20 steps of eager, too, if its weights differ by 1e-7 at first.
"""

import itertools
import os

import pytest
import torch

import ltc_core as ltc
from benchmarks.breadth_models import SUBJECTS
from tests.core.counting import Counting
from tests.seed import rotating

pytestmark = pytest.mark.timeout(300)

NUM_STEPS = 20
AMPLIFY = dict.fromkeys(("mnist", "convnext", "separable", "conv3d", "audio"), 1e-2)
AMPLIFY |= dict.fromkeys(("resnet", "resnet50"), 1e-1)
# Each step of these has sizes that the data decide: a graph for each, most of it on the host.
OF_MANY_GRAPHS = {"moe", "lbfgs"}
OF_MANY_SIZES = {"lengths"}
CHOSEN = list(SUBJECTS) if os.environ.get("MODELS") == "all" else rotating(list(SUBJECTS), 9)


def losses(name: str, device: str | torch.device) -> torch.Tensor:
    subject = SUBJECTS[name]
    batches = itertools.cycle(subject.batches(8))
    torch.manual_seed(5)
    step = subject.make_step(subject.module().to(device), lambda function: function)
    torch.manual_seed(2)
    found = []
    for _ in range(5 if name in OF_MANY_GRAPHS else NUM_STEPS):
        found.append(step(*(part.to(device) for part in next(batches))).detach())
        if device != "cpu":
            ltc.mark_step()
    return torch.stack([loss.cpu() for loss in found])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHOSEN)
def test_losses_are_those_of_eager(name: str) -> None:
    with Counting() as counted:
        found = losses(name, ltc.lazy_device())
    expected = losses(name, "cpu")
    torch.testing.assert_close(found, expected, rtol=AMPLIFY.get(name, 1e-4), atol=1e-5)
    if name not in OF_MANY_GRAPHS:
        assert len(counted.fallbacks) <= 1, counted.fallbacks
        assert counted.compiles <= 4 or name in OF_MANY_SIZES
