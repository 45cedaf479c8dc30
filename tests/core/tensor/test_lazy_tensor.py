"""A lazy tensor behaves as a tensor does in Python: printing, converting, comparing, copying.

Saving and pickling are in test_saving_tensors.py, modules and optimizers in test_modules.py, random
numbers in test_random_numbers.py.
"""

import copy
import io
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ltc_core as ltc
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


def some_tensors(device: torch.device) -> list[Tensor]:
    return [
        torch.tensor([1.0, -2.5, 3e10], device=device),
        torch.tensor([[1, 2], [3, 4]], device=device),
        torch.tensor(1.5, device=device),
        torch.tensor(7, device=device),
        torch.tensor([], device=device),
        torch.zeros(2, 0, 3, device=device),
        torch.tensor([True, False], device=device),
        torch.tensor([1 + 2j, -1j], device=device),
        torch.tensor([0.5, math.inf, math.nan], dtype=torch.float64, device=device),
        torch.tensor([1, 2], dtype=torch.uint8, device=device),
        torch.tensor([0.1, 0.2], dtype=torch.bfloat16, device=device),
        torch.arange(3000.0, device=device),
        torch.arange(120.0, device=device).view(2, 3, 4, 5).transpose(1, 3),
    ]


class TestText:
    def test_repr_and_str_are_those_of_eager_with_the_device(self, device: torch.device) -> None:
        cpu = torch.device("cpu")
        for lazy, eager in zip(some_tensors(device), some_tensors(cpu), strict=True):
            for shown, expected in ((repr(lazy), repr(eager)), (str(lazy), str(eager))):
                # Eager puts the device before size=, dtype= and the like, after the values.
                plain = shown.replace(f" device='{device}',", "").replace(
                    f", device='{device}'", ""
                )
                assert f"device='{device}'" in shown
                assert "".join(plain.split()) == "".join(expected.split())

    def test_the_device_stands_where_eager_puts_it(self, device: torch.device) -> None:
        """Seen from a device of PyTorch's own: `meta` shows device, size, dtype in this order."""
        t = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
        assert repr(t) == f"tensor([1., 2.], device='{device}', dtype=torch.float64)"
        empty = torch.zeros(0, 3, device=device)
        assert repr(empty) == f"tensor([], device='{device}', size=(0, 3))"

    def test_autograd_is_shown(self, device: torch.device) -> None:
        x = torch.ones(2, device=device, requires_grad=True)
        assert repr(x) == f"tensor([1., 1.], device='{device}', requires_grad=True)"
        assert repr(x * 2) == f"tensor([2., 2.], device='{device}', grad_fn=<MulBackward0>)"
        parameter = nn.Parameter(x.detach())
        assert repr(parameter) == f"Parameter containing:\n{x!r}"

    def test_print_options(self, device: torch.device) -> None:
        t = torch.full((2, 2), 1 / 3, device=device)
        torch.set_printoptions(precision=2, linewidth=60)
        try:
            assert "0.33, 0.33" in repr(t) and "0.333" not in repr(t)
        finally:
            torch.set_printoptions(profile="default")

    def test_format(self, device: torch.device) -> None:
        t = torch.tensor(0.123456, device=device)
        assert f"{t:.3f} {t:>8.2f} {t:e}" == "0.123     0.12 1.234560e-01"
        assert f"{torch.tensor(42, device=device):05d}" == "00042"
        assert f"{torch.ones(2, device=device)}" == repr(torch.ones(2, device=device))
        assert f"{t:.2f}" == "0.12" and format(t, ".1f") == "0.1"
        with pytest.raises(TypeError, match="unsupported format string"):
            f"{torch.ones(2, device=device):.2f}"

    def test_printing_keeps_the_trace_going(self, device: torch.device) -> None:
        """A print in a loop costs one cut and changes nothing."""
        x = torch.ones(2, device=device)
        for _ in range(3):
            x = x * 2
            repr(x)
        assert x.tolist() == [8.0, 8.0]


