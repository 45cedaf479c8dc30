"""Random ops computed on the device, for executors that cannot draw from PyTorch's CPU generator.

A rule of `DRAWS` computes an op's random numbers from a key: `threefry` makes two random words of it for each element.
Most numbers use one word; normal and Cauchy numbers, float64, permutations and integers outside of int32 use both.
Used by `random_keys`, which adds the keys to a graph, and by the executors that call the rules by `draw`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ltc_core.graph.ir import Node
from ltc_core.program.lowering.threefry import constant, count, upper_bits, words

__all__ = ["DRAWS", "draw"]

aten = torch.ops.aten
ScalarLike = float | Tensor  # a scalar that is an input of the program is a 0-dim tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype to compute in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _digits(dtype: torch.dtype) -> int:
    """Number of significant bits of a floating-point dtype."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _unit(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1): float32 from 24 bits of `first`, float64 from 53 bits of both words."""
    if dtype is torch.float64:
        upper = upper_bits(first, 27).double() * 2.0**26
        return (upper + upper_bits(second, 26).double()) * 2.0**-53
    return upper_bits(first, 24).float() * 2.0**-24


def _open(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in (0, 1): float32 from 31 bits of `first`, so that the least is 2**-32."""
    if dtype is torch.float64:
        return (_unit(first, second, dtype) + 2.0**-54).clamp(max=1 - 2.0**-53)
    lower = (first & constant(2**31 - 1, first)).float()
    return ((lower + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)


def _polar(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lengths and angles of vectors of two normal numbers each (Box and Muller).

    In float64, length and angle use the bits of both words, in opposite order.
    """
    first, second = words(key, shape)
    length = (_open(first, second, dtype).log() * -2.0).sqrt()
    return length, _unit(second, first, dtype) * (2 * math.pi)


def _standard_normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal numbers in the dtype to compute in; none is further from 0 than 6.7 (float64: 8.7)."""
    length, angle = _polar(key, shape, _wide(dtype))
    if not dtype.is_complex:
        return length * angle.cos()
    length = length * math.sqrt(0.5)
    return torch.view_as_complex(torch.stack([length * angle.cos(), length * angle.sin()], -1))


def _standard_exponential(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Exponential numbers of rate 1 in the dtype to compute in; none is 0."""
    return -_open(*words(key, shape), _wide(dtype)).log()


def _as_tensor(number: ScalarLike, dtype: torch.dtype, key: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(dtype)
    return torch.full((), number, dtype=dtype, device=key.device)


def _placed(drawn: Tensor, location: ScalarLike, scale: ScalarLike) -> Tensor:
    """`drawn * scale + location`, in the dtype of `drawn`."""
    if isinstance(location, Tensor):
        location = location.to(drawn.dtype)
    if isinstance(scale, Tensor):
        scale = scale.to(drawn.dtype)
    return drawn * scale + location


def _largest_below(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest number of `dtype` below a bound, whose dtype is at least as wide.

    XLA has no nextafter. Subtracting half the distance between neighbours is enough, except where the lower neighbour
    is further away than the upper one: there the result rounds back to the bound, and twice the step is subtracted.
    """
    limits = torch.finfo(dtype)
    least = max(limits.tiny * limits.eps, 2.0**-126)  # a smaller float32 may be flushed to 0
    step = (bound.abs() * 2.0 ** -_digits(dtype)).clamp(min=least)
    near = (bound - step).to(dtype)
    return torch.where(near < bound, near, (bound - 2 * step).to(dtype))


def _uniform(
    key: Tensor, shape: Sequence[int], low: ScalarLike, high: ScalarLike, dtype: torch.dtype
) -> Tensor:
    wide = _wide(dtype)
    low, high = _as_tensor(low, wide, key), _as_tensor(high, wide, key)
    drawn = (_unit(*words(key, shape), wide) * (high - low) + low).to(dtype)
    # Rounding may have turned the largest numbers into the excluded bound.
    highest = _largest_below(high.to(dtype).to(wide), dtype)
    return drawn.minimum(highest).maximum(low.to(dtype))


def uniform(key: Tensor, x: Tensor, low: ScalarLike = 0.0, high: ScalarLike = 1.0) -> Tensor:
    return _uniform(key, x.shape, low, high, x.dtype)


def normal(key: Tensor, x: Tensor, mean: ScalarLike = 0.0, std: ScalarLike = 1.0) -> Tensor:
    return _placed(_standard_normal(key, x.shape, x.dtype), mean, std).to(x.dtype)


def normal_of_means(key: Tensor, mean: Tensor, std: ScalarLike = 1.0) -> Tensor:
    shape = (mean + std).shape if isinstance(std, Tensor) else mean.shape
    return _placed(_standard_normal(key, shape, mean.dtype), mean, std).to(mean.dtype)


def normal_of_stds(key: Tensor, mean: ScalarLike, std: Tensor) -> Tensor:
    return normal(key, std, mean, std)


def log_normal(key: Tensor, x: Tensor, mean: ScalarLike = 1.0, std: ScalarLike = 2.0) -> Tensor:
    return _placed(_standard_normal(key, x.shape, x.dtype), mean, std).exp().to(x.dtype)


def exponential(key: Tensor, x: Tensor, lambd: ScalarLike = 1.0) -> Tensor:
    drawn = _standard_exponential(key, x.shape, x.dtype)
    return (drawn / _as_tensor(lambd, drawn.dtype, key)).to(x.dtype)


def geometric(key: Tensor, x: Tensor, p: ScalarLike) -> Tensor:
    """Number of trials up to the first success, at least one."""
    drawn = _standard_exponential(key, x.shape, x.dtype)
    rate = -torch.log1p(-_as_tensor(p, drawn.dtype, key))
    return (drawn / rate).ceil().clamp(min=1).to(x.dtype)


def cauchy(key: Tensor, x: Tensor, median: ScalarLike = 0.0, sigma: ScalarLike = 1.0) -> Tensor:
    """Cotangent of a uniform angle: as exact for large results as for small ones, and always finite."""
    first, second = words(key, x.shape)
    size = (_open(first, second, _wide(x.dtype)) * (math.pi / 2)).tan().reciprocal()
    return _placed(torch.where(second < 0, -size, size), median, sigma).to(x.dtype)


def bernoulli(key: Tensor, p: Tensor) -> Tensor:
    return bernoulli_p(key, p, p)


def bernoulli_p(key: Tensor, x: Tensor, p: ScalarLike = 0.5) -> Tensor:
    wide = _wide(p.dtype) if isinstance(p, Tensor) and p.dim() else torch.float32
    return (_unit(*words(key, x.shape), wide) < _as_tensor(p, wide, key)).to(x.dtype)


def _scaled(word: Tensor, span: Any) -> Tensor:
    """Integers floor(word * span / 2**bits), with the words read as unsigned integers of that many bits.

    The product has twice the bits of a word, so it is computed from half words.
    """
    half = word.dtype.itemsize * 4
    mask = constant((1 << half) - 1, word)
    upper, lower = upper_bits(word, half), word & mask
    if isinstance(span, Tensor):
        span_upper, span_lower = upper_bits(span, half), span & mask
    else:
        span_upper, span_lower = span >> half, span & ((1 << half) - 1)
    middle = upper * span_lower + upper_bits(lower * span_lower, half)
    carry = lower * span_upper + (middle & mask)
    return upper * span_upper + upper_bits(middle, half) + upper_bits(carry, half)


def _integers(key: Tensor, shape: Sequence[int], low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Integers in [low, high), from one word if int32 can hold them.

    As in eager, one integer is more likely than another by (high - low) / 2**32 at most, and by (high - low) / 2**64 if
    int32 cannot hold them.
    """
    if dtype.is_floating_point:
        low, high = _representable(low, high, _digits(dtype))
    is_narrow = low >= -(2**31) and high <= 2**31
    word, second = words(key, shape)
    if not is_narrow:
        word = _joined(word, second)
    return (_scaled(word, high - low) + low).to(dtype)


def _representable(low: int, high: int, digits: int) -> tuple[int, int]:
    """[low, high) shrunk so that rounding to a float of `digits` bits does not leave it."""
    step = 1 << max(low.bit_length() - digits, 0)
    low = -(-low // step) * step
    step = 1 << max((high - 1).bit_length() - digits, 0)
    return low, (high - 1) // step * step + 1


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Words of 64 bits: `first` is the upper half."""
    upper, lower = first.long(), second.long()
    upper = torch.bitwise_left_shift(upper, constant(32, upper))
    return upper | (lower & constant(2**32 - 1, lower))


def _largest(dtype: torch.dtype) -> int:
    """Largest number that `random_` draws."""
    if dtype.is_floating_point:
        return int(2 ** _digits(dtype))
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def random(key: Tensor, x: Tensor) -> Tensor:
    return _integers(key, x.shape, 0, _largest(x.dtype) + 1, x.dtype)


def random_to(key: Tensor, x: Tensor, high: int) -> Tensor:
    return _integers(key, x.shape, 0, high, x.dtype)


def random_from(key: Tensor, x: Tensor, low: int, high: int | None = None) -> Tensor:
    if high is None:
        is_all = low == -(2**63)  # as in eager, for every dtype
        high = (2**63 - 1 if is_all else _largest(x.dtype)) + 1
    return _integers(key, x.shape, low, high, x.dtype)


def _there(key: Tensor, options: dict[str, Any]) -> Tensor:
    """The key on the device that the factory op was called for."""
    device = options.get("device")
    return key if device is None else key.to(device)


def _dtype(options: dict[str, Any], default: torch.dtype | None = None) -> torch.dtype:
    return options.get("dtype") or default or torch.get_default_dtype()


def rand(key: Tensor, size: Sequence[int], **options: Any) -> Tensor:
    return _uniform(_there(key, options), size, 0.0, 1.0, _dtype(options))


def randn(key: Tensor, size: Sequence[int], **options: Any) -> Tensor:
    return normal_of_size(key, 0.0, 1.0, size, **options)


def normal_of_size(
    key: Tensor, mean: ScalarLike, std: ScalarLike, size: Sequence[int], **options: Any
) -> Tensor:
    dtype = _dtype(options)
    drawn = _standard_normal(_there(key, options), size, dtype)
    return _placed(drawn, mean, std).to(dtype)


def randint(key: Tensor, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return randint_from(key, 0, high, size, **options)


def randint_from(key: Tensor, low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _integers(_there(key, options), size, low, high, _dtype(options, torch.int64))


def randperm(key: Tensor, n: int, **options: Any) -> Tensor:
    """Order of sorted 64-bit random numbers. With 32 bits, some of 2**16 would be equal and keep their order."""
    upper, lower = words(_there(key, options), (n,))
    order = lower.argsort(stable=True)
    order = order[upper[order].argsort(stable=True)]
    return order.to(_dtype(options, torch.int64))


def rand_like(key: Tensor, x: Tensor, **options: Any) -> Tensor:
    return rand(key, x.shape, **_like(x, options))


def randn_like(key: Tensor, x: Tensor, **options: Any) -> Tensor:
    return randn(key, x.shape, **_like(x, options))


def randint_like(key: Tensor, x: Tensor, high: int, **options: Any) -> Tensor:
    return randint_from(key, 0, high, x.shape, **_like(x, options))


def randint_like_from(key: Tensor, x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    return randint_from(key, low, high, x.shape, **_like(x, options))


def randint_like_tensor(key: Tensor, x: Tensor, high: Tensor, **options: Any) -> Tensor:
    """Integers in [0, high), where `high` is a tensor on the device."""
    options = _like(x, options)
    word, second = words(_there(key, options), x.shape)
    if options["dtype"].itemsize == 8:
        word = _joined(word, second)
    return _scaled(word, high.to(word.dtype)).to(options["dtype"])


def _like(x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": options.get("dtype") or x.dtype, "device": options.get("device")}


def multinomial(
    key: Tensor, weights: Tensor, num_samples: int, replacement: bool = False
) -> Tensor:
    """Categories drawn by weights that need not sum to 1. One of weight 0 is drawn only if no other is left."""
    weights = weights.to(_wide(weights.dtype))
    if replacement and num_samples > 1:
        return _by_sums(key, weights, num_samples)
    # The categories of the largest weight / exponential number are a draw without replacement (Efraimidis, Spirakis).
    scores = weights / _standard_exponential(key, weights.shape, weights.dtype)
    if num_samples == 1:
        return scores.argmax(-1, keepdim=True)
    return scores.topk(num_samples, -1).indices


def _by_sums(key: Tensor, weights: Tensor, num_samples: int) -> Tensor:
    """First category whose cumulative weight exceeds a uniform number.

    XLA has no searchsorted. By rounding, its cumsum may change where a weight is 0, so such categories are masked out.
    """
    sums = weights.cumsum(-1)
    drawn = _unit(*words(key, (*weights.shape[:-1], num_samples)), weights.dtype) * sums[..., -1:]
    number = count(weights.shape[-1], key)
    is_possible = weights > 0
    last = torch.where(is_possible, number, 0).amax(-1, keepdim=True)
    is_over = (sums.unsqueeze(-2) > drawn.unsqueeze(-1)) & is_possible.unsqueeze(-2)
    return torch.where(is_over, number, last.unsqueeze(-2)).amin(-1).long()


def rrelu_with_noise(
    key: Tensor,
    x: Tensor,
    noise: Tensor,
    lower: ScalarLike = 1 / 8,
    upper: ScalarLike = 1 / 3,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    """Result, and new value of `noise`. Negative elements are scaled, in training each by a random slope of its own."""
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slope = _uniform(key, x.shape, lower, upper, x.dtype)
    return torch.where(x <= 0, x * slope, x), torch.where(x <= 0, slope, 1).to(noise.dtype)


_ROWS: dict[str, Callable[..., Any]] = {
    "bernoulli.default": bernoulli,
    "bernoulli.p": bernoulli_p,
    "bernoulli.Tensor": bernoulli_p,
    "bernoulli_.Tensor": bernoulli_p,
    "bernoulli_.float": bernoulli_p,
    "cauchy.default": cauchy,
    "cauchy_.default": cauchy,
    "exponential.default": exponential,
    "exponential_.default": exponential,
    "geometric.default": geometric,
    "geometric_.default": geometric,
    "log_normal.default": log_normal,
    "log_normal_.default": log_normal,
    "multinomial.default": multinomial,
    "normal.Tensor_Tensor": normal_of_means,
    "normal.Tensor_float": normal_of_means,
    "normal.float_Tensor": normal_of_stds,
    "normal.float_float": normal_of_size,
    "normal_.default": normal,
    "normal_functional.default": normal,
    "rand.generator": rand,
    "rand_like.generator": rand_like,
    "randint.generator": randint,
    "randint.low_generator": randint_from,
    "randint_like.Tensor_generator": randint_like_tensor,
    "randint_like.generator": randint_like,
    "randint_like.low_generator_dtype": randint_like_from,
    "randn.generator": randn,
    "randn_like.generator": randn_like,
    "random.default": random,
    "random.from": random_from,
    "random.to": random_to,
    "random_.default": random,
    "random_.from": random_from,
    "random_.to": random_to,
    "randperm.generator": randperm,
    "rrelu_with_noise.default": rrelu_with_noise,
    "rrelu_with_noise_.default": rrelu_with_noise,
    "rrelu_with_noise_functional.default": rrelu_with_noise,
    "uniform.default": uniform,
    "uniform_.default": uniform,
}


def _present() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    found = {}
    for name, rule in _ROWS.items():
        packet, overload = name.split(".")
        op = getattr(getattr(aten, packet, None), overload, None)
        if op is not None:  # this version of torch has the overload
            found[op] = rule
    return found


# Op -> rule. A rule takes the key and the op's arguments without the generator, and writes none of them. It returns new
# tensors: the op's results, then the new values of operands that the op writes but does not return.
DRAWS: dict[torch._ops.OpOverload, Callable[..., Any]] = _present()


def draw(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Result of a random op whose generator is a key; the operands that the op writes are written."""
    key = kwargs.pop("generator")
    drawn = DRAWS[node.op](key, *args, **kwargs)
    results = list(drawn) if isinstance(drawn, tuple) else [drawn]
    written = [args[i] for i in _written(node.op) if i < len(args)]
    # Operands that are not returned come last.
    first = 0 if node.op._opname.endswith("_") else len(results) - len(written)
    for target, numbers in zip(written, results[first:], strict=True):
        target.copy_(numbers)
    return written[0] if first == 0 and written else results[0]


def _written(op: torch._ops.OpOverload) -> list[int]:
    """Positions of the operands that an op writes."""
    infos = [a.alias_info for a in op._schema.arguments]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write]
