"""Views on the device are views: writes go through them, in both directions, as in eager PyTorch.

First each kind of view with each kind of write, then what is special about some of them. Autograd
through views is in test_views_autograd.py, random programs are in tests/nets.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting
from tests.core.view_kinds import VIEWS, Make, base_tensor

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda v: v.add_(1),
    "augmented": lambda v: v.__imul__(3),
    "zero": lambda v: v.zero_(),
    "copy": lambda v: v.copy_(torch.arange(v.numel(), device=v.device).view(v.shape)),
    "copy_from_the_cpu": lambda v: v.copy_(torch.full(v.shape, 7.0)),
    "setitem": lambda v: v.__setitem__(..., 5),
    "masked": lambda v: v.masked_fill_(v > 20, -1),
    "mask_index": lambda v: v.__setitem__(v > 20, -2),
    "random": lambda v: v.random_(0, 100),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_writes_go_through(view: str, write: str) -> None:
    def program(device: torch.device) -> Any:
        base = base_tensor(device)
        part = VIEWS[view](base)
        untouched = base * 1
        WRITES[write](part)
        after_write = base.clone(), part.clone()
        base.mul_(2)  # and the other way round
        return untouched, after_write, base, part

    beside_eager(program)


@pytest.mark.parametrize("view", VIEWS)
def test_views_survive_a_cut(view: str) -> None:
    def program(device: torch.device) -> Any:
        base = base_tensor(device)
        part = VIEWS[view](base)
        for step in range(3):
            part.add_(step + 1)
            if device.type != "cpu":
                ltc.mark_step()
            base.add_(10)
        return base, part, VIEWS[view](base)

    beside_eager(program)


def test_two_views_of_one_base_see_each_other() -> None:
    def program(device: torch.device) -> Any:
        base = base_tensor(device)
        rows, columns = base[1:3], base.transpose(0, 1)[::2]
        rows += 100
        columns *= -1
        rows[0].zero_()
        return base, rows, columns

    beside_eager(program)


class TestSharing:
    """What shares memory with what."""

    def test_reshape_copies_where_eager_copies(self) -> None:
        shapes = [(60,), (12, 5), (4, 15), (5, 3, 4), (2, 30), (4, 3, 5, 1)]
        sources: dict[str, Make] = {
            "whole": lambda t: t,
            "transposed": lambda t: t.transpose(0, 1),
            "permuted": lambda t: t.permute(2, 0, 1),
        }
        for source in sources.values():
            for shape in shapes:

                def program(device: torch.device, source: Make = source, shape: Any = shape) -> Any:
                    base = base_tensor(device)
                    reshaped = source(base).reshape(shape)
                    reshaped.add_(1000)
                    return base, reshaped

                beside_eager(program)

    @pytest.mark.parametrize("name", ["contiguous", "flatten", "float", "to", "clone", "view_as"])
    def test_the_result_is_an_alias_or_a_copy_as_in_eager(self, name: str) -> None:
        calls: dict[str, Make] = {
            "contiguous": lambda t: t.contiguous(),
            "flatten": lambda t: t.flatten(),
            "float": lambda t: t.float(),
            "to": lambda t: t.to(torch.float32),
            "clone": lambda t: t.clone(),
            "view_as": lambda t: t.view_as(t),
        }

        def program(device: torch.device) -> Any:
            found = []
            for source in (lambda t: t, lambda t: t.transpose(0, 1), lambda t: t[1:2]):
                base = base_tensor(device)
                result = calls[name](source(base)) if name != "view_as" else source(base)
                result += 1
                found.append((base, result))
            return found

        beside_eager(program)

    def test_detach_and_data_share_memory(self) -> None:
        def program(device: torch.device) -> Any:
            p = torch.zeros(3, device=device, requires_grad=True)
            p.detach().add_(1)
            p.data[1] += 5
            p.data.mul_(2)
            other = p.detach()
            with torch.no_grad():
                p.sub_(1)
            return p, other

        beside_eager(program)

    def test_assigning_data_shares_the_new_memory(self) -> None:
        def program(device: torch.device) -> Any:
            p = torch.zeros(3, device=device, requires_grad=True)
            q = torch.ones(2, 2, device=device)
            p.data = q
            q += 1
            p.data[0] = 7
            return p, q, p.shape

        beside_eager(program)

    def test_a_new_tensor_like_an_old_one_is_not_a_view(self) -> None:
        def program(device: torch.device) -> Any:
            base = base_tensor(device)
            others = [base + 0, base.abs(), torch.cat([base]), base[[0, 1]], base[base > 3]]
            base.zero_()
            return others

        beside_eager(program)


class TestIndexing:
    def test_assignment(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(24.0, device=device).view(4, 6)
            x[0] = -1
            x[:, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
            x[x > 20] = 0
            x[x == 0] = torch.tensor(9.5, device=device)
            x[[1, 2], [3, 3]] = torch.tensor([50.0, 60.0], device=device)
            x[1:3, ::2] += 100
            x[-1, -1] = 3
            x[torch.tensor([True, False, False, True], device=device), 0] = 77
            x[..., None][2] = x[0, :, None]
            x[2, torch.tensor([0, 1], device=device)] *= 2
            return x

        beside_eager(program)

    def test_reading(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(24, device=device).view(2, 3, 4)
            rows = torch.tensor([1, 0, 1], device=device)
            return (
                x[rows],
                x[:, rows],
                x[rows, rows],
                x[rows[:, None], torch.tensor([0, 2], device=device)],
                x[x % 5 == 0],
                x[x.sum((1, 2)) > 70],
                x[:, [True, False, True]],
                x[0, ..., torch.tensor([0, -1], device=device)],
                x[torch.tensor(1, device=device)],
                x[()],
                x[None, ..., None].shape,
            )

        beside_eager(program)

    def test_values_of_a_masked_assignment(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(12.0, device=device).view(3, 4)
            mask = x % 2 == 0
            x[mask] = torch.arange(100.0, 106.0, device=device)
            part = x[1:]
            part[mask[1:]] = -x[2:, :][mask[2:]].sum()
            return x, part

        beside_eager(program)

    def test_a_masked_assignment_of_one_value_does_not_cut(self) -> None:
        device = ltc.lazy_device()
        x = torch.arange(12.0, device=device)
        ltc.mark_step()
        with Counting() as counted:
            x[x > 5] = 0
            ltc.mark_step()
        assert counted.syncs == {"MarkStep": 1} and not counted.fallbacks
        assert x.sum().item() == 15

    def test_accumulating(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.zeros(4, 3, device=device)
            rows = torch.tensor([0, 2, 0], device=device)
            x.index_add_(0, rows, torch.ones(3, 3, device=device))
            x[1:].index_put_((rows,), torch.tensor(2.0, device=device), accumulate=True)
            x.t().scatter_(1, rows.expand(3, 3), 5.0)
            x.view(-1).index_fill_(0, rows, -1)
            return x

        beside_eager(program)


class TestOverlap:
    def test_writing_an_expanded_tensor_is_refused_as_in_eager(self) -> None:
        for device in (torch.device("cpu"), ltc.lazy_device()):
            x = torch.zeros(3, 1, device=device)
            with pytest.raises(RuntimeError, match="single memory location"):
                x.expand(3, 4).add_(1)
            x.expand(3, 4)[:, 0].add_(1)
            assert x.sum().item() == 3

    def test_overlapping_windows(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(8.0, device=device)
            windows = x.unfold(0, 4, 2)
            windows[1].mul_(10)
            windows[:, 0] = -1
            return x, windows, windows.sum(1)

        beside_eager(program)

    def test_a_read_that_overlaps_the_write_is_refused(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(6.0, device=device)
            with pytest.raises(RuntimeError, match="single memory location"):
                x[1:] += x[:-1]
            x[1:] += x.clone()[:-1]  # the same values, in other memory
            x[1:] = x[:-1].clone()
            x[:3] = x.flip(0)[:3]
            return x

        for _ in range(3):
            beside_eager(program)

    def test_an_operand_that_is_the_written_tensor(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(6.0, device=device).view(2, 3)
            x.add_(x)
            x.mul_(x.clone())
            torch.add(x, 1, out=x)
            torch.mul(x, x, out=x)
            return x

        beside_eager(program)


class TestShapeChangers:
    def test_in_place_transposes(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(6.0, device=device).view(2, 3)
            y = x.clone()
            z = y.t_()
            y[0] += 10
            w = torch.arange(24.0, device=device).view(2, 1, 3, 4)
            part = w[0]
            w.squeeze_(1).transpose_(0, 2).unsqueeze_(0)
            part.add_(100)
            w.squeeze_()
            w[0].zero_()
            return x, y, z, y.shape, w, part, w.shape

        beside_eager(program)

    def test_resize(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(6.0, device=device)
            smaller = x.clone().resize_(2, 2)
            bigger = x.clone().resize_(2, 4)
            bigger.view(-1)[6:] = 0
            there_and_back = x.clone()
            there_and_back.resize_(2)
            there_and_back.resize_(3, 2)
            empty = torch.empty(0, device=device).resize_(3).fill_(1)
            alike = torch.empty(0, device=device).resize_as_(x).copy_(x)
            return smaller, bigger, there_and_back, empty, alike

        beside_eager(program)

    def test_set(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(6.0, device=device)
            y = torch.zeros(2, device=device)
            y.set_(x)
            y += 1
            z = torch.zeros(1, device=device)
            with torch.no_grad():
                z.set_(x[2:])
            z.mul_(2)
            return x, y, z

        beside_eager(program)

    def test_as_strided_in_place_and_scatter(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(12.0, device=device)
            x.as_strided_((3, 2), (4, 1), 1)
            x += 100
            y = torch.zeros(3, 4, device=device)
            return (
                x,
                y.as_strided_scatter(torch.ones(3, device=device), (3,), (5,)),
                y.select_scatter(torch.ones(4, device=device), 0, 1),
                y.slice_scatter(torch.ones(3, 2, device=device), 1, 0, 4, 2),
                y.diagonal_scatter(torch.ones(3, device=device)),
                y,
            )

        beside_eager(program)

    def test_out(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.arange(6.0, device=device).view(2, 3)
            exact, part = torch.zeros(2, 3, device=device), torch.zeros(4, 3, device=device)
            torch.add(x, 1, out=exact)
            returned = torch.mul(x, 2, out=part[1:3])
            resized = torch.empty(0, device=device)
            torch.sin(x, out=resized)
            values, indices = torch.zeros(2, device=device), torch.zeros(2, device=device).long()
            torch.max(x, 1, out=(values, indices))
            halves = torch.zeros(2, 3, device=device, dtype=torch.float64)
            torch.div(x, 2, out=halves)
            torch.cat([x, x], out=part)
            return exact, part, returned, resized, values, indices, halves

        beside_eager(program)

    def test_a_transposed_tensor_can_be_viewed(self) -> None:
        """It appears contiguous, as the documents say; eager refuses this. It stays a view."""
        x = torch.arange(6.0, device=ltc.lazy_device()).view(2, 3)
        flat = x.t().view(-1)
        assert_same(flat, torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]))
        flat[1] = 30
        x[0, 1] = 10
        assert_same(x, torch.tensor([[0.0, 10.0, 2.0], [30.0, 4.0, 5.0]]))
        assert_same(flat, torch.tensor([0.0, 30.0, 10.0, 4.0, 2.0, 5.0]))


class TestOtherDtypes:
    def test_complex_as_real(self) -> None:
        def program(device: torch.device) -> Any:
            z = torch.arange(12.0, device=device).view(3, 2, 2)
            c = torch.view_as_complex(z)
            pairs = torch.view_as_real(c)
            pairs[0, :, 1] = 5
            c.imag.mul_(2)
            c.real[1] = -1
            c[2] = 1 + 1j
            conjugate = c.conj()
            c.add_(1j)
            return z, c, pairs, conjugate.resolve_conj(), c.conj().imag.clone(), conjugate * c

        beside_eager(program)

    def test_bits(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.tensor([1.0, -2.0, 0.5, 4.0], device=device)
            bits = x.view(torch.int32)
            bits.bitwise_and_(0x7FFFFFFF)
            halves = x.view(torch.int16)
            doubles = x.view(torch.int64)
            pixels = torch.arange(8, dtype=torch.uint8, device=device)
            pixels.view(torch.int32)[1] = 0
            return x, bits, halves, halves.shape, doubles, pixels

        beside_eager(program)
