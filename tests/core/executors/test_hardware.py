"""What the graphs of a device run on.

A GPU is rarely at hand, so most of this file looks at where values lie: PyTorch's device `meta` computes nothing, and
refuses, as a GPU does, to work with a tensor of the CPU. With a GPU the last tests train on it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.errors import DeviceError
from ltc_core.executors.hardware import hardware
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.executors.reference.instruction import on_cpu
from ltc_core.runtime.devices import context
from ltc_core.runtime.program_cache import ProgramCache
from ltc_core.settings import settings
from tests.core.child import run
from tests.core.models import MODELS, Run

META = torch.device("meta")


def test_the_processor_unless_told_otherwise() -> None:
    assert hardware(0) == torch.device("cpu") and ltc.lazy_device_hw() == "CPU"


class TestGpu:
    """What is said and chosen, with PyTorch's answers made up."""

    @pytest.fixture(autouse=True)
    def two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with settings.override(device="cuda"):
            yield

    def test_each_device_has_its_own(self) -> None:
        assert [hardware(i) for i in range(2)] == [torch.device("cuda:0"), torch.device("cuda:1")]
        assert ltc.lazy_device_hw() == "CUDA"

    def test_each_process_begins_with_another_one(self) -> None:
        with settings.override(device_ordinal=1):
            assert hardware(0) == torch.device("cuda:1")

    def test_too_few(self) -> None:
        with pytest.raises(
            DeviceError, match=r":2 has no GPU of its own(?s:.*)GPU 2 wanted, 2 visible"
        ):
            hardware(2)

    def test_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(DeviceError, match="finds no GPU(?s:.*)unset LTC_DEVICE"):
            hardware(0)


def brought_from_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The lazy device, with graphs that run on `meta`."""
    ltc.wait_device_ops()
    executor = ReferenceExecutor(META)
    monkeypatch.setattr(context(0), "executor", executor)
    monkeypatch.setattr(context(0), "compiler", ProgramCache(executor))
    monkeypatch.setattr(torch.Tensor, "cpu", brought_from_meta)
    context(0).trace.forget()
    yield ltc.lazy_device()
    context(0).trace.forget()


def data_of(tensor: torch.Tensor) -> Any:
    return tensor._h.value.buffer.take()  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", MODELS)
def test_a_step_never_leaves_its_hardware(on_meta: torch.device, model: str) -> None:
    trained = Run(model, "adamw", on_meta)
    trained.after_step = ltc.mark_step
    trained.train(2)
    ltc.wait_device_ops()
    assert {data_of(p).device for p in trained.net.parameters()} == {META}


def test_numbers_are_drawn_on_the_cpu_and_brought_over() -> None:
    def drawn(size: list[int], generator: torch.Generator) -> torch.Tensor:
        return torch.rand(size, generator=generator)

    def in_place(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return t.uniform_(generator=generator)

    generator = torch.Generator().manual_seed(3)
    assert on_cpu(drawn, META)([2, 3], generator=generator).device == META
    t = torch.zeros(4)
    assert on_cpu(in_place, META)(t, generator=generator) is t and t.all()


TRAIN = """
import json, torch
import ltc_core as ltc
from tests.core.models import Run

def losses(device, after_step=None):
    trained = Run("{model}", "adamw", device)
    if after_step:
        trained.after_step = after_step
    return [float(loss) for loss in trained.train(12).losses]

ours = losses(ltc.lazy_device(), ltc.mark_step)
eager = losses(torch.device("cuda"))
torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-3, atol=1e-4)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("model", ["cnn", "mlp", "gpt", "resnet"])
@pytest.mark.parametrize("compile", ["off", "sync"])
def test_training_on_a_gpu_gives_the_losses_of_eager(model: str, compile: str) -> None:
    code = TRAIN.replace("{model}", model)
    run(code, prelude="", LTC_DEVICE="cuda", LTC_COMPILE=compile)
