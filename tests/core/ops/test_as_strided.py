"""`as_strided` with the strides and the offset that a tensor says: the same program on the CPU and on the device."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from ltc_core.errors import UnsupportedOpError
from tests.compiled_cache import empty_cache
from tests.core import child
from tests.core.beside_eager import beside_eager
from tests.core.view_kinds import VIEWS, base_tensor

MORE_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "t_of_a_row": lambda t: t[1].t(),
    "expand": lambda t: t[:, :1].expand(4, 6, 5),
    "columns_of_the_end": lambda t: t[2:, 1:, 3:],
    "one_element": lambda t: t[1, 2, 3],
    "overlapping_windows": lambda t: t[0, 0].unfold(0, 3, 1),
    "channels_last": lambda t: t[:, :, :, None].clone(memory_format=torch.channels_last),
    "sum_of_transposed": lambda t: t.mT + 1,
    "real_part": lambda t: torch.complex(t, t + 1).imag,
    "empty_of_transposed": lambda t: t.mT[4:, :0],
}  # fmt: skip
ALL_VIEWS = {**VIEWS, **MORE_VIEWS}
OVERLAPS = ("expand", "overlapping_windows")  # eager does not write them
IS_COPY = ("channels_last", "sum_of_transposed", "real_part")

RESTRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda x: x.as_strided(x.size(), x.stride()),
    "with_offset": lambda x: x.as_strided(x.size(), x.stride(), x.storage_offset()),
    "keywords": lambda x: x.as_strided(size=x.size(), stride=x.stride(), storage_offset=x.storage_offset()),
    "function": lambda x: torch.as_strided(x, x.size(), x.stride()),
    "function_by_keywords": lambda x: torch.as_strided(input=x, size=x.size(), stride=x.stride()),
    "copy": lambda x: torch.as_strided_copy(x, x.size(), x.stride(), x.storage_offset()),
    "scatter": lambda x: x.as_strided_scatter(x * 2, x.size(), x.stride()),
    "scatter_function": lambda x: torch.as_strided_scatter(x, x * 2, x.size(), x.stride(), x.storage_offset()),
    "twice": lambda x: x.as_strided(x.size(), x.stride()).as_strided(x.size(), x.stride()),
}  # fmt: skip


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def values(device: torch.device, *size: int) -> Tensor:
    return torch.arange(float(torch.Size(size).numel()), device=device).view(size).clone()


class TestWhatATensorSaysOfItself:
    """`x.as_strided(x.size(), x.stride())` is `x`, and so is the one with `x.storage_offset()`."""

    @pytest.mark.parametrize("name", ALL_VIEWS)
    def test_values(self, name: str) -> None:
        def program(device: torch.device) -> Any:
            x = ALL_VIEWS[name](base_tensor(device))
            calls = [
                call
                for key, call in RESTRIDED.items()
                if "scatter" not in key or name not in OVERLAPS
            ]
            return [x.storage_offset(), *(call(x).clone() for call in calls)]

        beside_eager(program)

    @pytest.mark.parametrize("name", [name for name in ALL_VIEWS if name not in IS_COPY])
    def test_writes_reach_the_base(self, name: str) -> None:
        def program(device: torch.device) -> Any:
            base = base_tensor(device)
            x = ALL_VIEWS[name](base)
            again = torch.as_strided(x, x.size(), x.stride())
            if name not in OVERLAPS:
                again.mul_(2)
                base.add_(1)
            return base, x, again

        beside_eager(program)

    @pytest.mark.parametrize(
        "name", [name for name in ALL_VIEWS if name not in ("view_dtype", "detach", "data")]
    )
    def test_gradients(self, name: str) -> None:
        def program(device: torch.device) -> Any:
            leaf = base_tensor(device).requires_grad_()
            x = ALL_VIEWS[name](leaf * 1)
            again = x.as_strided(x.size(), x.stride(), x.storage_offset())
            if name not in (
                "expand",
                "overlapping_windows",
                "unbind",
                "split",
                "chunk",
                "tensor_split",
            ):
                again.mul_(3)
            weights = torch.arange(1.0, x.numel() + 1, device=device).view(x.size())
            (again * weights).sum().backward()
            return leaf.grad, again.detach()

        beside_eager(program)

    def test_a_written_view_of_an_expanded_one_is_refused_as_in_eager(
        self, device: torch.device
    ) -> None:
        x = torch.zeros(2, device=device).expand(3, 2)
        with pytest.raises(RuntimeError, match="more than one element"):
            x.as_strided(x.size(), x.stride()).add_(1)

    def test_in_place(self) -> None:
        def program(device: torch.device) -> Any:
            base = values(device, 3, 4)
            results: list[Tensor] = [base]
            for view in (
                lambda t: t.t(),
                lambda t: t[1:],
                lambda t: t[:, ::2],
                lambda t: t[1:, 1:].t(),
            ):
                x = view(base)
                x.as_strided_(x.size(), x.stride())
                results.append(
                    torch.as_strided_(x, x.size(), x.stride(), x.storage_offset()).clone()
                )
                x.mul_(2)
            return results

        beside_eager(program)

    def test_set(self) -> None:
        """The offset of `set_` counts from the first element of the source."""

        def program(device: torch.device) -> Any:
            x = values(device, 3, 4)[1:]
            y = torch.zeros(1, device=device).set_(x, 0, x.size(), x.stride())
            z = torch.zeros(1, device=device).set_(x, 1, (2, 2))
            y.mul_(2)
            return x, y, z, torch.zeros(1, device=device).set_(x)

        beside_eager(program)

    def test_set_from_a_view_with_gaps(self, device: torch.device) -> None:
        """Eager takes no such source."""
        x = values(device, 3, 4).t()[1:]
        assert torch.zeros(1, device=device).set_(x, 0, x.size(), x.stride()).tolist() == x.tolist()
        assert (
            torch.zeros(1, device=device).set_(x, 1, size=(2,)).tolist()
            == x.flatten()[1:3].tolist()
        )

    def test_copies_and_files(self, device: torch.device) -> None:
        x = values(device, 3, 4).t()[1:]
        again = x.as_strided(x.size(), x.stride())
        file = io.BytesIO()
        torch.save(again, file)
        file.seek(0)
        for made in (copy.deepcopy(again), torch.load(file), again.cpu()):
            assert made.tolist() == x.tolist()


def windows(x: Tensor) -> list[Tensor]:
    """Sliding windows, every second row, a repeated row, the diagonal and a reshaped one, from what `x` says."""
    (rows, columns), (down, right), first = x.size(), x.stride(), x.storage_offset()
    return [
        x.as_strided((rows - 1, 2, columns), (down, down, right)),
        x.as_strided((rows, columns - 1, 2), (down, right, right), first),
        x.as_strided((columns - 1, rows), (right, down), first + right),
        x.as_strided((rows - 1,), (down,), first + down),
        x.as_strided((2, 3, columns), (0, down, right)),
        x.as_strided((1, 2, 1, 2), (7, right, 9, down)),
        x.as_strided((min(rows, columns),), (down + right,)),
        x.as_strided((), (), first + down),
        x.as_strided((0, 2), (down, right)),
    ]


OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "rows": lambda t: t[1:],
    "columns": lambda t: t[:, 1:-1],
    "every_second": lambda t: t[::2, 1::2],
    "transposed": lambda t: t.t(),
    "transposed_part": lambda t: t[1:, 2:].t(),
    "expanded": lambda t: t[:, :1].expand(5, 3),
    "permuted": lambda t: t.view(5, 2, 3).permute(2, 0, 1)[1],
}  # fmt: skip


class TestWindows:
    @pytest.mark.parametrize("name", OF_ROWS)
    def test_values_and_gradients(self, name: str) -> None:
        def program(device: torch.device) -> Any:
            leaf = values(device, 5, 6).requires_grad_()
            found = windows(OF_ROWS[name](leaf * 1))
            total = sum(
                (w * torch.arange(1.0, w.numel() + 1, device=device).view(w.size())).sum()
                for w in found
            )
            total.backward()
            return leaf.grad, [w.detach().clone() for w in found]

        beside_eager(program, rtol=1e-6)  # sums of many gradients

    @pytest.mark.parametrize("name", [name for name in OF_ROWS if name != "expanded"])
    def test_writes(self, name: str) -> None:
        def program(device: torch.device) -> Any:
            base = values(device, 5, 6)
            found = windows(OF_ROWS[name](base))
            for number in (2, 3, 6, 7):
                found[number].mul_(-2)
            return base, [w.clone() for w in found]

        beside_eager(program)

    @pytest.mark.parametrize("name", [name for name in OF_ROWS if name != "expanded"])
    def test_gradients_of_writes(self, name: str) -> None:
        def program(device: torch.device) -> Any:
            leaf = values(device, 5, 6).requires_grad_()
            whole = leaf * 2
            x = OF_ROWS[name](whole)
            for number in (2, 3, 6, 7):
                windows(x)[number].mul_(-2)
            (whole * values(device, 5, 6)).sum().backward(retain_graph=True)
            (x * x).sum().backward()
            return leaf.grad, whole.detach()

        beside_eager(program, rtol=1e-6)

    def test_a_contiguous_tensor_sees_its_memory_as_in_eager(self) -> None:
        """The offset counts from the start of the memory, and elements beside the tensor's own can be reached."""

        def program(device: torch.device) -> Any:
            base = values(device, 3, 4)
            row = base[1:]
            row.as_strided((2,), (1,), 0).add_(50)
            base.view(-1)[3:].as_strided((2,), (2,), 1).mul_(2)
            return (
                base,
                base.as_strided((10, 3), (1, 1)),
                row.as_strided((3, 2), (2, 1)),
                row.as_strided((3, 2), (2, 1), 5),
                base.view(-1).as_strided((6,), (2,), 1),
                torch.as_strided_copy(row, (3,), (2,), 0),
                torch.as_strided_scatter(row, torch.ones(3, device=device), (3,), (2,), 5),
            )

        beside_eager(program)

    def test_packed_order_of_a_transposed_one(self, device: torch.device) -> None:
        """A packed copy is what eager needs here."""
        base = values(device, 3, 4)
        x, packed = base.t(), values(torch.device("cpu"), 3, 4).t().contiguous()
        geometries: list[tuple[Any, ...]] = [
            ((12,), (1,)), ((9, 4), (1, 1)), ((6, 2), (2, 1)), ((3,), (5,), 1), ((4, 3), (1, 4)), ((2, 2, 2), (1, 0, 4))
        ]  # fmt: skip
        for geometry in geometries:
            assert x.as_strided(*geometry).tolist() == packed.as_strided(*geometry).tolist()
        x.as_strided((3,), (5,), 1).fill_(-1)
        packed.as_strided((3,), (5,), 1).fill_(-1)
        assert base.tolist() == packed.t().tolist()

    def test_a_view_that_eager_refuses(self, device: torch.device) -> None:
        """Its memory is the packed one that it says, also for an op that asks ATen for strides."""
        base = values(device, 3, 4)
        x, packed = base.t().view(-1)[2:], values(torch.device("cpu"), 3, 4).t().reshape(-1)[2:]
        assert x.as_strided((10,), (1,)).tolist() == packed.tolist()
        assert x.as_strided((2,), (3,), 0).tolist() == packed.as_strided((2,), (3,), 0).tolist()
        assert (
            x.as_strided((2, 2), (3, 1), 4).tolist()
            == packed.as_strided((2, 2), (3, 1), 4).tolist()
        )
        window = torch.ones(4)
        found = torch.stft(x, 4, window=window.to(device), center=False, return_complex=True)
        assert torch.equal(
            found.cpu(), torch.stft(packed, 4, window=window, center=False, return_complex=True)
        )
        x.as_strided((3,), (2,)).zero_()
        packed.as_strided((3,), (2,)).zero_()
        assert (
            x.tolist() == packed.tolist() and base.t().reshape(-1)[2:].tolist() == packed.tolist()
        )

    def test_conjugates(self) -> None:
        def program(device: torch.device) -> Any:
            z = torch.complex(values(device, 3, 4), values(device, 3, 4) + 1)
            x, y = z.conj(), z[1:].t().conj()
            again = z[1:].conj().as_strided((3, 2), (2, 1))
            return [
                t.resolve_conj()
                for t in (
                    x.as_strided((2, 3), (4, 1), 1),
                    y.as_strided(y.size(), y.stride()),
                    x[1:].as_strided((3,), (2,)),
                    z[:, 1:].conj()[1].as_strided((2,), (2,)),
                    again[1:].as_strided((2, 2), (1, 1)),
                    again.as_strided((2,), (2,), again.storage_offset() + 1),
                )
            ]

        beside_eager(program)

    def test_no_grad_and_inference_mode(self) -> None:
        def program(device: torch.device) -> Any:
            leaf = values(device, 3, 4).requires_grad_()
            with torch.no_grad():
                x = leaf.t()
                x.as_strided((2, 3), x.stride()).mul_(2)
            with torch.inference_mode():
                y = values(device, 3, 4).t()
                y.as_strided((2, 3), y.stride()).mul_(2)
                return leaf, y.clone()

        beside_eager(program)


