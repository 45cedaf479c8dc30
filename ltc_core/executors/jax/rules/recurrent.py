"""A layer of an LSTM: a loop in the program, so that it compiles in a time that does not grow with the sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from ltc_core.executors.jax.precision import precision
from ltc_core.executors.jax.table import Array, Call, lowers

__all__: list[str] = []

_LSTM = 2  # `ideep::rnn_kind::LSTM`


def _layer(
    x: Array, of_input: Array, of_hidden: Array, bias: Array, h: Array, c: Array, reverse: bool
) -> tuple[Array, Array, Array]:
    """Outputs of all steps, and the last hidden and cell state. `x` is (time, batch, features)."""
    products = jnp.matmul(x, of_input.T, precision=precision()) + bias

    def step(state: tuple[Array, Array], product: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        gates = product + jnp.matmul(h, of_hidden.T, precision=precision())
        i, f, g, o = jnp.split(gates, 4, -1)
        c = lax.logistic(f) * c + lax.logistic(i) * jnp.tanh(g)
        h = lax.logistic(o) * jnp.tanh(c)
        return (h, c), h

    (h, c), outputs = lax.scan(step, (h, c), products, reverse=reverse)
    return outputs, h, c


def _refuse_others(mode: int) -> None:
    if mode != _LSTM:
        raise NotImplementedError("a recurrent layer that is no LSTM")


@lowers("mkldnn_rnn_layer")
def layer(
    c: Call, x: Array, of_input: Array, of_hidden: Array, bias: Array, other_bias: Array, h: Array, cell: Array,
    reverse: bool, batch_sizes: Any, mode: int, *numbers: Any,
) -> tuple[Array, ...]:  # fmt: skip
    _refuse_others(mode)
    found = _layer(x, of_input, of_hidden, _sum(bias, other_bias), h, cell, reverse)
    workspace = jnp.zeros(
        tuple(c.result[3].shape), jnp.uint8
    )  # the backward computes the states again
    return *(_shaped(r, w) for r, w in zip(found, c.result, strict=False)), workspace


def _sum(bias: Array, other: Array) -> Array:
    """The bias of the gates. Without biases eager passes zeros of the weights' shapes."""
    return bias + other if bias.ndim == 1 else jnp.zeros(bias.shape[0], bias.dtype)


def _shaped(x: Array, wanted: Any) -> Array:
    return x.reshape(tuple(wanted.shape))


@lowers("mkldnn_rnn_layer_backward")
def layer_backward(
    c: Call, x: Array, of_input: Array, of_hidden: Array, bias: Array, other_bias: Array, h: Array, cell: Array,
    output: Array, h_last: Array, c_last: Array, grad: Array | None, grad_h: Array | None, grad_c: Array | None,
    reverse: bool, mode: int, *numbers: Any,
) -> tuple[Array, ...]:  # fmt: skip
    _refuse_others(mode)
    operands = (x, of_input, of_hidden, _sum(bias, other_bias), h, cell)
    results, pull = jax.vjp(functools.partial(_layer, reverse=reverse), *operands)
    grads = (
        jnp.zeros_like(result) if g is None else g.reshape(result.shape)
        for result, g in zip(results, (grad, grad_h, grad_c), strict=True)
    )
    of_x, of_i, of_h, of_bias, of_state, of_cell = pull(tuple(grads))
    if bias.ndim != 1:
        of_bias = jnp.zeros_like(of_bias)
    found = (of_x, of_i, of_h, of_bias, of_bias, of_state, of_cell)
    return tuple(_shaped(r, w) for r, w in zip(found, c.result, strict=True))
