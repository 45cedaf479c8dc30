"""PyTorch's own machinery for tests of devices, on ours: generated tests, gradient checks, losses, opcheck.

`instantiate_device_type_tests` makes the tests as it does for a device of PyTorch's own. Gradients are checked by
finite differences, which are right whatever eager does.
"""

import ltc_core as ltc  # PyTorch looks for devices when the imports below run

# isort: split
import itertools
from typing import Any

import pytest
import torch
from torch.testing import make_tensor
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_nn import criterion_tests
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.optests.generate_tests import OpCheckError
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.core.beside_eager import on_cpu
from tests.public.sampling import chosen

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES, LARGEST = 2, 60  # of an op; elements of a sample
# An op that draws gives finite differences of noise; nondeterminism is known to the database for some only.
DRAWS = (
    "dropout",
    "rrelu",
    "bernoulli",
    "fractional",
    "rand",
    "normal",
    "multinomial",
    "attention",
)
DIFFERENTIABLE = [
    op
    for op in op_db
    if op.supports_autograd
    and torch.float64 in op.dtypes
    and not any(word in op.name for word in DRAWS)
]
CRITERIA = [row for row in criterion_tests if "module_name" in row and "reference_fn" in row]


class TestOnTheDevice(TestCase):
    """Tests that take the device they run on; `device` is ours, by its name."""

    def test_the_device_is_known(self, device: str) -> None:
        self.assertEqual(torch.device(device), ltc.lazy_device())
        current = torch.accelerator.current_accelerator()
        assert current is not None
        self.assertEqual(current.type, torch.device(device).type)

    @dtypes(torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    def test_make_tensor(self, device: str, dtype: torch.dtype) -> None:
        for kwargs in (
            {},
            {"noncontiguous": True},
            {"low": 1, "high": 3} if not dtype.is_complex else {},
        ):
            torch.manual_seed(0)
            expected = make_tensor((3, 4), device="cpu", dtype=dtype, **kwargs)
            torch.manual_seed(0)
            got = make_tensor((3, 4), device=device, dtype=dtype, **kwargs)
            self.assertEqual(got.device, torch.device(device))
            self.assertEqual(got.cpu(), expected)

    @dtypes(torch.float32, torch.int64, torch.complex64)
    def test_assert_close_sees_what_differs(self, device: str, dtype: torch.dtype) -> None:
        x = make_tensor((3, 4), device=device, dtype=dtype, low=1, high=9)
        torch.testing.assert_close(x, x.clone())
        torch.testing.assert_close({"a": [x]}, {"a": [x.cpu()]}, check_device=False)
        y = x.clone()
        y[1, 2] += 1
        with self.assertRaisesRegex(AssertionError, r"Mismatched elements: 1 / 12(.|\n)*\(1, 2\)"):
            torch.testing.assert_close(x, y)
        with self.assertRaisesRegex(AssertionError, "attribute 'device'"):
            torch.testing.assert_close(x, x.cpu())
        with self.assertRaisesRegex(AssertionError, "attribute 'dtype'"):
            torch.testing.assert_close(x, x.to(torch.complex128))
        with self.assertRaisesRegex(AssertionError, "shape"):
            torch.testing.assert_close(x, x[:2])

    @ops(chosen(DIFFERENTIABLE, 12), allowed_dtypes=(torch.float64,))
    def test_gradients_by_finite_differences(
        self, device: str, dtype: torch.dtype, op: Any
    ) -> None:
        samples = op.sample_inputs(device, dtype, requires_grad=True)
        for sample in itertools.islice(samples, SAMPLES):
            leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            wanted = [isinstance(t, torch.Tensor) and t.requires_grad for t in leaves]
            inputs = tuple(itertools.compress(leaves, wanted))
            if not inputs or sum(t.numel() for t in inputs) > LARGEST:
                continue

            def call(
                *given: Any, leaves: Any = leaves, wanted: Any = wanted, spec: Any = spec
            ) -> Any:
                left = iter(given)
                filled = [next(left) if w else t for t, w in zip(leaves, wanted, strict=True)]
                args, kwargs = tree_unflatten(filled, spec)
                result = op.gradcheck_wrapper(op, *args, **kwargs)
                return tuple(
                    t
                    for t in tree_leaves(result)
                    if isinstance(t, torch.Tensor) and t.requires_grad
                )

            options = {"fast_mode": True, "nondet_tol": op.gradcheck_nondet_tol}
            self.assertTrue(torch.autograd.gradcheck(call, inputs, **options))
            if op.supports_gradgrad:
                self.assertTrue(torch.autograd.gradgradcheck(call, inputs, **options))

    def test_losses_equal_their_references(self, device: str) -> None:
        for row in CRITERIA:
            name, args = row["module_name"], row.get("constructor_args", ())
            torch.manual_seed(0)
            module = getattr(torch.nn, name)(*args)
            given = row["input_fn"]() if "input_fn" in row else torch.randn(row["input_size"])
            target = row["target_fn"]() if "target_fn" in row else torch.randn(row["target_size"])
            inputs = given if isinstance(given, tuple) else (given,)
            expected = row["reference_fn"](*inputs, target, module)
            module = module.to(device)
            got = module(*(t.to(device) for t in inputs), target.to(device))
            with self.subTest(name):
                torch.testing.assert_close(
                    on_cpu(got), expected, rtol=1e-4, atol=1e-5, check_dtype=False
                )

    def test_opcheck_is_refused_with_a_sentence(self, device: str) -> None:
        with torch.library._scoped_library("public", "FRAGMENT") as library:
            library.define("scaled(Tensor x, float k) -> Tensor")
            library.impl("scaled", lambda x, k: x * k, "CompositeExplicitAutograd")
            library.impl("scaled", lambda x, k: torch.empty_like(x), "Meta")
            op = torch.ops.public.scaled.default
            x = torch.ones(3, device=device)
            with self.assertRaisesRegex(OpCheckError, "cannot be traced from outside"):
                torch.library.opcheck(op, (x, 2.0), test_utils="test_schema")
            self.assertEqual(op(x, 2.0).cpu(), torch.full((3,), 2.0))

    def test_benchmark_timer(self, device: str) -> None:
        from torch.utils.benchmark import Timer

        x = torch.ones(3, device=device)
        measured = Timer("x + 1", globals={"x": x}).timeit(3)
        self.assertEqual(measured.number_per_run, 3)


instantiate_device_type_tests(TestOnTheDevice, globals(), only_for=("privateuse1",))
