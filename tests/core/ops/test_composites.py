"""Ops made of other ops: recurrent cells with their gradients, packed sequences, dropout, draws like a tensor.

Each is compared with the kernel that eager PyTorch runs on the CPU; what it draws, to the last bit.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.ops.composites import RULES
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting

aten = torch.ops.aten


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


def test_every_rule_takes_what_its_op_takes() -> None:
    """An op that is called with an argument its rule does not know would be a TypeError for the user."""
    for op, rule in RULES.items():
        parameters = inspect.signature(rule).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        positional = [a for a in op._schema.arguments if not a.kwarg_only]
        assert takes_all or len(parameters) >= len(positional), op
        required = [
            p for p in parameters.values() if p.default is p.empty and p.kind < p.VAR_KEYWORD
        ]
        assert len([p for p in required if p.kind is not p.VAR_POSITIONAL]) <= len(positional), op


class TestRecurrentCells:
    """The fused cells have no kernel on the CPU; eager runs several ops there."""

    CELLS: dict[str, Callable[..., nn.Module]] = {
        "lstm": nn.LSTM,
        "gru": nn.GRU,
        "rnn": nn.RNN,
    }

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("name", CELLS)
    def test_a_layer_forward_and_backward(self, name: str, bias: bool) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            layer = self.CELLS[name](3, 4, num_layers=2, bias=bias, bidirectional=True).to(device)
            x = torch.randn(5, 2, 3).to(device).requires_grad_()
            out, state = layer(x)
            parts = [out, *(state if isinstance(state, tuple) else [state])]
            sum(((i + 1) * p).sin().sum() for i, p in enumerate(parts)).backward()
            return [p.detach() for p in parts], x.grad, [p.grad for p in layer.parameters()]

        beside_eager(program, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
    @pytest.mark.parametrize("bias", [True, False])
    def test_a_cell_with_a_state(self, cell: Callable[..., nn.Module], bias: bool) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            made = cell(3, 4, bias=bias).to(device)
            x = torch.randn(2, 3).to(device).requires_grad_()
            h = torch.randn(2, 4).to(device).requires_grad_()
            c = torch.randn(2, 4).to(device).requires_grad_()
            state = (h, c) if cell is nn.LSTMCell else h
            for _ in range(3):
                state = made(x, state)
            out = state[0] if isinstance(state, tuple) else state
            (out**2).sum().backward()  # the cell state alone gets no gradient
            return out.detach(), x.grad, h.grad, c.grad, [p.grad for p in made.parameters()]

        beside_eager(program, rtol=1e-4, atol=1e-6)

    def test_only_the_cell_state_has_a_gradient(self) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            made = nn.LSTMCell(3, 4).to(device)
            x = torch.randn(2, 3).to(device).requires_grad_()
            _, c = made(x)
            c.sum().backward()
            return x.grad, [p.grad for p in made.parameters()]

        beside_eager(program, rtol=1e-4, atol=1e-6)

    def test_one_graph_without_a_fallback(self, device: torch.device) -> None:
        layer = nn.LSTM(3, 4).to(device)
        x = torch.ones(5, 2, 3, device=device)
        with Counting() as counted:
            layer(x)[0].sum().backward()
            ltc.mark_step()
        assert counted.syncs == {"MarkStep": 1} and not counted.fallbacks


class TestPackedSequences:
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("enforce_sorted", [True, False])
    def test_there_and_back_with_gradients(self, batch_first: bool, enforce_sorted: bool) -> None:
        lengths = [4, 2, 1] if enforce_sorted else [1, 4, 2]

        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            x = torch.randn(3, 4, 2) if batch_first else torch.randn(4, 3, 2)
            x = x.to(device).requires_grad_()
            packed = rnn.pack_padded_sequence(
                x, torch.tensor(lengths), batch_first=batch_first, enforce_sorted=enforce_sorted
            )
            layer = nn.GRU(2, 3).to(device)
            out, _ = layer(packed)
            padded, got = rnn.pad_packed_sequence(out, batch_first=batch_first, padding_value=-1.0)
            (padded**2).sum().backward()
            wider, _ = rnn.pad_packed_sequence(out, batch_first=batch_first, total_length=6)
            return packed.data.detach(), padded.detach(), got.tolist(), wider.detach(), x.grad

        beside_eager(program, rtol=1e-4, atol=1e-6)

    def test_it_asks_for_no_values(self, device: torch.device) -> None:
        x = torch.ones(4, 3, 2, device=device, requires_grad=True)
        with Counting() as counted:
            packed = rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]))
            padded, _ = rnn.pad_packed_sequence(packed)
            padded.sum().backward()
        assert not counted.syncs and not counted.fallbacks
        assert x.grad is not None and x.grad.sum().item() == 14

    @pytest.mark.parametrize(
        ("lengths", "text"),
        [
            ([4, 1, 0], "greater than 0"),
            ([1, 4, 2], "sorted"),
            ([4, 2], "batch_size"),
            ([4, 2, 1, 1], "batch_size"),
        ],
    )
    def test_wrong_lengths(self, lengths: list[int], text: str, device: torch.device) -> None:
        x = torch.ones(4, 3, 2)
        for batch_first in (False, True):
            if batch_first:
                x = x.transpose(0, 1).contiguous()
            with pytest.raises(RuntimeError, match=text):
                rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first)
            with pytest.raises(RuntimeError, match=text):
                rnn.pack_padded_sequence(x.to(device), torch.tensor(lengths), batch_first)

    @pytest.mark.parametrize("batch_first", [False, True])
    def test_lengths_beyond_the_batch(self, batch_first: bool, device: torch.device) -> None:
        """Eager reads what lies behind the batch."""
        x = torch.ones((3, 4, 2) if batch_first else (4, 3, 2), device=device)
        with pytest.raises(RuntimeError, match="lengths go beyond the batch: 5 of 4 steps"):
            rnn.pack_padded_sequence(x, torch.tensor([5, 2, 1]), batch_first)


class TestDropout:
    KINDS: dict[str, Callable[[Tensor, float], Tensor]] = {
        "dropout": F.dropout,
        "in place": lambda x, p: F.dropout(x.clone(), p, inplace=True),
        "1d": lambda x, p: F.dropout1d(x.view(4, 10, 10), p),
        "2d": lambda x, p: F.dropout2d(x.view(2, 8, 5, 5), p),
        "alpha": lambda x, p: F.alpha_dropout(x, p, training=True),
        "feature alpha": lambda x, p: F.feature_alpha_dropout(x.view(4, 10, 10), p, training=True),
        "native": lambda x, p: torch.native_dropout(x, p, True)[0],
    }

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_dtypes_that_eager_may_refuse(self, dtype: torch.dtype) -> None:
        """PyTorch 2.13 refuses all of them, 2.15 no longer does."""

        def program(device: torch.device) -> Any:
            torch.manual_seed(5)
            return F.dropout(torch.ones(100, device=device).to(dtype))

        try:
            program(torch.device("cpu"))
        except RuntimeError as refusal:
            assert re.search("result type|not implemented", str(refusal))
            with pytest.raises(RuntimeError, match="result type|not implemented"):
                program(ltc.lazy_device())
        else:
            beside_eager(program)
        x = torch.ones(4, dtype=dtype)
        assert torch.equal(F.dropout(x.to(ltc.lazy_device()), 0.5, training=False).cpu(), x)

    @pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("kind", KINDS)
    def test_mask_scale_and_gradient_are_eagers(self, kind: str, p: float) -> None:
        def program(device: torch.device) -> Any:
            x = torch.linspace(-1, 1, 400).to(device).requires_grad_()
            torch.manual_seed(5)
            out = self.KINDS[kind](x, p)
            out.sum().backward()
            return out.detach(), x.grad, torch.rand(2, device=device)

        beside_eager(program, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(5)
            return F.dropout(torch.ones(100, dtype=dtype, device=device), 0.3)

        beside_eager(program)

    def test_other_layouts(self) -> None:
        """The draws follow eager's order in memory, not the order of the elements."""

        def program(device: torch.device) -> Any:
            x = torch.arange(1.0, 121.0, device=device)
            torch.manual_seed(5)
            return [
                F.dropout(t)
                for t in (
                    x.view(10, 12).t(),
                    x.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
                    x[::3],
                    x.view(120, 1).expand(120, 2),
                )
            ]

        beside_eager(program)

    def test_so_many_are_zero_and_the_mean_stays(self, device: torch.device) -> None:
        torch.manual_seed(0)
        out = F.dropout(torch.ones(100_000, device=device), 0.3).cpu()
        assert abs((out == 0).float().mean() - 0.3) < 0.01 and abs(out.mean() - 1) < 0.01
        assert out.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]

    def test_each_step_drops_others_with_one_program(self, device: torch.device) -> None:
        torch.manual_seed(0)
        with Counting() as counted:
            outs = []
            for _ in range(5):
                outs.append(F.dropout(torch.ones(50, device=device)))
                ltc.mark_step()
        assert counted.compiles <= 2
        assert len({tuple(out.tolist()) for out in outs}) == 5

    def test_evaluation_drops_nothing_and_draws_nothing(self, device: torch.device) -> None:
        torch.manual_seed(0)
        state = ltc.get_rng_state().cpu()
        model = nn.Sequential(nn.Dropout(), nn.AlphaDropout()).to(device).eval()
        assert model(torch.ones(4, device=device)).tolist() == [1.0] * 4
        out, mask = torch.native_dropout(torch.ones(4, device=device), 0.5, False)
        assert out.tolist() == [1.0] * 4 and mask.all().item()
        assert ltc.get_rng_state().cpu().equal(state)

    def test_a_wrong_probability(self, device: torch.device) -> None:
        for call in (
            lambda: F.dropout(torch.ones(3, device=device), 1.5),
            lambda: torch.dropout(torch.ones(3, device=device), -0.5, True),
        ):
            with pytest.raises((ValueError, RuntimeError), match="dropout probability"):
                call()


