"""Numbers drawn from a key: Threefry's known answers, and each op's shapes, dtypes, ranges and distributions.

The key is fixed, so each test gives the same result every time; the bounds are wide enough for most other keys.
"""

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ltc_core.program.lowering import random_draws
from ltc_core.program.lowering.random_draws import DRAWS
from ltc_core.program.lowering.threefry import constant, count, next_key, threefry, words

aten = torch.ops.aten
Op = torch._ops.OpOverload
COUNT = 20_000
NARROW = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def int32(*values: int) -> Tensor:
    return torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32)


KEY = int32(0x13198A2E, 0x03707344)


def by_name(name: str) -> Op | None:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet, None), overload, None)


def draw(name: str, *args: Any, key: Tensor = KEY, **kwargs: Any) -> Any:
    op = by_name(name if "." in name else f"{name}.default")
    assert op is not None
    return DRAWS[op](key, *args, **kwargs)


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Make a tensor whose values no draw may depend on."""
    return torch.full(shape or (COUNT,), 1, dtype=dtype)


def assert_uniform(u: Tensor, low: float = 0.0, high: float = 1.0, bins: int = 50) -> None:
    """Chi-square: its mean is `bins` - 1 and its variance twice that, so this bound is 6 sigma away."""
    counts = torch.histc(u.double(), bins, low, high)
    expected = u.numel() / bins
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < bins + 6 * math.sqrt(2 * bins)


def assert_moments(x: Tensor, mean: float, std: float) -> None:
    """Within 5 standard errors; the fourth moment is taken for a normal one's."""
    count = x.numel()
    assert abs(x.double().mean().item() - mean) < 5 * std / math.sqrt(count)
    assert abs(x.double().std().item() / std - 1) < 5 / math.sqrt(2 * count)


class TestKeys:
    def test_a_key_is_what_a_generator_goes_on_with(self) -> None:
        generator = torch.Generator().manual_seed(5)
        torch.rand(3, generator=generator)
        state = generator.get_state()
        kept = state.clone()
        key, after = next_key(state)
        assert state.equal(kept) and not after.equal(state)
        assert key.dtype is torch.int32 and key.shape == (2,)
        drawn = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, generator=generator)
        assert key.equal(drawn) and after.equal(generator.get_state())

    def test_the_same_state_gives_the_same_key(self) -> None:
        state = torch.Generator().manual_seed(5).get_state()
        (key, after), (again, after_again) = next_key(state), next_key(state)
        assert key.equal(again) and after.equal(after_again)
        assert not next_key(after)[0].equal(key)
        assert not next_key(torch.Generator().manual_seed(6).get_state())[0].equal(key)

    def test_keys_have_all_their_bits(self) -> None:
        state = torch.Generator().manual_seed(0).get_state()
        keys = []
        for _ in range(64):
            key, state = next_key(state)
            keys.append(key)
        bits = (torch.stack(keys).long().unsqueeze(-1) >> torch.arange(32)) & 1
        assert ((bits.double().mean(0) - 0.5).abs() < 0.35).all()

    def test_the_stream_of_the_process_is_left_alone(self) -> None:
        before = torch.get_rng_state()
        next_key(torch.Generator().manual_seed(5).get_state())
        draw("normal_", of(torch.float32))
        assert torch.get_rng_state().equal(before)


