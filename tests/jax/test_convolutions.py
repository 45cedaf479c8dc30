"""Convolutions in the form that they have on a TPU, computed on the CPU, beside PyTorch."""

import itertools

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

from ltc_core.executors.jax.rules.convolution import ConvolutionOnTpu

# The weight's sizes, those of the input, stride, padding, dilation, groups, output padding.
PLAIN = [
    ((5, 1, 3, 3), (2, 1, 8, 9), (1, 1), (0, 0), (1, 1), 1),
    ((6, 40, 3, 3), (2, 40, 8, 9), (2, 1), (1, 1), (1, 1), 1),
    ((6, 40, 3, 3), (2, 40, 11, 9), (2, 3), (1, 0), (2, 1), 1),
    ((40, 10, 3, 2), (2, 40, 7, 8), (1, 2), (2, 3), (1, 2), 4),
    ((8, 1, 3, 3), (2, 8, 7, 8), (2, 1), (1, 1), (1, 1), 8),
    ((7, 300, 1, 1), (3, 300, 5, 6), (2, 2), (0, 0), (1, 1), 1),
    ((5, 70, 4), (2, 70, 21), (3,), (2,), (2,), 1),
    ((5, 12, 3, 3, 3), (2, 12, 6, 5, 7), (1, 2, 1), (1, 1, 0), (1, 1, 1), 1),
]
TRANSPOSED = [
    ((40, 6, 3, 3), (2, 40, 5, 6), (1, 1), (0, 0), (1, 1), 1, (0, 0)),
    ((40, 6, 4, 4), (2, 40, 5, 6), (2, 2), (1, 1), (1, 1), 1, (0, 0)),
    ((40, 60, 3, 3), (2, 40, 5, 6), (2, 3), (1, 2), (1, 2), 1, (1, 2)),
    ((40, 3, 3, 3), (2, 40, 5, 6), (2, 1), (1, 1), (1, 1), 4, (1, 0)),
]
CASES = [(*plain, False, (0,) * len(plain[2])) for plain in PLAIN] + [
    (*given[:-1], True, given[-1]) for given in TRANSPOSED
]


def _values(sizes: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def _assert_as_exact(found: jax.Array, expected: Tensor) -> None:
    """As exact as PyTorch in float32: bfloat16 has three digits."""
    scale = expected.abs().max().item()
    np.testing.assert_allclose(np.asarray(found), expected.numpy(), rtol=0, atol=3e-6 * scale)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_pytorch(case: tuple) -> None:  # type: ignore[type-arg]
    of_weight, of_x, stride, padding, dilation, groups, transposed, more = case
    weight, x = _values(of_weight, 1), _values(of_x, 2)
    numbers = (stride, padding, dilation, transposed, more, groups)
    expected = torch.ops.aten.convolution(x.double(), weight.double(), None, *numbers)
    grad = _values(tuple(expected.shape), 3)
    of_input, of_its_weight, _ = torch.ops.aten.convolution_backward(
        grad.double(), x.double(), weight.double(), None, *numbers, [True, True, False]
    )
    convolution = ConvolutionOnTpu(len(stride), *numbers)
    given = [t.numpy() for t in (grad, x, weight)]
    _assert_as_exact(jax.jit(convolution)(*given[1:]), expected)
    _assert_as_exact(jax.jit(convolution.input_gradient)(*given), of_input)
    _assert_as_exact(jax.jit(convolution.weight_gradient)(*given), of_its_weight)


def test_numbers_of_all_sizes_are_exact_and_infinite_ones_stay() -> None:
    convolution = ConvolutionOnTpu(1, (1,), (0,), (1,), False, (0,), 1)
    exponents = range(-30, 31, 3)
    x = np.array([[[(1 + 2**-22) * 10.0**e for e in exponents]]], np.float32)
    one = np.ones((1, 1, 1), np.float32)
    np.testing.assert_allclose(np.asarray(convolution(x, one)), x, rtol=2e-7)
    for special in (np.inf, -np.inf, np.nan):
        x[0, 0, 3] = special
        np.testing.assert_array_equal(np.asarray(convolution(x, one))[0, 0, 3], np.float32(special))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_convolved_as_they_are(dtype: torch.dtype) -> None:
    of_weight, of_x, *numbers = PLAIN[1]
    x, weight = (
        jax.numpy.asarray(_values(sizes, seed).numpy()).astype(str(dtype).removeprefix("torch."))
        for seed, sizes in enumerate((of_x, of_weight))
    )
    convolution = ConvolutionOnTpu(2, *numbers[:3], False, (0, 0), numbers[3])
    jaxpr = str(jax.make_jaxpr(convolution)(x, weight))
    assert jaxpr.count("conv_general_dilated") == 1 and "reduce_precision" not in jaxpr
    assert convolution(x, weight).dtype == x.dtype
    assert list(itertools.chain(convolution(x, weight).shape))[:2] == [2, 6]