class TestConversions:
    def test_to_python_numbers(self, device: torch.device) -> None:
        real, whole = torch.tensor(2.5, device=device), torch.tensor([[3]], device=device)
        assert (real.item(), whole.item()) == (2.5, 3)
        assert (float(real), int(real), bool(real), complex(real)) == (2.5, 2, True, 2.5 + 0j)
        assert (int(whole), float(whole), bool(whole)) == (3, 3.0, True)
        assert not torch.zeros(1, device=device)
        assert operator.index(whole) == 3 and [10, 11, 12, 13][whole] == 13
        assert list(range(torch.tensor(2, device=device))) == [0, 1]
        assert round(real.item(), 1) == 2.5 and math.floor(real) == 2 and abs(-real).item() == 2.5
        assert type(torch.tensor(True, device=device).item()) is bool
        assert torch.tensor(1 + 2j, device=device).item() == 1 + 2j

    @pytest.mark.parametrize(
        "convert",
        [
            float,
            int,
            bool,
            operator.index,
            lambda t: t.item(),
            lambda t: t.numpy(force=True).missing,
            len,
            iter,
            lambda t: "x" in t,
        ],
    )
    def test_refusals_are_those_of_eager(self, convert: Any, device: torch.device) -> None:
        for make in (lambda d: torch.ones(2, device=d), lambda d: torch.tensor(0.5, device=d)):
            try:
                expected: Any = convert(make("cpu"))
            except Exception as error:
                with pytest.raises(type(error)):
                    convert(make(device))
            else:
                got = convert(make(device))
                assert type(got) is type(expected) or ltc.is_lazy_tensor(got)

    def test_tolist(self, device: torch.device) -> None:
        cpu = torch.device("cpu")
        for lazy, eager in zip(some_tensors(device), some_tensors(cpu), strict=True):
            assert repr(lazy.tolist()) == repr(eager.tolist())

    def test_len_iteration_and_membership(self, device: torch.device) -> None:
        t = torch.arange(6, device=device).view(3, 2)
        assert len(t) == 3
        assert [row.tolist() for row in t] == [[0, 1], [2, 3], [4, 5]]
        first, (second, third) = t[0], t[1]
        assert (first.shape, second.item(), third.item()) == ((2,), 2, 3)
        assert 4 in t and 9 not in t
        assert [row.sum().item() for row in reversed(t)] == [9, 5, 1]
        assert sum(torch.ones(3, device=device)).item() == 3
        assert max(torch.tensor([1, 5, 2], device=device)).item() == 5
        assert sorted(torch.tensor([3, 1, 2], device=device)) == [1, 2, 3]
        for row in t:
            row += 1  # the rows are views
        assert t.sum().item() == 21

    def test_iterating_does_not_cut(self, device: torch.device) -> None:
        t = torch.arange(6.0, device=device).view(3, 2)
        ltc.mark_step()
        with Counting() as counted:
            total = torch.zeros(2, device=device)
            for row in t:
                total = total + row
        assert not counted.syncs and total.tolist() == [6.0, 9.0]

    def test_numpy_asks_for_a_cpu_copy(self, device: torch.device) -> None:
        t = torch.arange(4.0, device=device)
        for convert in (lambda: t.numpy(), lambda: np.asarray(t), lambda: np.array(t)):
            with pytest.raises(TypeError) as raised:
                convert()
            text = str(raised.value)
            assert f"can't convert {device} device type tensor to numpy" in text
            assert "Use Tensor.cpu() to copy the tensor to host memory first" in text
            assert "test_lazy_tensor.py" in text and "Next:" in text
        assert t.cpu().numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
        forced = t.requires_grad_().numpy(force=True)
        forced += 1
        assert t.tolist() == [0.0, 1.0, 2.0, 3.0] and forced.tolist() == [1.0, 2.0, 3.0, 4.0]

    def test_from_numpy_and_lists(self, device: torch.device) -> None:
        values = np.arange(4, dtype=np.float32).reshape(2, 2)
        made = [
            torch.from_numpy(values).to(device),
            torch.as_tensor(values, device=device),
            torch.tensor(values, device=device),
            torch.asarray(values, device=device),
            torch.tensor(values.tolist(), device=device),
        ]
        values += 1
        for t in made:
            assert t.device == device and t.dtype == torch.float32
            assert t.tolist() == [[0.0, 1.0], [2.0, 3.0]]
        nested = torch.tensor([torch.tensor(1.0, device=device), torch.tensor(2.0, device=device)])
        assert nested.tolist() == [1.0, 2.0]