class TestThreefry:
    @pytest.mark.parametrize(
        "key, counter, expected",
        [
            ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
            ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
            ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
        ],
    )
    def test_known_answers(self, key: Any, counter: Any, expected: Any) -> None:
        """Those of Random123, the paper's own library."""
        c0, c1 = int32(*counter)
        assert torch.stack(threefry(int32(*key), c0, c1)).equal(int32(*expected))

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (2, 3, 5), (3, 0), (1500,), (2, 1500)])
    def test_an_element_has_the_words_of_its_place(self, shape: tuple[int, ...]) -> None:
        count = math.prod(shape)
        places = torch.arange(count, dtype=torch.int32)
        for got, word in zip(words(KEY, shape), threefry(KEY, places, int32(0)[0]), strict=True):
            assert got.shape == shape and got.dtype is torch.int32
            assert got.flatten().equal(word)

    def test_a_long_range_is_made_of_two(self) -> None:
        for size in (1024, 1025, 1 << 14, 20_011):
            assert count(size, KEY).equal(torch.arange(size, dtype=torch.int32))

    def test_sizes_over_a_word_are_taken_modulo_its_range(self) -> None:
        assert [constant(2**32 + v, KEY).item() for v in (-1, 0, 5)] == [-1, 0, 5]

    def test_each_bit_of_words_is_one_half_of_the_time(self) -> None:
        both = torch.stack(words(KEY, (COUNT,))).unsqueeze(-1)
        bits = ((both >> torch.arange(32, dtype=torch.int32)) & 1).double()
        assert ((bits.mean(1) - 0.5).abs() < 5 * 0.5 / math.sqrt(COUNT)).all()

    def test_neighbours_have_nothing_in_common(self) -> None:
        first, second = words(KEY, (COUNT,))
        others = [words(KEY + int32(*k), (COUNT,))[0] for k in ((1, 0), (0, 1))]
        for other in (*others, second, first.roll(1)):
            product = first.double() * other.double() / 2.0**62
            assert abs(product.mean().item()) < 5 / 3 / math.sqrt(COUNT)


class TestUniform:
    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    @pytest.mark.parametrize(
        "low, high",
        [(0.0, 1.0), (3.0, 4.0), (-4.0, -3.0), (-1.0, 0.0), (-2.0, 5.0), (0.0, 1e-3), (0.0, 0.1)],
    )
    def test_it_stays_under_the_upper_bound(
        self, dtype: torch.dtype, low: float, high: float
    ) -> None:
        drawn = draw("uniform_", of(dtype), low, high)
        bounds = torch.tensor([low, high], dtype=dtype)
        assert drawn.dtype is dtype
        assert (drawn >= bounds[0]).all() and (drawn < bounds[1]).all()
        assert_moments(drawn, (low + high) / 2, (high - low) / math.sqrt(12))

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_the_number_next_below_a_bound(self, dtype: torch.dtype) -> None:
        base = torch.tensor([1.0, 1.5, 2 - 2**-6, 3.0, 0.1, 1e-3, 1e-6, 60000.0, 1e4, 7 / 3])
        bounds = torch.cat([base, -base]).to(dtype)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        below = random_draws._largest_below(bounds.to(wide), dtype)
        bits = below.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        away = torch.where(below < 0, bits - 1, bits + 1).view(dtype)  # next above
        assert below.dtype is dtype and (below < bounds).all()
        assert away.equal(bounds)
        [zero] = random_draws._largest_below(torch.zeros(1, dtype=wide), dtype)
        assert -1e-7 < zero < 0

    def test_bounds_that_are_close_or_equal(self) -> None:
        x = of(torch.float32)
        assert draw("uniform_", x, 2.0, 2.0).equal(torch.full_like(x, 2.0))
        drawn = draw("uniform_", x, 1e6, 1e6 + 0.125)
        assert drawn.unique().tolist() == [1e6, 1e6 + 0.0625]

    def test_float32_has_24_bits_and_float64_53(self) -> None:
        single, double = (draw("uniform_", of(d)) for d in (torch.float32, torch.float64))
        for drawn, bits in ((single.double(), 24), (double, 53)):
            assert (drawn * 2**bits % 1 == 0).all() and (drawn * 2 ** (bits - 1) % 1 != 0).any()
            assert_uniform(drawn)

    def test_what_is_drawn_next_to_each_other_is_independent(self) -> None:
        drawn = draw("rand.generator", (COUNT, 2))
        cells = (drawn * 7).floor()
        assert_uniform(cells[:, 0] * 7 + cells[:, 1], 0, 49, bins=49)


