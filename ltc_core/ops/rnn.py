"""Recurrent layers as eager runs them on the CPU.

For a device that PyTorch does not know, each time step of `torch.lstm` and `torch.gru` becomes some thirty small ops.
Eager on the CPU calls the layer of oneDNN for LSTMs, in the cases of `_is_onednn`. For GRUs and simple RNNs it
multiplies the inputs of all steps at once, and has ten ops a step. So does this device, in the same cases. Over long
sequences, GRUs and simple RNNs are one op, with the kernels of eager (`graph.recurrent`): thousands of steps would make
graphs of a hundred thousand ops. So are all layers of packed sequences, and LSTMs that oneDNN has no layer for.
`register_rnn` is called once, at import. Sources: ATen/native/RNN.cpp and "mkldnn_rnn" in ATen/native/mkldnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ltc_core.ops.composites import RULES
from ltc_core.ops.recurrent_layer import may_be_one_op, one_op
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.settings import settings

__all__ = ["register_rnn"]

aten = torch.ops.aten
Tensor = torch.Tensor
_LONG = 128  # steps of all layers and directions, from which they are one op
_LSTM = 2  # `ideep::rnn_kind::LSTM`
_libraries: list[Any] = []


def _lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_onednn(input, hx, params):
        layers = has_biases, num_layers, dropout, train, bidirectional
        if not (dropout and train) and _is_whole(input, hx, params, num_layers, bidirectional):
            layout = has_biases, num_layers, bidirectional, batch_first

            def again(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor]) -> Any:
                return _composite(aten.lstm.input, x, hx, params, *layers, batch_first)

            return one_op("lstm", again, layout, input, None, hx, params)  # type: ignore[return-value]
        return _composite(  # type: ignore[no-any-return]
            aten.lstm.input, input, hx, params, *layers, batch_first
        )
    with_grad = torch.is_grad_enabled()  # the kernel does not read `train`: see `runs_with_grad`
    h, c = hx[0].contiguous(), hx[1].contiguous()
    weights = iter(params)
    hidden: list[Tensor] = []
    cells: list[Tensor] = []

    def run(x: Tensor, is_reverse: bool) -> Tensor:
        of_input, of_hidden = next(weights), next(weights)
        if has_biases:
            biases = next(weights), next(weights)
        else:
            biases = of_input.new_zeros(of_input.shape), of_hidden.new_zeros(of_hidden.shape)
        k = len(hidden)
        y, h_k, c_k, _ = aten.mkldnn_rnn_layer.default(
            x.contiguous(), of_input, of_hidden, *biases, h[k], c[k], is_reverse, [], _LSTM, h.shape[2],
            num_layers, has_biases, bidirectional, batch_first, with_grad,
        )  # fmt: skip
        hidden.append(h_k)
        cells.append(c_k)
        return y  # type: ignore[no-any-return]

    y = _stacked(run, input, num_layers, dropout if train else 0.0, bidirectional, batch_first)
    return y, torch.stack(hidden), torch.stack(cells)


def _stacked(
    run: Callable[[Tensor, bool], Tensor],
    x: Tensor,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> Tensor:
    """The output of layers on each other; `run` is one of them, in the direction of time or against it."""
    if batch_first:
        x = x.transpose(0, 1)
    for layer in range(num_layers):
        outputs = [
            run(x, is_reverse) for is_reverse in ((False, True) if bidirectional else (False,))
        ]
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x


def _is_onednn(input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Whether eager takes oneDNN for these operands on the CPU, in float32. Other dtypes depend on the processor."""
    if not (torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()) or not input.numel():
        return False
    has_projections = hx[0].shape[2] != hx[1].shape[2]
    return (
        not has_projections and _is_as_on_cpu(input, *hx, *params) and input.dtype is torch.float32
    )


def _is_as_on_cpu(*operands: Tensor) -> bool:
    """Whether these operands are computed as eager does on the CPU: all of one dtype, and no autocast."""
    has_cpu_kernels = settings.device == "cpu" and settings.executor in ("reference", "inductor")
    if not has_cpu_kernels and settings.executor != "jax":  # JAX has rules for the same ops
        return False
    first = operands[0]
    if torch.is_autocast_enabled(first.device.type) or StorageTypes.from_settings() is not None:
        return False
    return all(t.dtype is first.dtype and t.device == first.device for t in operands)


