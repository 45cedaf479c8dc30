"""The parity tests' models on XLA: how many programs XLA compiles, and what goes to the device and back in a step."""

import pytest
import torch

import ltc_core as ltc
from ltc_core.settings import settings
from tests.core.models import MODELS, OPTIMIZERS, Run
from tests.xla.library_counts import compiled_by_xla, transfers

HAVE_DROPOUT = {"cnn", "gpt"}
COUNT_THEIR_STEPS = {"adam", "adamw"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_loop_is_one_program_and_sends_its_batch(model: str, optimizer: str) -> None:
    so_far = [(compiled_by_xla(), *transfers())]

    def after_step() -> None:
        ltc.mark_step(wait=True)
        so_far.append((compiled_by_xla(), *transfers()))

    with settings.override(random="device"):
        Run(model, optimizer, ltc.lazy_device(), after_step).train(5)
    steps = torch.tensor(so_far).diff(dim=0).tolist()
    assert [compiles for compiles, _, _ in steps] == [1, 0, 0, 0, 0]
    assert [fetched for _, _, fetched in steps] == [0] * 5
    # The two tensors of a batch; one vector of numbers and random keys, where these change.
    changing = model in HAVE_DROPOUT or optimizer in COUNT_THEIR_STEPS
    assert [sent for _, sent, _ in steps[2:]] == [3 if changing else 2] * 3