class TestOperators:
    def test_comparisons_and_arithmetic(self) -> None:
        binary = [
            *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
            *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
            *(operator.mod, operator.pow, operator.matmul),
        ]
        bits = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]

        def program(device: torch.device) -> Any:
            x = torch.tensor([1.0, 2.0, 3.0], device=device)
            y = torch.tensor([3.0, 2.0, 2.5], device=device)
            i, j = torch.tensor([12, 7], device=device), torch.tensor([2, 1], device=device)
            found = [op(x, y) for op in binary] + [op(i, j) for op in bits]
            found += [op(i, j) for op in binary[:-2]]
            found += [2 + x, 2 - x, 2 * x, 2 / x, 2 // x, 2 % x, 2**x, x == 2, 2 < x, ~i, -x, +x]
            found += [
                abs(-x),
                x @ y,
                i / 2,
                i // 2,
                i + 0.5,
                x**2,
                x > y.mean(),
                1 & i,
                True ^ (x > 1),
            ]
            x += y
            x -= 1
            x *= y
            x /= 2
            x **= 2
            i //= 2
            i <<= 1
            i |= 1
            i ^= 3
            i &= 7
            return found, x, i

        beside_eager(program)

    def test_identity_hash_and_equality(self, device: torch.device) -> None:
        t, u = torch.ones(1, device=device), torch.ones(1, device=device)
        assert len({t, u, t}) == 2 and {t: "a"}[t] == "a"
        assert t.equal(u) and not t.equal(u + 1) and not t.equal(torch.ones(2, device=device))
        assert torch.equal(t, u) and torch.allclose(t, u + 1e-9)
        assert t in [t] and [u, t].index(t) == 0

    def test_type_promotion(self) -> None:
        dtypes = [torch.uint8, torch.int32, torch.float16, torch.float32, torch.float64, torch.bool]

        def program(device: torch.device) -> Any:
            return [
                torch.ones(2, dtype=a, device=device) + torch.ones(shape, dtype=b, device=device)
                for a in dtypes
                for b in dtypes
                for shape in ((2,), ())
            ]

        beside_eager(program)

    def test_number_types_are_not_confused(self) -> None:
        """2, 2.0 and True are equal in Python; as operands they give different dtypes."""

        def program(device: torch.device) -> Any:
            i = torch.tensor([1, 2], device=device)
            return [
                *(i * 2, i * 2.0, i * True, i + 1, i + 1.0, i + True, i + 1j),
                *(torch.full((2,), v, device=device) for v in (1, 1.0, True, 1j)),
                *(torch.arange(v, device=device) for v in (3, 3.0)),
                *(torch.arange(0, v, 1, device=device) for v in (3, 3.0)),
                *(torch.tensor(v, device=device) for v in (1, 1.0, True)),
                *(torch.where(i > 1, v, 0) for v in (1, 1.0, True)),
            ]

        beside_eager(program)

    def test_default_dtype(self, device: torch.device) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.zeros(1, device=device).dtype == torch.float64
            assert (torch.ones(1, dtype=torch.int64, device=device) / 2).dtype == torch.float64
            assert torch.tensor([0.5], device=device).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert (torch.ones(1, dtype=torch.int64, device=device) / 2).dtype == torch.float32


class TestCopies:
    def test_copy_copies_the_values(self, device: torch.device) -> None:
        """As the torch_xla guide says; a view is what a shallow copy would be."""
        t = torch.zeros(2, device=device)
        copied, deep, shallow = copy.copy(t), copy.deepcopy(t), t.view(2)
        t += 1
        assert (copied.tolist(), deep.tolist(), shallow.tolist()) == ([0, 0], [0, 0], [1, 1])
        copied += 5
        assert t.tolist() == [1.0, 1.0]

    def test_deepcopy_keeps_what_belongs_to_a_tensor(self, device: torch.device) -> None:
        t = torch.ones(2, 3, device=device, requires_grad=True)
        t.square().sum().backward()
        t.note = ["mine"]  # type: ignore[attr-defined]
        copied = copy.deepcopy(t)
        assert copied.requires_grad and copied.is_leaf and copied.device == device
        assert copied.note == ["mine"] and copied.note is not t.note  # type: ignore[attr-defined]
        assert copied.grad is not t.grad and copied.grad.equal(t.grad)
        part = copy.deepcopy(t.detach()[1])
        part += 1
        assert t.sum().item() == 6
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(t * 2)

    def test_deepcopy_keeps_shared_things_shared(self, device: torch.device) -> None:
        t = torch.zeros(2, device=device)
        first, second = copy.deepcopy([t, t])
        assert first is second and first is not t
        parameter = nn.Parameter(t.clone())
        made = copy.deepcopy(parameter)
        assert isinstance(made, nn.Parameter) and made.requires_grad

    def test_deepcopy_keeps_shared_memory_shared(self) -> None:
        def program(device: torch.device) -> object:
            x = torch.zeros(2, 3).to(device)
            module = nn.Linear(2, 2).to(device)
            module.register_buffer("whole", torch.zeros(4).to(device))
            module.register_buffer("part", module.whole[:2])  # type: ignore[index]
            nn.init.ones_(module.weight)
            module.weight.sum().backward()
            turned, row, whole, copied = copy.deepcopy((x.t(), x[0], x, module))
            row.add_(1)
            whole[1] = 7
            copied.part.add_(3)
            grad = copied.weight.grad
            return x, turned, row, whole, copied.whole, module.whole, copied.part, grad

        beside_eager(program)

    def test_attributes_and_slots(self, device: torch.device) -> None:
        t = torch.ones(2, 3, device=device)
        assert (t.is_cuda, t.is_cpu, t.is_meta, t.is_sparse, t.is_quantized) == (False,) * 5
        assert (t.layout, t.device.type, t.get_device()) == (torch.strided, device.type, 0)
        assert (t.numel(), t.nelement(), t.element_size(), t.nbytes, t.itemsize) == (6, 6, 4, 24, 4)
        assert t.type() and isinstance(t, torch.Tensor) and torch.is_tensor(t)
        assert isinstance(nn.Parameter(t), nn.Parameter)
        assert not isinstance(t, nn.Parameter)
        assert torch.is_floating_point(t) and not t.is_complex() and t.is_signed()


class TestConstructors:
    def test_factories(self) -> None:
        def program(device: torch.device) -> Any:
            d: Any = {"device": device}
            x = torch.arange(6.0, **d).view(2, 3)
            return [
                torch.zeros(2, 3, **d),
                torch.ones((2, 3), dtype=torch.int32, **d),
                torch.full((2,), 3.5, **d),
                torch.eye(3, 2, **d),
                torch.linspace(0, 1, 5, **d),
                torch.logspace(0, 2, 3, **d),
                torch.arange(1, 10, 3, **d),
                torch.tril_indices(3, 3, **d),
                torch.empty(0, **d),
                torch.empty(2, **d).fill_(1),
                torch.empty_strided((2, 2), (1, 2), **d).fill_(1),
                torch.scalar_tensor(2.0, **d),
                torch.complex(x, x),
                torch.hann_window(4, **d),
                torch.meshgrid(torch.arange(2, **d), torch.arange(3, **d), indexing="ij"),
                torch.zeros_like(x),
                torch.ones_like(x, dtype=torch.int64),
                torch.full_like(x, 2),
                torch.empty_like(x).zero_(),
                x.new_zeros(3),
                x.new_tensor([1, 2]),
                x.new_full((2,), 7),
                x.new_ones(2, dtype=torch.bool),
                torch.block_diag(x, x),
                torch.cartesian_prod(torch.arange(2, **d), torch.arange(2, **d)),
            ]

        beside_eager(program)

    def test_as_the_default_device(self, device: torch.device) -> None:
        with torch.device(device):
            t, model = torch.ones(2), nn.Linear(2, 1)
            assert torch.tensor([1.0]).device == torch.arange(3).device == device
        assert t.device == device and model.weight.device == device
        torch.set_default_device(device)
        try:
            assert (
                torch.zeros(1).device == device
                and nn.Linear(2, 1)(torch.ones(1, 2)).device == device
            )
        finally:
            torch.set_default_device(None)

    def test_likes_of_another_device(self, device: torch.device) -> None:
        lazy, eager = torch.ones(2, device=device), torch.ones(2)
        assert torch.zeros_like(lazy, device="cpu").device.type == "cpu"
        assert_same(torch.zeros_like(eager, device=device), torch.zeros(2))
        assert (
            torch.empty_like(lazy, device="meta").is_meta and lazy.new_zeros(1, device="cpu").is_cpu
        )
        assert lazy.to("meta").is_meta
        assert lazy.to(eager).device.type == "cpu" and eager.to(lazy).device == device
        assert lazy.to(torch.float64).dtype == torch.float64
        assert lazy.to("cpu", torch.int32).dtype == torch.int32
        assert lazy.type(torch.int64).device == device and lazy.half().dtype == torch.float16


def _export(linear: torch.nn.Linear, x: torch.Tensor) -> Any:
    return torch.export.draft_export(linear, (x,))


def _save_traced(linear: torch.nn.Linear, x: torch.Tensor) -> Any:
    torch.jit.save(torch.jit.trace(linear, (x,)), io.BytesIO())  # type: ignore[no-untyped-call]


def _multiply_sparse(linear: torch.nn.Linear, x: torch.Tensor) -> Any:
    return torch.eye(3).to_sparse_csr().to(x.device) @ x


def _pass_by_capsule(linear: torch.nn.Linear, x: torch.Tensor) -> Any:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)) + 1


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (_export, "torch.export.export(copy.deepcopy(module).cpu(), args)"),
        (_save_traced, "torch.jit.save(module.cpu(), file)"),
        (_multiply_sparse, "to_dense()"),
        (_pass_by_capsule, "torch.from_dlpack(t.cpu())"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of PyTorch: sparse tensors are in beta
def test_what_is_refused_names_what_works(
    call: Callable[[torch.nn.Linear, torch.Tensor], Any], instead: str
) -> None:
    x = torch.ones(3, 3, device=ltc.lazy_device())
    with pytest.raises(ltc.errors.LtcError, match=re.escape(instead)):
        call(torch.nn.Linear(3, 3).to(x.device), x)
    on_cpu = torch.nn.Linear(3, 3).to(x.device).cpu()
    torch.jit.save(torch.jit.trace(on_cpu, (x.cpu(),)), io.BytesIO())  # type: ignore[no-untyped-call]
    assert torch.export.export(on_cpu, (x.cpu(),)).module()(x.cpu()).shape == (3, 3)