# ---- GRU and simple RNN ----------------------------------------------------------------------------------------------

# (the products of the input, the hidden state, its weight, its bias or None) -> the next hidden state
Cell = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _gru_cell(product: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    of_input = product.chunk(3, 1)
    of_hidden = F.linear(hidden, weight, bias).chunk(3, 1)
    reset = (of_hidden[0] + of_input[0]).sigmoid()
    update = (of_hidden[1] + of_input[1]).sigmoid()
    new = (of_input[2] + of_hidden[2] * reset).tanh()
    return (hidden - new) * update + new


def _simple_cell(
    activation: Callable[[Tensor], Tensor],
    product: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    return activation(F.linear(hidden, weight, bias) + product)


def _layers(
    op: torch._ops.OpOverload,
    cell: Cell,
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """`op` for a whole sequence, with `cell` at each step."""
    if not input.numel() or not _is_as_on_cpu(input, hx, *params):
        return _composite(  # type: ignore[no-any-return]
            op,
            input,
            hx,
            params,
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
    num_steps = input.shape[batch_first] * num_layers * (1 + bidirectional)
    if num_steps >= _LONG and not (dropout and train) and may_be_one_op():
        layout = has_biases, num_layers, bidirectional, batch_first

        def again(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor]) -> Any:
            return _in_steps(
                cell, x, hx[0], params, has_biases, num_layers, 0.0, bidirectional, batch_first
            )

        return one_op(op._opname, again, layout, input, None, [hx], params)  # type: ignore[return-value]
    return _in_steps(
        cell,
        input,
        hx,
        params,
        has_biases,
        num_layers,
        dropout if train else 0.0,
        bidirectional,
        batch_first,
    )


def _in_steps(
    cell: Cell,
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Layers with the ops of `cell` for each step."""
    weights, hiddens = iter(params), iter(hx.unbind(0))
    last: list[Tensor] = []

    def run(x: Tensor, is_reverse: bool) -> Tensor:
        steps = list(_steps(cell, x, next(hiddens), weights, has_biases, is_reverse))
        last.append(steps[-1])
        return torch.stack(steps[::-1] if is_reverse else steps)

    y = _stacked(run, input, num_layers, dropout, bidirectional, batch_first)
    return y, torch.stack(last)


def _steps(
    cell: Cell,
    x: Tensor,
    hidden: Tensor,
    weights: Iterator[Tensor],
    has_biases: bool,
    is_reverse: bool,
) -> Iterator[Tensor]:
    """The hidden state after each step of one layer and direction, in the order in which they are made."""
    of_input, of_hidden = next(weights), next(weights)
    bias, hidden_bias = (next(weights), next(weights)) if has_biases else (None, None)
    products = F.linear(x, of_input, bias).unbind(0)
    for product in reversed(products) if is_reverse else products:
        hidden = cell(product, hidden, of_hidden, hidden_bias)
        yield hidden


# ---- packed sequences ------------------------------------------------------------------------------------------------


def _packed(
    op: torch._ops.OpOverload,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Sequence[Tensor]:
    """`op` for packed sequences. As ops for each step, each set of lengths would be another graph."""
    kind = op._opname
    states = list(hx) if kind == "lstm" else [hx]
    layers = has_biases, num_layers, dropout, train, bidirectional
    if not _is_packed(data, batch_sizes, states) or not _is_whole(
        data, states, params, num_layers, bidirectional
    ):
        return _composite(op, data, batch_sizes, hx, params, *layers)  # type: ignore[no-any-return]
    drops = dropout > 0 and train
    num_parts = num_layers if drops else 1  # eager draws between two layers
    num_params, num_states = len(params) // num_parts, states[0].shape[0] // num_parts
    layout = has_biases, num_layers // num_parts, 0.0, False, bidirectional

    def again(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor]) -> Any:
        state = hx if kind == "lstm" else hx[0]
        return _composite(op, x, batch_sizes, state, params, *layout)

    sizes = batch_sizes.to(data.device)
    last: list[Sequence[Tensor]] = []
    for k in range(num_parts):
        own = params[k * num_params : (k + 1) * num_params]
        first = (
            [state.narrow(0, k * num_states, num_states) for state in states] if drops else states
        )
        directions = has_biases, layout[1], bidirectional, False
        data, *ended = one_op(kind, again, directions, data, sizes, first, own)
        last.append(ended)
        if drops and k < num_parts - 1:
            data = torch.dropout(data, dropout, True)
    if not drops:
        return data, *last[0]
    return data, *(torch.cat(parts) for parts in zip(*last, strict=True))


def _is_packed(data: Tensor, batch_sizes: Tensor, hx: Sequence[Tensor]) -> bool:
    """Whether these are packed sequences; eager's own kernel says what is wrong with others."""
    is_list = (
        batch_sizes.device.type == "cpu" and batch_sizes.dim() == 1 and batch_sizes.numel() > 0
    )
    if not is_list or batch_sizes.dtype is not torch.int64 or data.dim() != 2:
        return False
    sizes = batch_sizes.tolist()
    is_sorted = all(a >= b > 0 for a, b in zip(sizes, sizes[1:], strict=False))
    return is_sorted and sum(sizes) == data.shape[0] and hx[0].shape[1:2] == (sizes[0],)


def _is_whole(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    num_layers: int,
    bidirectional: bool,
) -> bool:
    """Whether a layer may be one op, whose operands eager takes."""
    if not input.numel() or not may_be_one_op() or not _is_as_on_cpu(input, *hx, *params):
        return False
    num_directions = num_layers * (2 if bidirectional else 1)
    fits = all(state.dim() == 3 and state.shape[0] == num_directions for state in hx)
    return fits and len(params) % num_directions == 0 and input.shape[-1] == params[0].shape[1]


# ---- one step --------------------------------------------------------------------------------------------------------


def _one_step(
    op: torch._ops.OpOverload,
    cell: Cell,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """`op`, a cell of `nn.GRUCell` or `nn.RNNCell`, as eager computes it on the CPU."""
    if not _fits(input, hx, w_ih, w_hh, b_ih, b_hh):
        return _composite(op, input, hx, w_ih, w_hh, b_ih, b_hh)  # type: ignore[no-any-return]
    return cell(F.linear(input, w_ih, b_ih), hx, w_hh, b_hh)


def _lstm_step(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`lstm_cell`, of `nn.LSTMCell`, as eager computes it on the CPU."""
    if not _fits(input, hx[0], w_ih, w_hh, b_ih, b_hh) or hx[0].shape != hx[1].shape:
        return _composite(  # type: ignore[no-any-return]
            aten.lstm_cell.default, input, hx, w_ih, w_hh, b_ih, b_hh
        )
    gates = F.linear(hx[0], w_hh, b_hh) + F.linear(input, w_ih, b_ih)
    enters, stays, new, leaves = gates.chunk(4, 1)
    cells = stays.sigmoid() * hx[1] + enters.sigmoid() * new.tanh()
    return leaves.sigmoid() * cells.tanh(), cells


def _fits(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> bool:
    """Whether operands are such as eager takes; its own kernel says what is wrong with others."""
    biases = [b for b in (b_ih, b_hh) if b is not None]
    if not input.dim() == hx.dim() == 2 or not _is_as_on_cpu(input, hx, w_ih, w_hh, *biases):
        return False
    is_input = input.shape[1] == w_ih.shape[1] and input.shape[0] == hx.shape[0]
    return is_input and hx.shape[1] == w_hh.shape[1] and len(biases) != 1


def _composite(op: torch._ops.OpOverload, *args: Any) -> Any:
    """PyTorch's own kernel, made of other ops; `op.decompose` may be another one, written in Python."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def register_rnn() -> None:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    cells: dict[str, Cell] = {
        "gru": _gru_cell,
        "rnn_tanh": partial(_simple_cell, torch.tanh),
        "rnn_relu": partial(_simple_cell, torch.relu),
    }
    kernels: dict[str, Callable[..., Any]] = {
        "lstm.input": _lstm,
        "lstm.data": partial(_packed, aten.lstm.data),
        "lstm_cell": _lstm_step,
    }
    for name, cell in cells.items():
        whole, step = getattr(aten, name).input, getattr(aten, f"{name}_cell").default
        kernels[f"{name}.input"] = partial(_layers, whole, cell)
        kernels[f"{name}.data"] = partial(_packed, getattr(aten, name).data)
        kernels[f"{name}_cell"] = partial(_one_step, step, cell)
    for name, kernel in kernels.items():
        packet, _, overload = name.partition(".")
        RULES[getattr(getattr(aten, packet), overload or "default")] = kernel  # in inference mode
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl(name, kernel, key)
    _libraries.append(library)
