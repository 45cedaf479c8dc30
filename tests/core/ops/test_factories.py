"""Tensors made on the device from nothing: one op each, of eager's dtype and values, none for `empty`."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core.errors import DeviceError, LtcError
from ltc_core.settings import settings
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting

Make = Callable[..., Tensor]

# name -> (what makes it, the op that is recorded)
ONE_OP: dict[str, tuple[Make, str]] = {
    "zeros": (lambda **kw: torch.zeros(2, 3, **kw), "zeros"),
    "zeros of a size": (lambda **kw: torch.zeros((2, 0, 3), **kw), "zeros"),
    "ones": (lambda **kw: torch.ones(2, 3, **kw), "ones"),
    "full bool": (lambda **kw: torch.full((2,), True, **kw), "full"),
    "full int": (lambda **kw: torch.full((2,), 7, **kw), "full"),
    "full float": (lambda **kw: torch.full((2,), 7.5, **kw), "full"),
    "full complex": (lambda **kw: torch.full((2,), 7j, **kw), "full"),
    "arange": (lambda **kw: torch.arange(5, **kw), "arange"),
    "arange float": (lambda **kw: torch.arange(5.0, **kw), "arange"),
    "arange from": (lambda **kw: torch.arange(2, 5, **kw), "arange"),
    "arange step": (lambda **kw: torch.arange(0, 6, 2.5, **kw), "arange"),
    "arange down": (lambda **kw: torch.arange(6, 0, -2, **kw), "arange"),
    "eye": (lambda **kw: torch.eye(3, **kw), "eye"),
    "eye wide": (lambda **kw: torch.eye(2, 4, **kw), "eye"),
    "linspace": (lambda **kw: torch.linspace(0, 1, 5, **kw), "linspace"),
    "logspace": (lambda **kw: torch.logspace(0, 1, 5, **kw), "logspace"),
    "tril_indices": (lambda **kw: torch.tril_indices(3, 4, 1, **kw), "tril_indices"),
    "triu_indices": (lambda **kw: torch.triu_indices(3, 4, -1, **kw), "triu_indices"),
    "scalar_tensor": (lambda **kw: torch.scalar_tensor(3.5, **kw), "scalar_tensor"),
    "randperm": (lambda **kw: torch.randperm(9, **kw), "randperm"),
}
# Made of several ops, some by PyTorch from tensors on the CPU.
OTHERS: dict[str, Make] = {
    "tensor": lambda **kw: torch.tensor([[1, 2], [3, 4]], **kw),
    "tensor of a number": lambda **kw: torch.tensor(3.5, **kw),
    "tensor of nothing": lambda **kw: torch.tensor([], **kw),
    "as_tensor": lambda **kw: torch.as_tensor([True, False], **kw),
    "as_tensor of numpy": lambda **kw: torch.as_tensor(numpy.arange(3), **kw),
    "asarray": lambda **kw: torch.asarray([1.0, 2.0], **kw),
    "rand": lambda **kw: torch.rand(3, **kw),
    "randn": lambda **kw: torch.randn(20, **kw),
    "randint": lambda **kw: torch.randint(3, 9, (5,), **kw),
    "normal": lambda **kw: torch.normal(1.0, 2.0, (5,), **kw),
    "hann_window": lambda **kw: torch.hann_window(5, **kw),
    "complex": lambda **kw: torch.view_as_complex(torch.ones(3, 2, **kw)),
    "cartesian": lambda **kw: torch.cartesian_prod(torch.arange(2, **kw), torch.arange(3, **kw)),
    "fftfreq": lambda **kw: torch.fft.fftfreq(5, **kw),
    "vander": lambda **kw: torch.vander(torch.arange(3.0, **kw)),
}


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


@pytest.mark.parametrize("name", ONE_OP)
def test_one_op_of_eagers_dtype_and_values(name: str, device: torch.device) -> None:
    make, op = ONE_OP[name]
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    with Counting() as counted:
        made = make(device=device)
        ltc.mark_step()
    assert made.dtype == expected.dtype and made.device == device
    assert counted.ops == {op: 1} and not counted.fallbacks
    assert_same(made, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    beside_eager(lambda device: OTHERS[name](device=device), rtol=1e-6)


@pytest.mark.parametrize("name", [*ONE_OP, *OTHERS])
def test_under_another_default_dtype(name: str) -> None:
    """A program that was recorded under one default dtype must not be taken for the same under another."""
    make = ONE_OP[name][0] if name in ONE_OP else OTHERS[name]

    def program(device: torch.device) -> Any:
        first = make(device=device)
        torch.set_default_dtype(torch.float64)
        try:
            return first, make(device=device)
        finally:
            torch.set_default_dtype(torch.float32)

    beside_eager(program, rtol=1e-6)


def test_zeros_of_autograd_have_memory(device: torch.device) -> None:
    """Forward mode asks for zeros without memory, which compiled code cannot read."""
    zeros = torch.ops.aten._efficientzerotensor((2, 3), dtype=torch.float64, device=device)
    assert zeros.dtype is torch.float64 and torch.equal(zeros.cpu(), torch.zeros(2, 3).double())
    assert zeros.add_(1).sum().item() == 6


class TestArguments:
    def test_dtypes(self) -> None:
        def program(device: torch.device) -> Any:
            dtypes = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16)
            return [
                make(dtype=dtype, device=device)
                for dtype in (*dtypes, torch.float64, torch.complex64)
                for make in (
                    lambda **kw: torch.zeros(2, **kw),
                    lambda **kw: torch.full((2,), 1, **kw),
                    lambda **kw: torch.tensor([0, 1], **kw),
                )
            ]

        beside_eager(program)

    def test_tensors_in_the_place_of_numbers(self) -> None:
        def program(device: torch.device) -> Any:
            three = torch.tensor(3, device=device)
            return (
                torch.full((2,), three, device=device),
                torch.arange(three, device=device),
                torch.linspace(three.float(), three.float() + 1, 3, device=device),
                torch.linspace(0, three.float(), 3, device=device),
                torch.tensor([three, 4], device=device),
                torch.zeros(int(three), three, device=device),
            )

        beside_eager(program)

    def test_requires_grad(self, device: torch.device) -> None:
        for make in (torch.zeros, torch.ones, torch.empty, torch.rand):
            made = make(2, device=device, requires_grad=True)
            assert made.requires_grad and made.is_leaf
        with pytest.raises(RuntimeError, match="Only Tensors of floating point"):
            torch.zeros(2, dtype=torch.int64, device=device, requires_grad=True)

    def test_a_number_that_changes_is_no_new_program(self, device: torch.device) -> None:
        with Counting() as counted:
            values = []
            for i in range(4):
                values.append(torch.full((3,), float(i), device=device))
                ltc.mark_step()
        assert counted.compiles <= 1
        assert [v[0].item() for v in values] == [0.0, 1.0, 2.0, 3.0]

    def test_out(self, device: torch.device) -> None:
        out = torch.empty(3, device=device)
        assert torch.ones(3, out=out) is out and out.tolist() == [1.0] * 3
        assert torch.arange(4.0, out=torch.empty(0, device=device)).tolist() == [0.0, 1.0, 2.0, 3.0]
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        assert_same(torch.rand(3, out=torch.empty(3, device=device)), expected)

    def test_the_default_device(self, device: torch.device) -> None:
        with device:
            made = [torch.ones(1), torch.rand(1), torch.tensor([1]), torch.empty(1), torch.eye(1)]
            model = torch.nn.Linear(2, 2)
        assert {t.device for t in made} == {device} == {p.device for p in model.parameters()}
        assert torch.ones(1).device.type == "cpu"
        torch.set_default_device(device)
        try:
            assert torch.arange(3).device == device
        finally:
            torch.set_default_device(None)

    def test_the_type_alone_means_the_current_device(self, device: torch.device) -> None:
        assert torch.ones(1, device=settings.device_name).device == device
        assert torch.ones(1, device=0).device == device  # an index means the accelerator


class TestEmpty:
    def test_it_records_nothing(self, device: torch.device) -> None:
        with Counting() as counted:
            kept = [
                torch.empty(3, 4, device=device),
                torch.empty_strided((2, 3), (1, 2), device=device),
                torch.empty(1, 2, 3, 4, device=device, memory_format=torch.channels_last),
            ]
            ltc.mark_step()
        assert not counted.ops and not counted.syncs
        assert [tuple(t.shape) for t in kept] == [(3, 4), (2, 3), (1, 2, 3, 4)]

    def test_what_is_written_later(self, device: torch.device) -> None:
        x = torch.empty(2, 3, device=device)
        x[0] = 1.0
        x[1].copy_(torch.arange(3.0))
        assert x.tolist() == [[1.0] * 3, [0.0, 1.0, 2.0]]
        y = torch.empty_strided((2, 3), (1, 2), device=device)
        y.copy_(x)
        assert y.tolist() == x.tolist()
        z = torch.empty(2, 3, 2, 2, device=device, memory_format=torch.channels_last).fill_(2.0)
        assert z.sum().item() == 48.0
        assert z.is_contiguous(memory_format=torch.channels_last)


class TestErrors:
    def test_no_such_device(self, device: torch.device) -> None:
        far = f"{settings.device_name}:77"
        calls: tuple[Callable[[], Any], ...] = (
            lambda: torch.zeros(2, device=far),
            lambda: torch.empty(2, device=far),
            lambda: torch.rand(2, device=far),
            lambda: torch.tensor([1.0], device=far),
            lambda: torch.ones(2).to(far),
            lambda: torch.ones(2, device=device).to(far),
            lambda: torch.zeros_like(torch.ones(2, device=device), device=far),
            lambda: torch.nn.Linear(2, 2).to(far),
        )
        for call in calls:
            with pytest.raises(RuntimeError, match=f"there is no device {far}") as raised:
                call()
            assert isinstance(raised.value, DeviceError)
            text = str(raised.value)
            assert "test_factories.py" in text and "LTC_NUM_DEVICES" in text
            assert f"{settings.device_name}:0" in text.split("got: ")[1]

    WRONG: dict[str, Make] = {
        "a negative size": lambda **kw: torch.zeros(-1, **kw),
        "a step of zero": lambda **kw: torch.arange(0, 6, 0, **kw),
        "the wrong way": lambda **kw: torch.arange(6, 0, 1, **kw),
        "a negative count": lambda **kw: torch.linspace(0, 1, -1, **kw),
        "an empty range": lambda **kw: torch.randint(3, 3, (2,), **kw),
        "a negative n": lambda **kw: torch.randperm(-1, **kw),
    }

    @pytest.mark.parametrize("name", WRONG)
    def test_wrong_calls_raise_at_once_as_in_eager(self, name: str, device: torch.device) -> None:
        with pytest.raises(RuntimeError) as eager:
            self.WRONG[name]()
        with pytest.raises(type(eager.value)) as raised:
            self.WRONG[name](device=device)
        assert isinstance(raised.value, LtcError)
        assert "test_factories.py" in str(raised.value)

    def test_more_memory_than_there_is(self, device: torch.device) -> None:
        """It is told as what it is, whether where it is called or at the sync."""
        with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
            torch.zeros(2**42, device=device).exp().sum().item()
        text = str(raised.value)
        assert "test_factories.py" in text
        assert "check the shapes, dtypes and indices" not in text
        assert "memory" in text.split("  Next: ")[1]
        ltc.wait_device_ops()
        assert torch.ones(2, device=device).sum().item() == 2.0

    def test_a_layout_the_device_cannot_hold(self, device: torch.device) -> None:
        for call in (
            lambda: torch.sparse_coo_tensor(
                [[0], [1]], [1.0], (2, 2), device=device, check_invariants=True
            ),
            lambda: torch.eye(2).to_sparse().to(device),
            lambda: torch.empty(2, 2, layout=torch.sparse_coo, device=device),
        ):
            with pytest.raises(NotImplementedError, match="[Ss]parse"):
                call()

    def test_quantized_tensors(self, device: torch.device) -> None:
        with pytest.raises((RuntimeError, NotImplementedError)) as raised:
            torch.quantize_per_tensor(torch.ones(2, device=device), 0.1, 0, torch.qint8).cpu()
        assert isinstance(raised.value, LtcError) and "report this" not in str(raised.value)
        assert "test_factories.py" in str(raised.value)
        ltc.wait_device_ops()