class TestBernoulli:
    @pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
    def test_probability(self, p: float) -> None:
        for dtype in (torch.bool, torch.uint8, torch.float32, torch.bfloat16):
            drawn = draw("bernoulli_.float", of(dtype), p)
            assert drawn.dtype is dtype
            error = abs(drawn.double().mean().item() - p)
            assert error <= 5 * math.sqrt(p * (1 - p) / COUNT)

    def test_a_probability_for_each_element(self) -> None:
        p = torch.linspace(0, 1, 5)
        for drawn in (
            draw("bernoulli", p.expand(COUNT, 5)),
            draw("bernoulli_.Tensor", of(torch.int64, COUNT, 5), p),
            draw("bernoulli.Tensor", of(torch.bfloat16, COUNT, 5), p.double()),
        ):
            assert ((drawn.double().mean(0) - p).abs() < 0.02).all()
            assert not drawn[:, 0].any() and drawn[:, 4].all()

    def test_without_a_probability_it_is_one_half(self) -> None:
        assert abs(draw("bernoulli_.float", of(torch.float32)).mean().item() - 0.5) < 0.02


class TestNormal:
    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_distribution(self, dtype: torch.dtype) -> None:
        drawn = draw("normal_", of(dtype), 3.0, 2.0)
        assert drawn.dtype is dtype and drawn.isfinite().all()
        assert_moments(drawn, 3.0, 2.0)
        z = (drawn.double() - 3) / 2
        if dtype.itemsize > 2:
            assert_uniform(torch.special.ndtr(z))
        assert abs((z**4).mean().item() - 3) < 0.3

    def test_the_ends_of_the_uniform_numbers_are_finite(self) -> None:
        ends = int32(0, 1, 2**31 - 1, 2**31, 2**32 - 1)
        for dtype in (torch.float32, torch.float64):
            u = random_draws._open(ends, ends, dtype)
            assert u.dtype is dtype and (u > 0).all() and (u < 1).all()

    def test_complex_numbers(self) -> None:
        drawn = draw("randn.generator", (COUNT,), dtype=torch.complex64)
        assert drawn.dtype is torch.complex64
        assert_moments(drawn.real, 0.0, math.sqrt(0.5))
        assert_moments(drawn.imag, 0.0, math.sqrt(0.5))
        assert abs((drawn.real * drawn.imag).mean().item()) < 0.02

    def test_means_and_deviations_for_each_element(self) -> None:
        means, stds = torch.tensor([-1.0, 5.0]), torch.tensor([1.0, 3.0])
        for drawn in (
            draw("normal.Tensor_Tensor", means.expand(COUNT, 2), stds),
            draw("normal.Tensor_Tensor", means, stds.expand(COUNT, 2)),
        ):
            for k in range(2):
                assert_moments(drawn[:, k], means[k].item(), stds[k].item())
        drawn = draw("normal.float_Tensor", 2.0, stds.expand(COUNT, 2))
        assert_moments(drawn[:, 1], 2.0, 3.0)
        assert_moments(draw("normal.Tensor_float", means.expand(COUNT, 2), 2.0)[:, 0], -1.0, 2.0)

    def test_log_normal(self) -> None:
        drawn = draw("log_normal_", of(torch.float32), 0.5, 0.25)
        assert_moments(drawn.log(), 0.5, 0.25)