class TestRefused:
    @pytest.mark.parametrize(
        "call",
        [
            lambda x: x.as_strided((3, 3), (3, 1), x.storage_offset() + 1),
            lambda x: x.as_strided((2,), (1,), 0),
            lambda x: torch.as_strided(x, (10,), (1,)),
            lambda x: torch.as_strided_copy(x, (10,), (1,)),
            lambda x: x.as_strided_scatter(torch.zeros(10, device=x.device), (10,), (1,)),
            lambda x: x.as_strided_((10,), (1,)),
        ],
    )
    def test_elements_that_are_not_its_own(
        self, call: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        x = values(device, 4, 4)[1:, 1:]
        with pytest.raises(UnsupportedOpError) as raised:
            call(x)
        lines = str(raised.value).splitlines()
        assert "leaves the elements of a view that is not contiguous in memory" in lines[0]
        assert "test_as_strided.py" in lines[0]
        assert "float32[3, 3], whose elements are 5 to 13" in lines[1]
        assert "Next: call it on the tensor that this is a view of" in lines[2]

    def test_memory_of_a_view_that_eager_refuses(self, device: torch.device) -> None:
        x = torch.complex(values(device, 4, 4), values(device, 4, 4))[1:].conj()
        with pytest.raises(
            UnsupportedOpError, match="as_strided leaves the elements of a conjugate"
        ):
            x.as_strided((2,), (1,), 0)

    def test_in_place_with_gradients(self, device: torch.device) -> None:
        x = (values(device, 3, 4).requires_grad_() * 1).t()
        assert x.as_strided_(x.size(), x.stride()) is x
        with pytest.raises(
            UnsupportedOpError, match="as_strided_ of a view that is not contiguous in memory"
        ):
            x.as_strided_((12,), (1,))

    def test_what_eager_refuses(self, device: torch.device) -> None:
        x = values(device, 3, 4).t()
        with pytest.raises(RuntimeError, match="mismatch in length of strides and shape"):
            x.as_strided((3,), (1, 1))
        with pytest.raises(RuntimeError, match="expected src to have a size equal"):
            x.as_strided_scatter(torch.zeros(2, device=device), (3,), (1,))
        with pytest.raises(RuntimeError, match="Negative strides are not supported"):
            x.as_strided((3,), (-1,))
        with pytest.raises(TypeError):
            x.as_strided((3,))  # type: ignore[call-arg]


class TestATen:
    """Below Python, and by `torch.ops`, strides and offset are those of the memory that eager's views have."""

    def test_ops(self) -> None:
        def program(device: torch.device) -> Any:
            x = values(device, 3, 4).t()
            return (
                torch.ops.aten.as_strided(x, (4, 3), (1, 4)),
                torch.Tensor.stride(x),
                torch.Tensor.as_strided(x, (4,), (3,)),
            )

        beside_eager(program)

    def test_functions_of_other_tensors(self) -> None:
        x = torch.arange(6.0).view(2, 3).t()
        assert torch.as_strided(x, x.size(), x.stride()).equal(x)
        assert torch.as_strided.__name__ == "as_strided" and torch.as_strided.__doc__
        with pytest.raises(TypeError):
            torch.as_strided()  # type: ignore[call-overload]

    def test_functions_are_still_those_of_torch(self) -> None:
        """For pickle, the script compiler and a mode that sees every function."""

        def turned(x: Tensor) -> Tensor:
            return torch.as_strided(x, (2, 2), (1, 2))

        assert pickle.loads(pickle.dumps(torch.as_strided)) is torch.as_strided
        x = torch.arange(4.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            assert torch.jit.script(turned)(x).equal(turned(x))
        with torch.device("cpu"):
            assert turned(x).tolist() == [[0.0, 2.0], [1.0, 3.0]]

    def test_transforms_see_the_strides_that_aten_sees(self) -> None:
        def program(device: torch.device) -> Any:
            def weighted(t: Tensor) -> Tensor:
                x = t.t()[1:]
                weights = torch.arange(4.0, device=device).view(2, 2)
                return (x.as_strided(x.size(), x.stride(), x.storage_offset()) * weights).sum()

            return torch.func.grad(weighted)(values(device, 2, 3))

        beside_eager(program)

    def test_out(self) -> None:
        def program(device: torch.device) -> Any:
            x, out = values(device, 3, 4).t()[1:], torch.zeros(2, 2, device=device)
            (down, right), first = x.stride(), x.storage_offset()
            torch.as_strided_copy(x, (2, 2), (right, down), first + down, out=out)
            return out

        beside_eager(program)


COMPILED = """
def program(device):
    base = torch.arange(30.0).view(5, 6).to(device)
    leaf = torch.ones(5, 6).to(device).requires_grad_()
    found = []
    for x in (base.t(), base[1:], base[:, ::2], base[1:, 1:].t()):
        x.as_strided(x.size(), x.stride()).mul_(2)
        (down, right), rows = x.stride(), x.size(0)
        found.append(x.as_strided((rows - 1, 2, 2), (down, down, right), x.storage_offset()) + 1)
        x.as_strided((2, 2), (right, down), x.storage_offset() + right).add_(1)
    turned = (base * 2).t()
    found.append(torch.as_strided_copy(turned, (6, 5), turned.stride()))
    rows, ones = (base * 2)[1:], torch.ones(3).to(device)
    found += [torch.as_strided_copy(rows, (3,), (2,)), torch.as_strided_scatter(rows, ones, (3,), (2,), 8)]
    y = (leaf * 3).t()
    w = y.as_strided((5, 2, 5), (y.stride(0), y.stride(0), y.stride(1)))
    (w * torch.arange(50.0).view(5, 2, 5).to(device)).sum().backward()
    return [base.clone(), *found, leaf.grad]


expected = program(torch.device("cpu"))
for _ in range(5):
    got = program(ltc.lazy_device())
    ltc.mark_step(wait=True)
    print(all(torch.equal(a.detach().cpu(), b.detach()) for a, b in zip(got, expected, strict=True)))
print(ltc.metrics.counter_value("CompiledProgram") > 0)
"""


@pytest.mark.timeout(300)
def test_compiled(tmp_path: Path) -> None:
    out, err = child.run(
        COMPILED,
        timeout_s=280,
        LTC_COMPILE="sync",
        LTC_COMPILED_CACHE_DIR=empty_cache(tmp_path / "compiled"),
    )
    assert err == ""
    assert out.split() == ["True"] * 6


def test_as_strided_is_a_view(device: torch.device) -> None:
    x = values(device, 3, 4).t()
    again = x.as_strided((2, 3), x.stride())
    assert again._is_view() and again.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert ltc.is_lazy_tensor(again)


@pytest.mark.parametrize(
    "leave",
    [
        lambda x: x.as_strided((5, 5), (9, 9)),
        lambda x: torch.as_strided(x[1:], (4,), (4,), 1),
        lambda x: x.as_strided((), (), 12),
        lambda x: x.view(torch.int16).as_strided((2,), (24,)),
        lambda x: x.detach().as_strided_((13,), (1,)),
        lambda x: torch.ops.aten.as_strided.default(x.t(), [4, 4], [4, 1]),
    ],
)
def test_what_leaves_the_memory_is_refused_at_once(leave: Callable[[Tensor], Tensor]) -> None:
    def program(device: torch.device) -> Any:
        x = torch.arange(12.0).to(device).view(3, 4)
        with pytest.raises(RuntimeError, match="setStorage: .* out of bounds") as raised:
            leave(x)
        inside = [
            x.as_strided((3, 2), (4, 3)),
            x.as_strided((0,), (99,), 12),
            x.as_strided((), (), 11),
        ]
        words = str(raised.value).split("\n")[0].partition("setStorage")[2]
        return [words.partition(" (recorded")[0], *inside]

    beside_eager(program)
