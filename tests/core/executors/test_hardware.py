"""What the graphs of a device run on.

A GPU is rarely at hand, so most of this file looks at where values lie: PyTorch's device `meta` computes nothing, and
refuses, as a GPU does, to work with a tensor of the CPU. With a GPU the last tests train on it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ltc_core as ltc
from ltc_core.device.hardware import hardware
from ltc_core.errors import DeviceError
from ltc_core.executors.inductor.executor import InductorExecutor
from ltc_core.executors.reference import program
from ltc_core.executors.reference.executor import ReferenceExecutor
from ltc_core.graph.ir import Graph
from ltc_core.ops import backward
from ltc_core.record import random_state
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
        with pytest.raises(
            DeviceError, match="finds no GPU"
        ):  # a seed is set before the first tensor is made
            random_state.generator()


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


class TestOnAGpu:
    """What is recorded and made for a GPU, none of which runs here."""

    @pytest.fixture(autouse=True)
    def a_gpu(self) -> Iterator[None]:
        ltc.wait_device_ops()
        with settings.override(device="cuda"):
            yield
        context(0).trace.forget()

    @pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
    def test_attention_is_the_kernel_of_a_gpu(self, mask: torch.dtype | None) -> None:
        q = torch.ones(2, 4, 10, 32, device="ltc", requires_grad=True)
        of = None if mask is None else torch.ones(10, 10, device="ltc").to(mask)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=of)
        out.sum().backward()
        assert out.shape == q.shape
        text = ltc.dump_ir(q.grad)
        assert "efficient_attention_backward" in text and "_for_cpu" not in text

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_attention_of_other_operands_is_taken_apart(self, dtype: torch.dtype) -> None:
        q = torch.ones(
            2, 4, 10, 33, device="ltc", dtype=dtype
        )  # rows of 33 numbers are not aligned
        assert "efficient" not in ltc.dump_ir(
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        )

    def test_backward_of_pytorchs_own_gpu_tensors_says_what_is_in_the_way(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backward, "_is_on_cuda", lambda outputs: True)
        with pytest.raises(DeviceError, match="'cuda' is not possible(?s:.*)LTC_DEVICE=cuda"):
            torch.ones(2, requires_grad=True).sum().backward()

    def test_no_program_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(program, "_generator", lambda hardware: torch.Generator())
        made = InductorExecutor(torch.device("cuda", 0)).compile(Graph((), {}, ()))
        assert type(made) is program.ReferenceProgram


TRAIN = """
import torch
from tests.core.models import Run

def losses(device, after_step=None):
    trained = Run("{model}", "adamw", device)
    if after_step:
        trained.after_step = after_step
    return [float(loss) for loss in trained.train(12).losses]

eager = losses(torch.device("cuda"))  # first: with ltc PyTorch's autograd serves its device alone
import ltc_core as ltc
ours = losses(ltc.lazy_device(), ltc.mark_step)
torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-3, atol=1e-4)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("model", ["cnn", "mlp", "gpt", "resnet"])
def test_training_on_a_gpu_gives_the_losses_of_eager(model: str) -> None:
    run(TRAIN.replace("{model}", model), prelude="", LTC_DEVICE="cuda")