class TestLike:
    CALLS: dict[str, Callable[[Tensor], Tensor]] = {
        "rand": torch.rand_like,
        "randn": torch.randn_like,
        "randn of a dtype": lambda t: torch.randn_like(t, dtype=torch.float64),
        "randint": lambda t: torch.randint_like(t, 9),
        "randint from": lambda t: torch.randint_like(t, 3, 9),
        "randint of a dtype": lambda t: torch.randint_like(t, 9, dtype=torch.int64),
        "randint by a tensor": lambda t: torch.randint_like(t, torch.tensor(9, device=t.device)),
        "rand in a layout": lambda t: torch.rand_like(t, memory_format=torch.contiguous_format),
    }

    @pytest.mark.parametrize("name", CALLS)
    def test_draws_are_eagers(self, name: str) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(2)
            plain = torch.ones(30, device=device)
            return self.CALLS[name](plain), self.CALLS[name](plain.view(5, 6).t())

        beside_eager(program)

    @pytest.mark.skipif(
        "generator" not in aten.rand_like.overloads(), reason="this torch takes no generator there"
    )
    def test_with_a_generator(self) -> None:
        def program(device: torch.device) -> Any:
            g = torch.Generator(device).manual_seed(3)
            t = torch.ones(20, device=device)
            return (
                torch.rand_like(t, generator=g),
                torch.randn_like(t, generator=g),
                torch.randint_like(t, 9, generator=g),
                torch.randint_like(t, 3, 9, generator=g),
            )

        beside_eager(program)

    def test_an_empty_range(self, device: torch.device) -> None:
        for low, high in ((0, 0), (5, 3)):
            with pytest.raises(RuntimeError, match="from.*to|high|expected"):
                torch.randint_like(torch.ones(3, device=device), low, high).cpu()
        ltc.wait_device_ops()