class TestOtherDistributions:
    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_exponential(self, dtype: torch.dtype) -> None:
        drawn = draw("exponential_", of(dtype), 2.0)
        assert (drawn > 0).all() and drawn.isfinite().all()
        if dtype.itemsize > 2:
            assert_uniform(1 - torch.exp(-2 * drawn))
        assert abs(drawn.double().mean().item() - 0.5) < 0.02

    def test_geometric(self) -> None:
        for dtype in (torch.float32, torch.int64):
            drawn = draw("geometric_", of(dtype), 0.3)
            assert drawn.min() == 1
            for k in range(1, 5):
                share = (drawn == k).double().mean().item()
                assert abs(share - 0.3 * 0.7 ** (k - 1)) < 0.02
        assert draw("geometric_", of(torch.float32), 1 - 1e-12).unique().tolist() == [1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_cauchy(self, dtype: torch.dtype) -> None:
        drawn = draw("cauchy_", of(dtype), 1.0, 2.0)
        assert drawn.isfinite().all()
        assert_uniform(torch.atan((drawn.double() - 1) / 2) / math.pi, -0.5, 0.5)

    def test_rrelu(self) -> None:
        x = torch.linspace(-1, 1, COUNT)
        noise = torch.zeros(COUNT)
        drawn, after = draw("rrelu_with_noise", x, noise, 0.25, 0.75, True)
        assert drawn.equal(x * after) and not noise.any()
        assert (after[x > 0] == 1).all()
        assert_uniform(after[x <= 0], 0.25, 0.75)
        drawn, after = draw("rrelu_with_noise", x, noise, 0.25, 0.75, False)
        assert drawn.equal(torch.where(x > 0, x, x / 2)) and after.equal(noise)


class TestIntegers:
    @pytest.mark.parametrize(
        "dtype",
        [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, *NARROW],
        ids=str,
    )
    def test_a_small_range(self, dtype: torch.dtype) -> None:
        drawn = draw("random_.from", of(dtype), 3, 9)
        assert drawn.dtype is dtype and drawn.unique().tolist() == [3, 4, 5, 6, 7, 8]
        assert_uniform(drawn, 2.5, 8.5, bins=6)

    @pytest.mark.parametrize(
        "dtype, low, high",
        [
            (torch.int32, -(2**31), 2**31 - 1),
            (torch.int64, -5, 2**31 + 7),
            (torch.int64, 0, 2**32),
            (torch.int64, 2**40, 2**40 + 10),
            (torch.int64, -(2**62), 2**61),
            (torch.int64, -(2**63), 2**63 - 1),
            (torch.float64, 0, 2**53),
            (torch.float32, -(2**24), 2**24),
            (torch.int64, 0, 3 * 2**30),
        ],
        ids=str,
    )
    def test_a_large_range(self, dtype: torch.dtype, low: int, high: int) -> None:
        drawn = draw("randint.low_generator", low, high, (COUNT,), dtype=dtype)
        values = drawn.tolist()
        assert drawn.dtype is dtype and low <= min(values) and max(values) < high
        shares = torch.tensor([(v - low) / (high - low) for v in values], dtype=torch.float64)
        assert_uniform(shares, bins=10 if high - low == 10 else 50)

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    @pytest.mark.parametrize("low, high", [(0, 2**30), (-(2**30), 77), (10**9 + 7, 2**60 + 1)])
    def test_a_float_is_not_rounded_out_of_the_range(
        self, dtype: torch.dtype, low: int, high: int
    ) -> None:
        if dtype is torch.float16:
            low, high = low >> 15, min(high >> 15, 60001)
        values = draw("random_.from", of(dtype), low, high).tolist()
        assert all(low <= v < high for v in values)

    def test_the_whole_of_a_type(self) -> None:
        assert draw("random_", of(torch.bool)).double().mean().item() == pytest.approx(
            0.5, abs=0.02
        )
        for dtype, largest in (
            (torch.int8, 127),
            (torch.uint8, 255),
            (torch.bfloat16, 256),
            (torch.float16, 2048),
        ):
            drawn = draw("random_", of(dtype, 100_000)).double()
            assert drawn.min() == 0 and drawn.max() == largest
        for dtype, bits in ((torch.int32, 31), (torch.int64, 63), (torch.float32, 24)):
            assert_uniform(draw("random_", of(dtype)).double() / 2.0**bits)
        for dtype, bits in ((torch.int32, 31), (torch.int64, 63)):
            drawn = draw("random_.from", of(dtype), -(2**bits), None)
            assert_uniform(drawn.double() / 2.0**bits, -1, 1)
        assert_uniform(draw("random_.from", of(torch.float32), -(2**63)) / 2.0**63, -1, 1)
        assert draw("random_.from", of(torch.int8, 9999), 100).unique().tolist() == [
            *range(100, 128)
        ]

    def test_products_of_words(self) -> None:
        """Against Python's integers, with the ends of all halves."""
        for dtype, bits in ((torch.int32, 32), (torch.int64, 64)):
            half = bits // 2
            ends = [0, 1, 2**half - 1, 2**half, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1]
            signed = [v - 2**bits if v >= 2 ** (bits - 1) else v for v in ends]
            for span in (1, 7, 2**half - 1, 2**half, 2 ** (bits - 1), 2**bits - 1, 2**bits):
                got = random_draws._scaled(torch.tensor(signed, dtype=dtype), span)
                assert [v % 2**bits for v in got.tolist()] == [v * span >> bits for v in ends]

    @pytest.mark.skipif(not hasattr(aten.randint_like, "Tensor_generator"), reason="not in 2.9")
    def test_a_bound_that_only_the_device_knows(self) -> None:
        for dtype, high in ((torch.int64, 2**40), (torch.int32, 1000), (torch.float32, 6)):
            drawn = draw("randint_like.Tensor_generator", of(dtype), torch.tensor(high))
            assert drawn.dtype is dtype and drawn.min() >= 0 and drawn.max() < high
            assert_uniform(drawn.double() / high, bins=6)


class TestPermutations:
    @pytest.mark.parametrize("n", [0, 1, 2, 1000])
    def test_each_number_once(self, n: int) -> None:
        drawn = draw("randperm.generator", n)
        assert drawn.dtype is torch.int64 and drawn.sort().values.equal(torch.arange(n))
        assert n < 1000 or not drawn.equal(torch.arange(n))
        assert draw("randperm.generator", n, dtype=torch.int16).equal(drawn.to(torch.int16))

    def test_all_orders_are_as_likely(self) -> None:
        orders = [
            draw("randperm.generator", 3, key=KEY + int32(k, 0)).tolist() for k in range(1200)
        ]
        counts = torch.bincount(torch.tensor([9 * a + 3 * b + c for a, b, c in orders]))
        counts = counts[counts > 0]
        assert len(counts) == 6 and ((counts - 200).abs() < 5 * math.sqrt(200)).all()

    def test_numbers_equal_in_one_word_are_sorted_by_the_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fixed = torch.tensor([1, 0, 1, 0], dtype=torch.int32), int32(7, 6, 5, 4)
        monkeypatch.setattr(random_draws, "words", lambda key, shape: fixed)
        assert draw("randperm.generator", 4).tolist() == [3, 1, 2, 0]


class TestMultinomial:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 2.0, 0.0])

    @pytest.mark.parametrize("dtype", NARROW, ids=str)
    def test_shares(self, dtype: torch.dtype) -> None:
        weights = self.weights.to(dtype)
        many = draw("multinomial", weights, COUNT, True)
        once = draw("multinomial", weights.expand(COUNT, 7), 1)
        rows = draw("multinomial", weights.expand(100, 7), 200, True)
        for drawn, shape in ((many, (COUNT,)), (once, (COUNT, 1)), (rows, (100, 200))):
            assert drawn.dtype is torch.int64 and drawn.shape == shape
            shares = torch.bincount(drawn.flatten(), minlength=7) / COUNT
            assert ((shares - self.weights / 10).abs() < 0.02).all()
            assert not shares[self.weights == 0].any()

    def test_without_replacement(self) -> None:
        drawn = draw("multinomial", self.weights.expand(COUNT, 7), 4)
        assert drawn.sort(-1).values.equal(torch.tensor([1, 2, 4, 5]).expand(COUNT, 4))
        shares = torch.bincount(drawn[:, 0], minlength=7) / COUNT
        assert ((shares - self.weights / 10).abs() < 0.02).all()
        second = drawn[drawn[:, 0] == 4][:, 1]  # what is left are 3, 1 and 2
        shares = torch.bincount(second, minlength=7) / len(second)
        assert ((shares - torch.tensor([0, 3, 1, 0, 0, 2, 0]) / 6).abs() < 0.03).all()

    def test_sums_that_shrink_draw_nothing_of_weight_zero(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A parallel sum may round otherwise at each place."""
        sums = torch.tensor([1e-3, 3.0, 4.0, 4.2, 8.1, 10.0, 9.9])
        monkeypatch.setattr(Tensor, "cumsum", lambda self, dim: sums)
        drawn = draw("multinomial", self.weights, COUNT, True)
        assert drawn.unique().tolist() == [1, 2, 4, 5]

    def test_many_categories(self) -> None:
        weights = torch.zeros(3000)
        weights[[17, 2999]] = 1.0
        assert draw("multinomial", weights, 50, True).unique().tolist() == [17, 2999]


FLOAT, HALF, LONG = torch.float32, torch.bfloat16, torch.int64
X, P = torch.linspace(-1, 1, 12).reshape(3, 4), torch.full((3, 4), 0.5)
# The op's arguments and keywords; each row of DRAWS must be here.
SAMPLES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "bernoulli.default": [((P,), {}), ((P.to(HALF),), {}), ((P.double(),), {}), ((P[0, 0],), {})],
    "bernoulli.p": [((X, 0.5), {}), ((X.to(LONG), torch.tensor(0.25)), {})],
    "bernoulli.Tensor": [((X, P), {}), ((X.to(LONG), P[0]), {})],
    "bernoulli_.Tensor": [((X, P), {}), ((X.bool(), P[0]), {})],
    "bernoulli_.float": [((X, 0.5), {}), ((X.bool(),), {}), ((X, torch.tensor(0.25)), {})],
    "cauchy.default": [((X,), {}), ((X.double(), 1.0, 2.0), {})],
    "cauchy_.default": [((X.to(HALF), 1.0, 2.0), {}), ((X, *torch.ones(2).double()), {})],
    "exponential.default": [((X,), {}), ((X.double(), 2.0), {})],
    "exponential_.default": [((X.to(HALF), 2.0), {}), ((X, torch.tensor(2.0)), {})],
    "geometric.default": [((X, 0.5), {}), ((X.to(LONG), 0.5), {})],
    "geometric_.default": [((X.to(HALF), 0.5), {}), ((X, torch.tensor(0.5).double()), {})],
    "log_normal.default": [((X,), {}), ((X.double(), 1.0, 2.0), {})],
    "log_normal_.default": [((X.to(HALF), 1.0, 2.0), {}), ((X, *torch.ones(2)), {})],
    "multinomial.default": [
        ((P, 3), {}), ((P[0], 4), {}), ((P, 1), {}), ((P.to(HALF), 9, True), {}), ((P[0], 9, True), {}),
        ((P.double(), 1, True), {}),
    ],
    "normal.Tensor_Tensor": [((X, P), {}), ((X, P[0]), {}), ((X[0].to(HALF), P), {})],
    "normal.Tensor_float": [((X,), {}), ((X.to(HALF), 2.0), {}), ((X, torch.tensor(2.0)), {})],
    "normal.float_Tensor": [((1.0, P), {}), ((torch.tensor(1.0), P.double()), {})],
    "normal.float_float": [
        ((1.0, 2.0, [3, 4]), {}), ((1.0, 2.0, [3, 4]), {"dtype": HALF, "device": "cpu"}),
        ((*torch.ones(2), (2,)), {"dtype": None, "layout": None, "device": None, "pin_memory": None}),
    ],
    "normal_.default": [
        ((X,), {}), ((X.to(HALF), 1.0, 2.0), {}), ((X, *torch.ones(2).double()), {}),
        ((X.to(torch.complex64),), {}), ((X.to(torch.complex128), 1.0, 2.0), {}), ((X[0, 0],), {}),
    ],
    "normal_functional.default": [((X,), {}), ((X.double(), 1.0, 2.0), {})],
    "rand.generator": [
        (([3, 4],), {}), (((),), {}), (([0, 2],), {"dtype": HALF}), (([2],), {"device": torch.device("cpu")}),
        (([2],), {"dtype": torch.float64, "layout": None, "device": None, "pin_memory": False}),
    ],
    "rand_like.generator": [((X,), {}), ((X.to(LONG),), {"dtype": FLOAT, "device": "cpu"})],
    "randint.generator": [((9, [3, 4]), {}), ((9, [3]), {"dtype": FLOAT, "device": "cpu"})],
    "randint.low_generator": [((-9, 9, [3, 4]), {}), ((2**40, 2**41, [3]), {"dtype": LONG})],
    "randint_like.Tensor_generator": [((X, torch.tensor(9)), {}), ((X, torch.tensor(9)), {"dtype": LONG})],
    "randint_like.generator": [((X, 9), {}), ((X, 9), {"dtype": LONG})],
    "randint_like.low_generator_dtype": [((X, -9, 9), {}), ((X, 3, 9), {"dtype": torch.int8})],
    "randn.generator": [
        (([3, 4],), {}), (((),), {}), (([2],), {"dtype": torch.float64, "device": "cpu"}),
        (([2],), {"dtype": torch.complex64}),
    ],
    "randn_like.generator": [((X,), {}), ((X.to(LONG),), {"dtype": FLOAT, "memory_format": None})],
    "random.default": [((X,), {}), ((X.bool(),), {})],
    "random.from": [((X, -3, 9), {}), ((X.to(LONG), 3, None), {})],
    "random.to": [((X, 9), {}), ((X.to(torch.int8), 9), {})],
    "random_.default": [((X.to(HALF),), {}), ((X.to(LONG),), {})],
    "random_.from": [((X, -3, 9), {}), ((X.to(LONG), 3, None), {}), ((X.bool(), 0, 2), {})],
    "random_.to": [((X, 9), {}), ((X.to(torch.uint8), 9), {})],
    "randperm.generator": [((9,), {}), ((9,), {"dtype": torch.int32, "device": "cpu"}), ((0,), {})],
    "rrelu_with_noise.default": [
        ((X, P, 0.1, 0.3, True), {}), ((X, P), {}), ((X, P, *torch.tensor([0.1, 0.3]), True), {}),
    ],
    "rrelu_with_noise_.default": [((X.to(HALF), P.to(HALF), 0.1, 0.3, True), {}), ((X, P), {})],
    "rrelu_with_noise_functional.default": [((X, P, 0.1, 0.3, True), {}), ((X, P), {})],
    "uniform.default": [((X,), {}), ((X.double(), 1.0, 2.0), {})],
    "uniform_.default": [((X.to(HALF), 1.0, 2.0), {}), ((X, *torch.tensor([0.5, 1.0]).double()), {})],
}  # fmt: skip
CALLS = [
    pytest.param(op, args, kwargs, id=f"{op.__name__}{k}")
    for op in DRAWS
    for k, (args, kwargs) in enumerate(SAMPLES.get(op.__name__, ()))
]


def copied(args: tuple[Any, ...]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_each_row_has_a_sample() -> None:
    assert {op.__name__ for op in DRAWS} <= SAMPLES.keys()
    assert random_draws._ROWS.keys() == SAMPLES.keys()


def test_rows_that_this_torch_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(random_draws._ROWS, "rand.of_tomorrow", random_draws.rand)
    monkeypatch.setitem(random_draws._ROWS, "chance.default", random_draws.rand)
    assert random_draws._present().keys() == DRAWS.keys()
    assert len(DRAWS) >= 36


@pytest.mark.parametrize("op, args, kwargs", CALLS)
class TestEachRow:
    def test_shapes_and_dtypes_are_eagers(self, op: Op, args: Any, kwargs: Any) -> None:
        before = copied(args)
        got = tensors(DRAWS[op](KEY, *args, **kwargs))
        for was, a in zip(before, args, strict=True):
            assert not isinstance(a, Tensor) or a.equal(was)
        given = [a.item() if isinstance(a, Tensor) and a.dim() == 0 else a for a in before]
        given = [before[k] if _is_operand(op, k) else a for k, a in enumerate(given)]
        expected = list(tensors(op(*given, **kwargs, generator=torch.Generator())))
        if op.__name__.startswith(("rrelu_with_noise.", "rrelu_with_noise_.")):
            expected.append(given[1])
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert (g.shape, g.dtype, g.device) == (e.shape, e.dtype, e.device)

    def test_the_key_decides(self, op: Op, args: Any, kwargs: Any) -> None:
        first, again = (tensors(DRAWS[op](KEY, *args, **kwargs)) for _ in range(2))
        assert all(a.equal(b) for a, b in zip(first, again, strict=True))
        others = [tensors(DRAWS[op](KEY + int32(k, 0), *args, **kwargs)) for k in range(1, 20)]
        differs = any(not a.equal(o) for other in others for a, o in zip(first, other, strict=True))
        is_drawn = first[0].numel() > 0 and not _is_not_training(op, args)
        assert differs == is_drawn


def _is_operand(op: Op, position: int) -> bool:
    return str(op._schema.arguments[position].type) == "Tensor"


def _is_not_training(op: Op, args: Any) -> bool:
    return "rrelu" in op.__name__ and len(args) < 5


def test_what_a_rule_writes_is_not_its_operand() -> None:
    x = torch.zeros(4)
    rule: Callable[..., Tensor] = DRAWS[aten.uniform_.default]
    drawn = rule(KEY, x)
    drawn.add_(1)
    assert not x.any()


ON_XLA = """
import torch
import torch_xla
from torch_xla.debug import metrics
from tests.core.program.test_random_draws import DRAWS, KEY, SAMPLES, by_name, tensors

device = torch_xla.device()


def there(item):
    return item.to(device) if isinstance(item, torch.Tensor) else item


results = []
for name, samples in SAMPLES.items():
    for args, kwargs in samples if by_name(name) in DRAWS else ():
        there_kwargs = {k: device if k == "device" else v for k, v in kwargs.items()}
        got = DRAWS[by_name(name)](there(KEY), *map(there, args), **there_kwargs)
        expected = DRAWS[by_name(name)](KEY, *args, **kwargs)
        results += [(name, *pair) for pair in zip(tensors(got), tensors(expected), strict=True)]
torch_xla.sync()
fallbacks = [counter for counter in metrics.counter_names() if counter.startswith("aten::")]
assert not fallbacks, fallbacks
for name, got, expected in results:
    assert got.device == device, name
    if got.dtype is torch.complex128:
        continue  # torch_xla 2.9 loses the imaginary part on the way to the host
    # Logarithms and fused products differ by a bit of float32 and may so round to another bfloat16.
    exact = name.startswith(("bernoulli", "rand", "multinomial")) and "randn" not in name
    close = {} if expected.dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    close = {"rtol": 0, "atol": 0} if exact else close
    torch.testing.assert_close(got.cpu(), expected, **close, msg=lambda text: f"{name}: {text}")
print(len(results), "results")
"""


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_xla_computes_the_same_numbers_and_all_of_them() -> None:
    """In one program; torch_xla counts an op that it runs on the host as `aten::` and its name."""
    done = subprocess.run(
        [sys.executable, "-c", ON_XLA],
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 80
