"""Ops with a handler of their own: what is free, what moves data, what changes what a tensor is.

Views and their aliasing are in test_view_recorder.py, two devices in test_devices_many.py.
"""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ltc_core as ltc
from ltc_core.errors import LtcError, UnsupportedOpError
from ltc_core.settings import settings
from ltc_core.tensor.handles import base_of
from tests.core.beside_eager import assert_same, attempt, beside_eager, run_beside_eager
from tests.core.counting import Counting
from tests.nets.tiers import tier


def _with_data(t: Tensor, data: Tensor) -> Tensor:
    t.data = data.to(t.device)
    return t


@torch.library.custom_op("special_tests::turned", mutates_args=())
def _turned(x: Tensor) -> Tensor:
    """An op that runs on the CPU; its result is turned, and lies on itself."""
    return x.clone().transpose(0, 1).contiguous().transpose(0, 1).expand(2, *x.shape)


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


class TestFree:
    """Nothing is recorded, nothing is copied until one of the two is written."""

    CALLS: dict[str, Callable[[Tensor], Tensor]] = {
        "detach": lambda t: t.detach(),
        "alias": torch.ops.aten.alias,
        "clone": lambda t: t.clone(),
        "to where it is": lambda t: t.to(t.device),
        "contiguous": lambda t: t.contiguous(),
        "empty_like": torch.empty_like,
        "new_empty": lambda t: t.new_empty(2, 3),
        "new_empty_strided": lambda t: t.new_empty_strided((2, 3), (1, 2)),
        "empty_like of a dtype": lambda t: torch.empty_like(t, dtype=torch.int64),
        "data": lambda t: t.data,
    }

    @pytest.mark.parametrize("name", CALLS)
    def test_no_op_is_recorded(self, name: str, device: torch.device) -> None:
        t = torch.ones(4, 5).to(device)
        with Counting() as counted:
            made = self.CALLS[name](t)
            ltc.mark_step()
        assert not counted.ops and not counted.syncs
        expected = self.CALLS[name](torch.ones(4, 5))
        assert made.shape == expected.shape and made.dtype == expected.dtype

    def test_a_clone_is_independent_both_ways(self) -> None:
        def program(device: torch.device) -> Any:
            a = torch.arange(4.0, device=device)
            b, c = a.clone(), a[1:].clone()
            a.add_(1)
            b[0] = 7
            c.mul_(2)
            return a, b, c

        beside_eager(program)

    def test_clones_of_other_layouts(self) -> None:
        def program(device: torch.device) -> Any:
            a = torch.arange(24.0, device=device).view(1, 2, 3, 4)
            return [
                a.clone(memory_format=torch.channels_last),
                a.transpose(1, 2).clone(),
                a.transpose(1, 2).clone(memory_format=torch.contiguous_format),
                a.expand(3, 2, 3, 4).clone(),
                a.to(memory_format=torch.channels_last).clone().view(-1, 4)
                if device.type != "cpu"
                else a.view(-1, 4),
            ]

        beside_eager(program)

    def test_empty_like_keeps_the_memory_format(self, device: torch.device) -> None:
        a = torch.ones(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
        assert torch.empty_like(a).is_contiguous(memory_format=torch.channels_last)
        packed = torch.empty_like(a, memory_format=torch.contiguous_format)
        assert not packed.is_contiguous(memory_format=torch.channels_last)


class TestCopies:
    """`copy_` in all directions: shapes are spread, dtypes converted, the other side is never shared."""

    def test_into_the_device(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.zeros(2, 3, device=device)
            x.copy_(torch.arange(6.0).view(2, 3))
            y = torch.zeros(2, 3, dtype=torch.int64, device=device).copy_(
                torch.tensor([1.7, 2.0, -1.7])
            )
            z = torch.zeros(2, 3, device=device)
            z[0].copy_(torch.ones(3))
            z.t()[2].copy_(torch.tensor(5))
            w = torch.zeros(2, device=device).copy_(torch.ones(2), non_blocking=True)
            return x, y, z, w

        beside_eager(program)

    def test_out_of_the_device(self, device: torch.device) -> None:
        x = torch.arange(6.0, device=device).view(2, 3)
        host = torch.zeros(2, 2, 3)
        assert host.copy_(x) is host
        assert host.tolist() == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 2
        part = torch.zeros(3, dtype=torch.int32)
        part.copy_(x[1], non_blocking=True)
        assert part.tolist() == [3, 4, 5]
        host[0] = x + 1
        assert host[0].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]

    def test_the_source_may_be_written_right_after(self, device: torch.device) -> None:
        host = torch.zeros(3)
        x = torch.empty(3, device=device).copy_(host, non_blocking=True)
        y = host.to(device, non_blocking=True)
        host.add_(1)
        assert x.tolist() == y.tolist() == [0.0] * 3

    def test_a_wrong_shape_is_refused_at_once(self, device: torch.device) -> None:
        with pytest.raises(RuntimeError, match="size of tensor a|shape"):
            torch.zeros(3, device=device).copy_(torch.ones(4))
        with pytest.raises(RuntimeError, match="size of tensor a|shape"):
            torch.zeros(3).copy_(torch.ones(4, device=device))

    SOURCES: dict[str, Callable[[], Tensor]] = {
        "packed": lambda: torch.randn(2, 3, 4, 4),
        "turned": lambda: torch.randn(4, 4, 3, 2).permute(3, 2, 1, 0),
        "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": lambda: torch.randn(2, 1, 4, 1).expand(2, 3, 4, 4),
        "with gaps": lambda: torch.randn(2, 3, 8, 8)[..., ::2, 1::2],
        "another dtype": lambda: torch.randn(2, 3, 4, 4).double().transpose(0, 1).transpose(0, 1),
        "negated": lambda: torch.randn(2, 3, 4, 4, dtype=torch.complex64).conj().imag,
        "empty": lambda: torch.randn(4, 4, 3, 0).permute(3, 2, 1, 0),
        "of one row": lambda: torch.randn(3, 4, 4).as_strided((1, 3, 4, 4), (7, 16, 4, 1)),
    }
    ROUTES: dict[str, Callable[[Tensor, torch.device], Tensor]] = {
        "to": lambda t, d: t.to(d),
        "copy_": lambda t, d: torch.zeros(t.shape, device=d).copy_(t),
        "into channels last": lambda t, d: torch.empty(
            t.shape, device=d, memory_format=torch.channels_last
        ).copy_(t),
        "into turned": lambda t, d: torch.empty_strided(
            t.shape, torch.empty(t.shape[::-1]).permute(3, 2, 1, 0).stride(), device=d
        ).copy_(t),
        "data": lambda t, d: _with_data(torch.zeros(t.shape, device=d), t.float()),
        "a list": lambda t, d: torch.tensor(t.tolist(), device=d),
        "the fallback": lambda t, d: torch.ops.special_tests.turned(t.to(d)),
    }

    @pytest.mark.parametrize("route", ROUTES)
    def test_what_is_placed_lies_as_its_meta_says(self, route: str, device: torch.device) -> None:
        """Compiled programs address memory by the meta's strides."""
        for name, make in self.SOURCES.items():
            source = make()
            t = self.ROUTES[route](source, device)
            base = base_of(t._h)  # type: ignore[attr-defined]
            ltc.mark_step(wait=True)
            if base.value.buffer is None:  # nothing was ever written
                continue
            placed = base.value.buffer.take()
            assert base.meta.laid_out(placed) is placed, (name, placed.stride(), base.meta.stride)
            if t.shape == source.shape:
                assert torch.equal(t.cpu(), source.float()), name

    def test_conjugates_and_negatives(self) -> None:
        def program(device: torch.device) -> Any:
            host = torch.tensor([1 + 2j, 3 - 1j])
            x = torch.zeros(2, dtype=torch.complex64, device=device).copy_(host.conj())
            return (
                x,
                x.conj().to("cpu").resolve_conj(),
                host.conj().to(device) * 1,
                x.conj().imag * 1,
            )

        beside_eager(program)

    def test_a_whole_copy_is_no_op_and_forgets_the_old_value(self, device: torch.device) -> None:
        x = torch.zeros(3, device=device).exp()
        with Counting() as counted:
            x.copy_(torch.ones(3))
            ltc.mark_step()
        assert not counted.ops and x.tolist() == [1.0] * 3

    def test_to_with_a_dtype(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.tensor([1.5, -2.5], device=device)
            return [
                x.to(torch.int64),
                x.half(),
                x.to("cpu", torch.float64).to(device),
                x.cpu().to(device, torch.bfloat16),
                x.bool(),
                x.to(torch.complex64),
                x.type(torch.int32),
                x.to(torch.ones(1, dtype=torch.float64, device=device)),
            ]

        beside_eager(program)

    def test_to_meta(self, device: torch.device) -> None:
        with Counting() as counted:
            moved = torch.ones(2, 3, device=device).exp().to("meta", torch.float16)
        assert moved.device.type == "meta" and moved.shape == (2, 3)
        assert moved.dtype == torch.float16 and not counted.syncs

    def test_the_gradient_comes_back_over_the_border(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.ones(3, requires_grad=True)
            y = x.to(device) * 2
            (y.cpu() * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
            z = torch.zeros(3, device=device)
            w = torch.ones(3, requires_grad=True)
            z.copy_(w)
            z.sum().backward()
            return x.grad.to(device), w.grad.to(device)

        beside_eager(program)


class TestLikeOnAnotherDevice:
    def test_on_the_cpu(self, device: torch.device) -> None:
        t = torch.ones(2, 3, device=device, dtype=torch.float64)
        with Counting() as counted:
            made = (
                torch.zeros_like(t, device="cpu"),
                torch.full_like(t, 3, device="cpu"),
                t.new_zeros(2, device="cpu"),
                t.new_tensor([1, 2], device="cpu"),
                torch.empty_like(t, device="cpu"),
                torch.rand_like(t, device="cpu"),
            )
        assert not counted.syncs
        assert {m.device.type for m in made} == {"cpu"} and {m.dtype for m in made} == {t.dtype}
        assert made[0].sum() == 0 and made[1].sum() == 18

    def test_from_the_cpu(self, device: torch.device) -> None:
        t = torch.ones(2, 3)
        made = (
            torch.zeros_like(t, device=device),
            torch.full_like(t, 3, device=device),
            t.new_ones(2, device=device),
            torch.empty_like(t, device=device),
            torch.randn_like(t, device=device),
        )
        assert all(ltc.is_lazy_tensor(m) for m in made)
        assert made[1].sum().item() == 18 and made[2].tolist() == [1.0, 1.0]


class TestHistograms:
    def test_of_whole_numbers(self, device: torch.device) -> None:
        """Eager counts floats alone on the CPU; of small whole numbers their histogram is the same."""
        for dtype in (torch.int32, torch.int64, torch.uint8):
            x = torch.tensor([0, 1, 2, 3, 3, 7, 9], dtype=dtype)
            for bins, low, high in ((8, 0, 7), (4, 2, 9), (10, 0, 0), (3, 20, 30)):
                got = torch.histc(x.to(device), bins=bins, min=low, max=high)
                assert_same(got, torch.histc(x.float(), bins=bins, min=low, max=high).to(dtype))
            assert torch.histc(x[3:5].to(device), 4).tolist() == [0, 0, 2, 0]
            assert torch.histc(x[:0].to(device), bins=4).tolist() == [0] * 4
        with pytest.raises(RuntimeError):
            torch.histc(x.to(device), bins=0).cpu()

    def test_of_floats_is_the_op(self, device: torch.device) -> None:
        x = torch.tensor([0.1, 0.5, 0.9])
        with Counting() as counted:
            assert_same(torch.histc(x.to(device), 3, 0, 1), torch.histc(x, 3, 0, 1))
        assert counted.fallbacks == {}


def losses_of_two_dtypes(device: torch.device) -> Any:
    x = (torch.arange(6.0) / 3 - 1).view(2, 3).to(device).requires_grad_()
    low = x.detach().flip(0).to(torch.bfloat16).requires_grad_()
    found: list[Any] = []
    for reduction in ("mean", "sum", "none"):
        for a, b in ((x, low), (low, x), (x, x.detach().double() + 1), (low[:1], x.detach())):
            loss = F.huber_loss(a, b, reduction=reduction, delta=0.7)
            found += [loss, attempt(lambda y=loss: y.float().sum().backward())]
    return found, x.grad, low.grad


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("chosen", ["ops", "lowered"])
def test_a_loss_of_two_dtypes_has_that_of_its_input(chosen: str) -> None:
    with tier(chosen):
        run_beside_eager(losses_of_two_dtypes, rounds=2 if chosen == "ops" else 1)


class TestShapeChangers:
    """Beside eager; what is not here is in test_view_recorder.py."""

    def test_resizing_a_part(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.zeros(4, device=device)
            part = x[1:1]
            part.resize_(2).fill_(1.0)
            y = torch.arange(6.0, device=device)
            smaller = y[1:5]
            smaller.resize_(2)
            smaller += 10
            return x, y, part, smaller, torch.ones(0, device=device).resize_(2).shape

        beside_eager(program)

    def test_a_kernel_that_resizes_an_empty_part(self) -> None:
        beside_eager(
            lambda device: [torch.fft.fftfreq(n, device=device) for n in (1, 4, 5)], rtol=1e-6
        )

    def test_set(self) -> None:
        def program(device: torch.device) -> Any:
            x, y = torch.zeros(3, device=device), torch.arange(6.0, device=device)
            x.set_(y)
            x += 1
            z = torch.zeros(1, device=device).set_(y, 1, (2, 2), (2, 1))
            z[0] = -1
            empty = torch.ones(3, device=device).set_()
            return x, y, z, empty.shape

        beside_eager(program)

    def test_memory_is_asked_for_in_vain(self, device: torch.device) -> None:
        x = torch.ones(3, device=device)
        with pytest.raises(NotImplementedError, match="have no storage") as raised:
            x.set_(torch.UntypedStorage(12))
        assert isinstance(raised.value, LtcError) and "  Next: " in str(raised.value)
        assert x.tolist() == [1.0] * 3


class TestQuestions:
    def test_pinned_and_streams(self, device: torch.device) -> None:
        x = torch.ones(3, device=device)
        with Counting() as counted:
            assert not x.is_pinned()
            x.record_stream(torch.Stream(device))
        assert not counted.syncs

    def test_numbers(self, device: torch.device) -> None:
        values = {torch.bool: True, torch.int64: 3, torch.float32: 2.5, torch.complex64: 1 + 2j}
        for dtype, value in values.items():
            t = torch.tensor(value, dtype=dtype, device=device)
            assert t.item() == value and type(t.item()) is type(value)
        assert int(torch.tensor([3], device=device)) == 3
        assert float(torch.tensor(2.5, device=device)) == 2.5
        assert [10, 20, 30][torch.tensor(1, device=device)] == 20
        assert f"{torch.tensor(2.5, device=device):.2f}" == "2.50"
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            torch.ones(2, device=device).item()
        with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value"):
            bool(torch.ones(2, device=device))

    def test_another_librarys_door_is_shut_in_words(self, device: torch.device) -> None:
        """There is no memory to point to: nobody may be given a pointer to nothing."""
        with pytest.raises((RuntimeError, ValueError, BufferError, TypeError)):
            torch.from_dlpack(torch.ones(2, device=device))
        with pytest.raises((RuntimeError, ValueError, BufferError, TypeError)):
            numpy.from_dlpack(torch.ones(2, device=device))

    def test_names_of_the_device(self, device: torch.device) -> None:
        x = torch.ones(1, device=device)
        assert x.device == device and x.get_device() == 0
        assert getattr(x, f"is_{settings.device_name}") and not x.is_cpu and not x.is_cuda
        assert_same(getattr(torch.ones(1), settings.device_name)(), torch.ones(1))


class TestOutOfAnotherSize:
    """A tensor of `out=` is resized; one that the op reads too, or an op in place writes, is refused as in eager."""

    @pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
    def test_an_operand_that_is_the_result_too_is_refused(self) -> None:
        for device in (torch.device("cpu"), ltc.lazy_device()):
            x, y = torch.ones(2, 2, device=device), torch.ones(3, 1, device=device)
            with pytest.raises(RuntimeError, match="single memory location"):
                torch.stack([x, x], out=x)
            with pytest.raises(RuntimeError, match="single memory location"):
                torch.cat([y, y * 2], out=y)

    def test_an_op_in_place_is_refused_where_its_result_is_larger(self) -> None:
        def program(device: torch.device) -> Any:
            x, y = torch.ones(4, 1, 4, device=device), torch.zeros(1, 4, 4, device=device)
            for call in (x.eq_, x.add_, x.logical_and_):
                with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
                    call(y)
            return x

        beside_eager(program)


class TestAsStridedOfATen:
    """Strides below Python are those of eager's views, and refer to the memory that such a view has."""

    def test_of_conjugates(self) -> None:
        def program(device: torch.device) -> Any:
            numbers = torch.arange(12.0, device=device).view(3, 4)
            z = torch.complex(numbers, numbers + 1)
            views = (
                z.conj(),
                z[1:].conj(),
                z.t().conj(),
                z[:, 1:].conj()[2],
                z.conj()[1:].as_strided((2, 2), (2, 1)),
            )
            return [torch.ops.aten.as_strided(x, (2,), (1,)).resolve_conj() for x in views]

        beside_eager(program)

    def test_of_a_view_that_eager_refuses(self, device: torch.device) -> None:
        """`stft` cuts its windows with `as_strided`."""
        x = torch.arange(12.0).view(3, 4)
        lazy, packed = x.to(device).t().view(-1)[2:], x.t().reshape(-1)[2:]
        assert (
            torch.ops.aten.as_strided(lazy, (3,), (2,), 1).tolist()
            == packed.as_strided((3,), (2,), 1).tolist()
        )
        window = torch.ones(4)
        found = torch.stft(lazy, 4, window=window.to(device), center=False, return_complex=True)
        wanted = torch.stft(packed, 4, window=window, center=False, return_complex=True)
        assert torch.equal(found.cpu(), wanted)

    def test_beside_a_conjugate_of_a_part(self, device: torch.device) -> None:
        x = torch.zeros(4, 4, dtype=torch.complex64, device=device)[1:].conj()
        with pytest.raises(UnsupportedOpError) as raised:
            torch.ops.aten.as_strided(x, (2,), (1,), 0)
        lines = str(raised.value).splitlines()
        assert "as_strided leaves the elements of a conjugate" in lines[0]
        assert "test_special.py" in lines[0]
        assert (
            "complex64[3, 4]; size [2], stride [1], -4 elements from its first one on" in lines[1]
        )
        assert "Next: call it on a copy" in lines[2]

    def test_set_counts_from_the_first_element_of_the_source(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(12.0, device=device)[4:]
            y = torch.zeros(1, device=device)
            y.set_(x, 1, (2, 2), (3, 1))
            y.mul_(2)
            return x, y, torch.zeros(1, device=device).set_(x, 2, (3,))

        beside_eager(program)