def test_questions_about_metadata_need_no_values() -> None:
    def program(device: torch.device) -> Any:
        x = torch.ones(2, 2, device=device)
        y = torch.ones(2, 3, device=device) * 2
        pairs = [
            (x, x),
            (x, x.detach()),
            (x, x.t()),
            (x, x[0]),
            (x, y),
            (y, y.view(3, 2)),
            (x[0], x[1]),
        ]
        pairs += [(x[1], x[1]), (y, y.clone()), (y[0], y)]
        ops = (aten.is_same_size, aten._has_same_storage_numel, aten.is_set_to)
        return [op(a, b) for a, b in pairs for op in ops]

    with Counting() as counted:
        beside_eager(program)
    assert not counted.syncs and not counted.fallbacks


def test_parts_of_an_unsafe_split_share_memory_as_in_eager() -> None:
    def program(device: torch.device) -> list[torch.Tensor]:
        x = torch.arange(6.0).to(device)
        parts = [
            *torch.unsafe_chunk(x, 2),
            *torch.unsafe_split(x, 4),
            *torch.unsafe_split_with_sizes(x, [1, 5]),
        ]
        parts[0].add_(1)
        x.mul_(2)
        return [x, *parts]

    beside_eager(program)


def test_allclose_compares_on_the_device(device: torch.device) -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    fallbacks = metrics.num_fallbacks()
    for other in (x.clone(), x * (1 + 1e-6), x + 1, torch.ones(4)):
        for equal_nan in (False, True):
            found = torch.allclose(x.to(device), other.to(device), equal_nan=equal_nan)
            assert found is torch.allclose(x, other, equal_nan=equal_nan)
    assert torch.allclose(torch.arange(3, device=device), torch.arange(3, device=device))
    assert metrics.num_fallbacks() == fallbacks


def test_values_of_a_matrix_are_eagers_without_vectors() -> None:
    """Other kernels of LAPACK compute them, and round otherwise. With a derivative, eager takes the vectors too."""

    def values(x: Tensor) -> list[Tensor]:
        square = x @ x.T
        return [
            torch.linalg.svdvals(x),
            torch.linalg.eigvalsh(square),
            torch.linalg.eigvalsh(square, "U"),
            torch.linalg.cond(x),
            torch.linalg.matrix_norm(x, "nuc"),
        ]

    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        x = torch.randn(20, 15).to(device)
        leaf = x.clone().requires_grad_()
        sum(v.sum() for v in values(leaf)).backward()
        with torch.no_grad():
            found = values(leaf)
        with torch.inference_mode():
            found += [v.clone() for v in values(x)]
        by_func = torch.func.grad(lambda t: torch.linalg.svdvals(t).sum())(x)
        return [*values(x), *values(leaf), *found, by_func, leaf.grad]

    beside_eager(program, rtol=0, atol=0)
