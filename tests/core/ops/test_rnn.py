"""Recurrent layers have eager's values to the last bit, and no more ops: an LSTM is one op a layer and direction."""

from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from ltc_core import metrics
from ltc_core.ops import rnn
from ltc_core.runtime.devices import context, count_pending_ops
from ltc_core.settings import settings
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting

KINDS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "dropout": 0.3},
    {"bidirectional": True, "batch_first": True},
    {"bias": False, "num_layers": 2, "bidirectional": True},
]


def relu_rnn(*args: Any, **kwargs: Any) -> nn.RNN:
    return nn.RNN(*args, nonlinearity="relu", **kwargs)


def layer_ops(program: Any) -> int:
    with Counting() as counts:
        program()
        ltc.mark_step()
    return counts.ops.get("mkldnn_rnn_layer", 0)


def tolerance(kind: Any) -> tuple[float, float]:
    """rtol and atol beside eager. Eager's GRU writes in place, in memory of other strides: with vectors of 8 floats
    (AVX2) the last bits differ.
    """
    return (1e-5, 1e-6) if "GRU" in kind.__name__ else (0.0, 0.0)


@pytest.fixture(params=["in steps", "as one op"])
def long(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether sequences are long enough for GRUs and simple RNNs to be one op."""
    is_long = request.param == "as one op"
    monkeypatch.setattr(rnn, "_LONG", 1 if is_long else 1000)
    return is_long


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("replay", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, relu_rnn])
def test_training_and_evaluation(layer: Any, kind: dict[str, Any], replay: str, long: bool) -> None:
    def program(device: torch.device) -> Any:
        model = layer(5, 7, **kind).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x = torch.randn(4, 3, 5).to(device).requires_grad_()
        found = []
        torch.manual_seed(1)
        for _ in range(4):
            y, last = model(x)
            states = last if isinstance(last, tuple) else (last,)
            loss = y.square().sum() + sum(state.sum() for state in states)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [loss.detach(), *(state.detach() for state in states)]
            if device.type != "cpu":
                ltc.mark_step()
        model.eval()
        with torch.no_grad():
            found.append(model(x)[0])
        found.append(torch.autograd.grad(model(x)[0].sum(), x)[0])  # of a model that is not trained
        return [*found, x.grad, *(p.detach() for p in model.parameters())]

    with settings.override(replay=replay):
        beside_eager(program, *tolerance(layer), rounds=1)


@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
def test_a_long_sequence_is_one_op(layer: Any) -> None:
    def program(device: torch.device) -> Any:
        model = layer(3, 4, num_layers=2).to(device)
        x = torch.randn(100, 2, 3).to(device)
        y, _ = model(x)
        y.square().mean().backward()
        found = [y.detach(), *(p.grad for p in model.parameters())]
        if device.type != "cpu":
            assert sum(count_pending_ops().values()) < 40
        return found

    beside_eager(program, *tolerance(layer))


def derivatives(device: torch.device) -> Any:
    """Of all kinds, of a GRU and of its parts that are used."""
    model = nn.GRU(3, 4, bidirectional=True).to(device).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64).to(device).requires_grad_()
    y, last = model(x)
    (first,) = torch.autograd.grad(last.sin().sum(), x, retain_graph=True)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    names, params = zip(*model.named_parameters(), strict=True)

    def loss(*given: torch.Tensor) -> torch.Tensor:
        named = dict(zip(names, given, strict=True))
        return torch.func.functional_call(model, named, (x.detach(),))[0].sum()

    of_func = torch.func.grad(loss)(*(p.detach() for p in params))
    model.requires_grad_(False)
    frozen = torch.autograd.grad(model(x)[0].sum(), x)[0]
    return [first, slope.detach(), x.grad, *(p.grad for p in params), of_func, frozen]


@pytest.mark.usefixtures("long")
def test_derivatives() -> None:
    beside_eager(derivatives, 1e-9, 1e-9)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_lengths(layer: Any) -> None:
    def program(device: torch.device) -> Any:
        model = layer(3, 4, batch_first=True, bidirectional=True).to(device)
        found = []
        for length in (1, 2, 5, 1, 3, 7):
            y, _ = model(torch.randn(2, length, 3).to(device))
            y.square().sum().backward()
            found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        return found

    beside_eager(program, *tolerance(layer))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind: Any, bias: bool) -> None:
    def program(device: torch.device) -> Any:
        model = kind(5, 7, bias=bias).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x = torch.randn(4, 3, 5).to(device).requires_grad_()
        found = []
        for _ in range(4):
            state = None
            for step in x:
                state = model(step, state)
            loss = torch.cat(state if isinstance(state, tuple) else (state,)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
            if device.type != "cpu":
                ltc.mark_step()
        return [*found, x.grad, *(p.detach() for p in model.parameters())]

    beside_eager(program, *tolerance(kind), rounds=1)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_the_error_of_a_cell_is_that_of_eager(kind: Any) -> None:
    def program(device: torch.device) -> list[str]:
        cell, texts = kind(5, 7).to(device), []
        for x, h in (((3, 6), (3, 7)), ((3, 5), (3, 8)), ((3, 5), (2, 7))):
            state = torch.zeros(h, device=device)
            with pytest.raises(RuntimeError) as raised:
                cell(
                    torch.zeros(x, device=device), (state, state) if kind is nn.LSTMCell else state
                )
            texts.append(str(raised.value).splitlines()[0])
        return texts

    beside_eager(program)


def test_the_gradient_may_be_of_a_later_step() -> None:
    """What the backward reads of the forward crosses the cut."""

    def program(device: torch.device) -> Any:
        model = nn.LSTM(5, 7).to(device)
        x = torch.randn(4, 3, 5).to(device).requires_grad_()
        y = model(x)[0]
        if device.type != "cpu":
            ltc.mark_step()
        y.sum().backward()
        return x.grad

    beside_eager(program)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_is_one_op_a_layer_and_direction(kind: dict[str, Any]) -> None:
    model = nn.LSTM(5, 7, **kind).to(ltc.lazy_device())
    x = torch.randn(4, 3, 5, device=ltc.lazy_device())
    directions = 2 if kind.get("bidirectional") else 1
    assert layer_ops(lambda: model(x)) == kind.get("num_layers", 1) * directions


def test_where_eager_has_another_way_so_has_the_device() -> None:
    device = ltc.lazy_device()
    x = torch.randn(4, 3, 5, device=device)
    assert not layer_ops(lambda: nn.LSTM(5, 7, proj_size=3).to(device)(x))
    assert not layer_ops(lambda: nn.LSTM(5, 7).double().to(device)(x.double()))
    assert not layer_ops(lambda: nn.LSTM(5, 7).to(device)(x[:, :0]))
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not layer_ops(lambda: nn.LSTM(5, 7).to(device)(x))
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_an_error_is_that_of_eager(layer: Any) -> None:
    def program(device: torch.device) -> str:
        with pytest.raises((RuntimeError, ValueError)) as raised:
            layer(5, 7).to(device)(torch.randn(4, 3, 6).to(device))
        return str(raised.value).splitlines()[0]

    beside_eager(program)


# ---- packed sequences --------------------------------------------------------------------------------------------

PACKED: list[dict[str, Any]] = [*KINDS, {"num_layers": 3, "dropout": 0.3, "bidirectional": True}]
LENGTHS = ([5, 3, 1], [2, 2], [7, 1, 1, 1], [1], [4, 6, 2])


def packed(device: torch.device, lengths: list[int], is_sorted: bool = False) -> Any:
    torch.manual_seed(
        sum(lengths)
    )  # dropout draws from the stream of the device, this from the CPU's
    x = torch.randn(len(lengths), max(lengths), 3).to(device).requires_grad_()
    pack = nn.utils.rnn.pack_padded_sequence
    return x, pack(x, torch.tensor(lengths), batch_first=True, enforce_sorted=is_sorted)


def final(state: Any) -> list[torch.Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


@pytest.mark.parametrize("replay", ["never", "always"])
@pytest.mark.parametrize("kind", PACKED, ids=str)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, relu_rnn])
def test_packed_sequences(layer: Any, kind: dict[str, Any], replay: str) -> None:
    """Outputs, last states and gradients of all have the bits of eager, with and without dropout."""

    def program(device: torch.device) -> Any:
        model = layer(3, 4, **kind).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for seed, lengths in enumerate(LENGTHS):
            x, given = packed(device, lengths)
            torch.manual_seed(seed)
            y, state = model(given)
            padded, sizes = nn.utils.rnn.pad_packed_sequence(y, padding_value=0.5, total_length=8)
            assert sizes.tolist() == lengths and y.batch_sizes.device.type == "cpu"
            optimizer.zero_grad()
            (padded.square().mean() + sum(s.sum() for s in final(state))).backward()
            optimizer.step()
            found += [padded.detach(), x.grad, *(s.detach() for s in final(state))]
            found += [p.grad.clone() for p in model.parameters()]
        model.eval()
        with torch.no_grad():
            found.append(model(packed(device, [3, 2])[1])[0].data)
        with torch.inference_mode():
            y, _ = model(packed(device, [3, 3])[1])
            found.append(nn.utils.rnn.pad_packed_sequence(y)[0])
        return found

    with settings.override(replay=replay):
        beside_eager(program, 0.0, 0.0, rounds=1)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_lstms_with_projections_and_of_other_dtypes(kind: dict[str, Any]) -> None:
    """Those that oneDNN has no layer for; a gradient alone of the cell state, too."""

    def program(device: torch.device) -> Any:
        found = []
        for dtype, size in ((torch.float32, 2), (torch.float64, 0)):
            model = nn.LSTM(3, 4, proj_size=size, batch_first=True, **kind).to(device, dtype)
            x = torch.randn(2, 5, 3, dtype=dtype).to(device).requires_grad_()
            y, (h, c) = model(x)
            (of_cells,) = torch.autograd.grad(c.sum(), x, retain_graph=True)
            (y.square().sum() + h.sum()).backward()
            pack = nn.utils.rnn.pack_padded_sequence(
                x.detach(), torch.tensor([5, 2]), batch_first=True
            )
            of_pack = model(pack)[0].data
            found += [y, h, c, of_cells, x.grad, of_pack, *(p.grad for p in model.parameters())]
        return [t.detach() for t in found]

    beside_eager(program, 0.0, 0.0)


@pytest.fixture
def new_trace() -> None:
    """No step of another test is there: after so many of them all are forgotten, with their programs."""
    device = context(0)
    device.wait()
    device.trace.forget()
    device.compiler.forget()


@pytest.mark.usefixtures("new_trace")
def test_packed_sequences_are_one_op_of_any_lengths() -> None:
    """Other lengths of as many steps and rows are the same graph."""
    model = nn.LSTM(3, 4, num_layers=2, bidirectional=True).to("ltc")
    programs = []
    for lengths in ([5, 4, 3, 2], [5, 4, 4, 1], [5, 5, 2, 2], [5, 3, 3, 3]):
        _, given = packed(torch.device("ltc"), lengths, is_sorted=True)
        y, _ = model(given)
        y.data.square().mean().backward()
        assert sum(count_pending_ops().values()) < 60
        before = metrics.counter_value("UncachedCompile") or 0
        ltc.mark_step()
        programs.append((metrics.counter_value("UncachedCompile") or 0) - before)
        model.zero_grad()
    assert programs[2:] == [0, 0]


@pytest.mark.usefixtures("new_trace")
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_packed_sequences_of_any_sizes_share_programs(layer: Any) -> None:
    model = layer(3, 4, bidirectional=True).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    for k in range(14):
        x, given = packed(torch.device("ltc"), [9 + k, 3 + k % 4, 2])
        y, _ = nn.utils.rnn.pad_packed_sequence(model(given)[0])
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        before = metrics.counter_value("UncachedCompile") or 0
        ltc.mark_step()
        made.append((metrics.counter_value("UncachedCompile") or 0) - before)
        assert x.grad is not None
    assert made[-6:] == [0] * 6


def test_what_autograd_keeps_of_the_steps_is_freed() -> None:
    """With the output, and after the backward pass; a second one computes the steps again."""

    def program(device: torch.device) -> Any:
        model = nn.GRU(3, 4).to(device)
        x, given = packed(device, [4, 2])
        y, _ = model(given)
        loss = y.data.square().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x, retain_graph=True)[0]
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return [first, second, slope.detach(), torch.autograd.grad(slope.square().sum(), x)[0]]

    beside_eager(program, 1e-5, 1e-6)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_wrong_operands_of_packed_sequences_raise_at_the_call(layer: Any) -> None:
    model = layer(3, 4).to("ltc")
    for size, count, words in (
        (5, 2, "cannot be multiplied|input_size"),
        (3, 4, "dimension 0|hidden size"),
    ):
        hx = torch.zeros(1, count, 4, device="ltc")
        rows = torch.ones(3, size, device="ltc")
        given = nn.utils.rnn.PackedSequence(rows, torch.tensor([2, 1]))
        with pytest.raises(RuntimeError, match=words):
            model(given, (hx, hx) if layer is nn.LSTM else hx)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_inference_mode(layer: Any) -> None:
    def program(device: torch.device) -> Any:
        model, x = layer(3, 4, num_layers=2).to(device), torch.randn(5, 2, 3).to(device)
        with torch.inference_mode():
            y, state = model(x)
            if device.type != "cpu":
                ops = count_pending_ops()
                assert ops.get("linear", 0) <= 2 * 6 and ops.get("squeeze", 0) == 0, ops
        return [y, *final(state)]

    beside_eager(program, *tolerance(layer))
