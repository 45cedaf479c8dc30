"""How exactly float32 is multiplied is said by PyTorch's settings, and part of what a program depends on."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch

import ltc_core as ltc
from ltc_core.executors.device_program import launches
from ltc_core.executors.jax.precision import precision
from ltc_core.executors.jax.rules.convolution import ConvolutionOnTpu

HIGHEST, HIGH, DEFAULT = (
    jax.lax.Precision.HIGHEST,
    jax.lax.Precision.HIGH,
    jax.lax.Precision.DEFAULT,
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("name", "expected"), [("highest", HIGHEST), ("high", HIGH), ("medium", DEFAULT)]
)
def test_pytorch_s_settings(name: str, expected: jax.lax.Precision) -> None:
    torch.set_float32_matmul_precision(name)
    assert precision() is expected


def test_its_newer_settings_beside_the_older() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    assert precision() is DEFAULT


def test_a_change_makes_another_program() -> None:
    device = ltc.lazy_device()
    x = torch.ones(6, 7).to(device)
    found = []
    for name in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(name)
        before = set(map(id, launches()))
        assert (x @ x.T).sum().item() == 252.0
        found.append([one.hlo() for one in launches() if id(one) not in before])
    assert [len(new) for new in found] == [1, 1, 0]
    assert "HIGHEST" in found[0][0] and "HIGHEST" not in found[1][0] and "HIGH" in found[1][0]


def test_a_convolution_on_a_tpu_has_as_many_products() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 40, 9)).astype(np.float32)
    weight = generator.normal(size=(5, 40, 3)).astype(np.float32)
    exact = torch.nn.functional.conv1d(*(torch.from_numpy(a).double() for a in (x, weight))).numpy()
    convolution = ConvolutionOnTpu(1, (1,), (0,), (1,), False, (0,), 1)
    errors = []
    for name in ("highest", "high"):
        torch.set_float32_matmul_precision(name)
        found = np.asarray(convolution(x, weight))
        errors.append(float(np.abs(found - exact).max() / np.abs(exact).max()))
    assert errors[0] < 1e-6 < errors[1] < 1e-4, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scans_and_cross_products_of_narrow_dtypes_have_the_bits_of_eager(
    dtype: torch.dtype,
) -> None:
    """A scan adds up in float32 and rounds each result once; a cross product rounds its products.

    A CPU with multiply-add in float16 does not round one of the products there.
    """
    torch.manual_seed(0)
    x = (torch.rand(7, 3, 40) + 0.5).to(dtype)
    y = torch.randn(7, 3, 40).to(dtype)
    device = ltc.lazy_device()
    for call in (
        lambda x, y: x.cumsum(2),
        lambda x, y: x.cumprod(2),
        lambda x, y: y.logcumsumexp(2),
    ):
        found = call(x.to(device), y.to(device)).cpu()
        assert torch.equal(found, call(x, y))
    for first in (x, x[:1]):
        found = torch.linalg.cross(first.to(device), y.to(device), dim=1).cpu()
        eager = torch.linalg.cross(first, y, dim=1)
        assert (found - eager).abs().max() <= (0 if dtype is torch.bfloat16 else 2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["acos", "asin", "atanh", "expm1", "exp2", "sigmoid", "special_i1e"]
)
def test_functions_of_several_ops_round_narrow_dtypes_once(name: str, dtype: torch.dtype) -> None:
    """They are computed in float32, as by ATen: at most the last bit differs, where eager's own rounding is close."""
    call = getattr(torch.ops.aten, name)
    x = torch.linspace(-0.99, 0.99, 401).to(dtype)
    found, wanted = call(x.to(ltc.lazy_device())).cpu(), call(x)
    assert (found != wanted).float().mean() < 0.005
    torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)
