"""Products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import numpy as jnp

from ltc_core.executors.jax.precision import precision
from ltc_core.executors.jax.table import Array, Call, is_narrow_float, lowers, to_dtype

__all__: list[str] = []


@lowers("mm", "bmm", "matmul", "dot", "mv")
def matmul(c: Call, x: Array, y: Array) -> Array:
    if x.dtype == np.bool_:
        return (x.astype(np.int32) @ y.astype(np.int32)) != 0
    return jnp.matmul(x, y, precision=precision())


@lowers("addmm")
def addmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(bias, _wide_product(c, x, y), beta, alpha)


@lowers("baddbmm")
def baddbmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(bias, _wide_product(c, x, y), beta, alpha)


@lowers("addmv")
def addmv(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(bias, _wide_product(c, x, y), beta, alpha)


@lowers("addbmm")
def addbmm(c: Call, bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _added(bias, jnp.sum(_wide_product(c, x, y), 0), beta, alpha)


@lowers("_int_mm")
def int_mm(c: Call, x: Array, y: Array) -> Array:
    """Of int8, with sums in int32."""
    return jnp.matmul(x, y, preferred_element_type=np.int32)


@lowers("linalg_cross")
def cross(c: Call, x: Array, y: Array, *, dim: int = -1) -> Array:
    """Each product is rounded, as in eager; PyTorch's decomposition has other bits in float16 and bfloat16."""
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=dim)


def _wide_product(c: Call, x: Array, y: Array) -> Array:
    """The product, of float16 and bfloat16 in float32: it is rounded when the bias has been added."""
    if is_narrow_float(x.dtype):
        return jnp.matmul(x, y, precision=precision(), preferred_element_type=np.float32)
    return matmul(c, x, y)


def _added(bias: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """`beta * bias + alpha * product`; with `beta` 0, `bias` does not count, even if it is nan."""
    if alpha != 1:
        product = product * to_dtype(alpha, product.dtype)
    if beta == 0:
        return product
    bias = to_dtype(bias, product.dtype)
    return product + (bias if beta == 1 else bias * to_dtype(beta, bias.dtype))
