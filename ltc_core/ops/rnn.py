"""Recurrent layers as eager runs them on the CPU.

For a device that PyTorch does not know, each time step of `torch.lstm` and `torch.gru` becomes some thirty small ops.
Eager on the CPU calls the layer of oneDNN for LSTMs, in the cases of `_is_onednn`. For GRUs and simple RNNs it
multiplies the inputs of all steps at once, and has ten ops a step. So does this device, in the same cases. Over long
sequences, GRUs and simple RNNs are one op, with the kernels of eager (`graph.recurrent`): thousands of steps would make
graphs of a hundred thousand ops.
`register_rnn` is called once, at import. Sources: ATen/native/RNN.cpp and "mkldnn_rnn" in ATen/native/mkldnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ltc_core.graph.recurrent import LAYER, LAYER_GRAD
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
        return _composite(  # type: ignore[no-any-return]
            aten.lstm.input,
            *(input, hx, params, has_biases, num_layers, dropout, train, bidirectional),
            batch_first,
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
    if num_steps >= _LONG and not (dropout and train) and _may_be_one_op():
        return _Layer.apply(  # type: ignore[no-untyped-call, no-any-return]
            op._opname,
            cell,
            (has_biases, num_layers, bidirectional, batch_first),
            input,
            hx,
            *params,
        )
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


def _may_be_one_op() -> bool:
    """Whether a layer may be one op: it runs on kernels of the CPU, and has gradients alone."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    has_tangents = torch.autograd.forward_ad._current_level >= 0
    return settings.executor != "jax" and not is_transformed and not has_tangents


class _Layer(torch.autograd.Function):
    """Layers as one op. Gradients of gradients come from its steps."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        cell: Cell,
        layout: tuple[Any, ...],
        input: Tensor,
        hx: Tensor,
        *params: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs_grad = [t.requires_grad for t in (input, hx, *params)]
        ctx.kind, ctx.cell, ctx.layout, ctx.needs_grad = kind, cell, layout, needs_grad
        ctx.save_for_backward(input, hx, *params)
        ctx.set_materialize_grads(False)
        return LAYER(kind, input, hx, params, *layout, needs_grad)  # type: ignore[no-any-return]

    @staticmethod
    def backward(
        ctx: Any, output_grad: Tensor | None, hidden_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        input, hx, *params = ctx.saved_tensors
        if output_grad is None and hidden_grad is None:
            return (None,) * (5 + len(params))
        if torch.is_grad_enabled():
            found = _differentiable_grads(ctx, (output_grad, hidden_grad))
        else:
            found = LAYER_GRAD(
                output_grad, hidden_grad, ctx.kind, input, hx, params, *ctx.layout, ctx.needs_grad
            )
        grads = iter(found)
        return None, None, None, *(next(grads) if needed else None for needed in ctx.needs_grad)


def _differentiable_grads(ctx: Any, given: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """The gradients of the operands that need one, from the steps of a layer."""
    has_biases, num_layers, *directions = ctx.layout
    input, hx, *params = ctx.saved_tensors
    results = _in_steps(ctx.cell, input, hx, params, has_biases, num_layers, 0.0, *directions)
    pairs = [(r, g) for r, g in zip(results, given, strict=True) if g is not None]
    outputs, of_outputs = zip(*pairs, strict=True)
    wanted = [t for t, needed in zip(ctx.saved_tensors, ctx.needs_grad, strict=True) if needed]
    return torch.autograd.grad(outputs, wanted, of_outputs, create_graph=True, allow_unused=True)


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
    kernels: dict[str, Callable[..., Any]] = {"lstm.input": _lstm, "lstm_cell": _lstm_step}
    for name, cell in cells.items():
        whole, step = getattr(aten, name).input, getattr(aten, f"{name}_cell").default
        kernels[f"{name}.input"] = partial(_layers, whole, cell)
        kernels[f"{name}_cell"] = partial(_one_step, step, cell)
    for name, kernel in kernels.items():
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl(name, kernel, key)
    _libraries.append(library)
