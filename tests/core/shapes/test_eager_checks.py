"""Wrong calls fail where they are made, as in eager: ops beside eager over pairs of dtypes.

What eager refuses raises at the call, with eager's type; what eager accepts is recorded, not run on the
CPU because a check was too strict, and gives eager's answer.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ltc_core as ltc
from ltc_core.graph.op_schema import OpSchema
from ltc_core.shapes import eager_checks
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting

aten = torch.ops.aten
Make = Callable[..., Tensor]

f32, f64, i64, u1, c64 = torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64
PAIRS = (
    (f32, f32), (f32, f64), (f32, i64), (i64, f32), (i64, i64), (f32, u1), (u1, u1), (f32, c64), (c64, c64),
)  # fmt: skip

# Each takes two makers of tensors, `a` and `b`: a(2, 3) is a tensor of this shape and the first dtype.
CALLS: dict[str, Callable[[Make, Make], Tensor]] = {
    "mm": lambda a, b: torch.mm(a(3, 3), b(3, 3)),
    "bmm": lambda a, b: torch.bmm(a(2, 3, 3), b(2, 3, 3)),
    "mv": lambda a, b: torch.mv(a(3, 3), b(3)),
    "dot": lambda a, b: torch.dot(a(3), b(3)),
    "addmm": lambda a, b: torch.addmm(a(3, 3), b(3, 3), b(3, 3)),
    "addmm_": lambda a, b: a(3, 3).addmm_(b(3, 3), b(3, 3)),
    "baddbmm": lambda a, b: torch.baddbmm(a(2, 3, 3), b(2, 3, 3), b(2, 3, 3)),
    "max_pool1d": lambda a, b: F.max_pool1d(a(1, 1, 4), 2),
    "reflect": lambda a, b: F.pad(a(1, 1, 4), (1, 1), "reflect"),
    "interpolate": lambda a, b: F.interpolate(a(1, 1, 4), 2),
    "avg_pool3d": lambda a, b: F.avg_pool3d(a(1, 1, 2, 2, 2), 2),
    "attention": lambda a, b: F.scaled_dot_product_attention(a(2, 3), b(2, 3), a(2, 3)),
    "huber_loss": lambda a, b: F.huber_loss(a(3), b(3)),
    "embedding_of": lambda a, b: F.embedding(b(3), a(3, 2)),
    "addr": lambda a, b: torch.addr(a(3, 3), b(3), b(3)),
    "add": lambda a, b: a(3) + b(3),
    "add_": lambda a, b: a(3).add_(b(3)),
    "sub": lambda a, b: a(3) - b(3),
    "sub_": lambda a, b: a(3).sub_(b(3)),
    "mul_": lambda a, b: a(3).mul_(b(3)),
    "div_": lambda a, b: a(3).div_(b(3)),
    "fmod": lambda a, b: torch.fmod(a(3), b(3)),
    "pow": lambda a, b: a(3) ** b(3),
    "atan2": lambda a, b: torch.atan2(a(3), b(3)),
    "lt": lambda a, b: a(3) < b(3),
    "maximum": lambda a, b: torch.maximum(a(3), b(3)),
    "hypot": lambda a, b: torch.hypot(a(3), b(3)),
    "bitwise_and": lambda a, b: a(3) & b(3),
    "bitwise_xor_": lambda a, b: a(3).bitwise_xor_(b(3)),
    "gcd": lambda a, b: torch.gcd(a(3), b(3)),
    "heaviside": lambda a, b: torch.heaviside(a(3), b(3)),
    "copysign": lambda a, b: torch.copysign(a(3), b(3)),
    "nextafter": lambda a, b: torch.nextafter(a(3), b(3)),
    "xlogy": lambda a, b: torch.xlogy(a(3), b(3)),
    "lerp": lambda a, b: torch.lerp(a(3), b(3), 0.5),
    "addcmul": lambda a, b: torch.addcmul(a(3), b(3), b(3)),
    "addcdiv": lambda a, b: torch.addcdiv(a(3), b(3), b(3)),
    "neg": lambda a, b: -a(3),
    "cat": lambda a, b: torch.cat([a(3), b(3)]),
    "copy_": lambda a, b: a(3).copy_(b(3)),
    "masked_fill": lambda a, b: a(3).masked_fill(b(3), 1),
    "masked_scatter": lambda a, b: a(3).masked_scatter(b(3), a(3)),
    "index_put_ values": lambda a, b: a(3).index_put_((a(1).long(),), b(1)),
    "gather": lambda a, b: a(3, 3).gather(0, b(2, 3)),
    "scatter": lambda a, b: a(3, 3).scatter(0, a(1, 3).long(), b(3, 3)),
    "scatter_add": lambda a, b: a(3, 3).scatter_add(0, a(1, 3).long(), b(3, 3)),
    "index_select": lambda a, b: a(3, 3).index_select(0, b(2)),
    "index_add": lambda a, b: a(3, 3).index_add(0, a(1).long(), b(1, 3)),
    "index_add into one row": lambda a, b: a(1, 3).index_add(0, (a(1) * 0).long(), b(1, 3)),
    "index_copy": lambda a, b: a(3, 3).index_copy(0, a(1).long(), b(1, 3)),
    "index_fill": lambda a, b: a(3, 3).index_fill(0, b(1), 1),
    "index_reduce": lambda a, b: a(3, 3).index_reduce(0, a(1).long(), b(1, 3), "amax"),
    "put": lambda a, b: a(3).put(a(1).long(), b(1)),
    "conv2d": lambda a, b: F.conv2d(a(1, 1, 5, 5), b(1, 1, 3, 3)),
    "linear": lambda a, b: F.linear(a(2, 3), b(2, 3)),
    "embedding": lambda a, b: F.embedding(b(2), a(3, 3)),
    "layer_norm": lambda a, b: F.layer_norm(a(2, 3), (3,), b(3)),
    "batch_norm": lambda a, b: F.batch_norm(a(2, 3), None, None, b(3), training=True),
    "running statistics": lambda a, b: F.batch_norm(a(2, 3), b(3), b(3)),
    "group_norm": lambda a, b: F.group_norm(a(2, 4), 2, b(4)),
    "prelu": lambda a, b: F.prelu(a(2, 3), b(1)),
    "log_softmax": lambda a, b: F.log_softmax(a(2, 3), 1),
    "nll_loss": lambda a, b: F.nll_loss(a(2, 3), b(2)),
    "mse_loss": lambda a, b: F.mse_loss(a(3), b(3)),
    "smooth_l1": lambda a, b: F.smooth_l1_loss(a(3), b(3)),
    "bce_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(a(3), b(3)),
    "cdist": lambda a, b: torch.cdist(a(2, 3), b(2, 3)),
    "cross": lambda a, b: torch.linalg.cross(a(3), b(3)),
    "grid_sample": lambda a, b: F.grid_sample(a(1, 1, 3, 3), b(1, 2, 2, 2), align_corners=True),
    "bucketize": lambda a, b: torch.bucketize(a(3), b(3)),
    "complex": lambda a, b: torch.complex(a(3), b(3)),
    "polar": lambda a, b: torch.polar(a(3), b(3)),
    "sort": lambda a, b: a(3).sort()[0],
    "topk": lambda a, b: a(3).topk(2)[0],
    "max": lambda a, b: a(3).max(),
    "aminmax": lambda a, b: a(3).aminmax()[0],
    "multinomial": lambda a, b: torch.multinomial(a(3) + 1, 2) * 0,
    "foreach_mul_": lambda a, b: _first_after(torch._foreach_mul_, [a(3)], [b(3)]),
    "out": lambda a, b: torch.add(a(3), a(3), out=b(3)),
}  # fmt: skip


def _first_after(op: Callable[..., None], tensors: list[Tensor], *others: list[Tensor]) -> Tensor:
    op(tensors, *others)
    return tensors[0]


def maker(dtype: torch.dtype, device: torch.device | str) -> Make:
    def make(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return (torch.arange(count) % 2 + 1).view(shape).to(dtype).to(device)

    return make


def attempt(
    call: Callable[[Make, Make], Tensor], pair: tuple[torch.dtype, ...], device: torch.device | str
) -> Tensor | Exception:
    torch.manual_seed(0)
    try:
        return call(maker(pair[0], device), maker(pair[1], device))
    except Exception as error:
        return error


@pytest.fixture(scope="module", autouse=True)
def _random_state() -> None:
    """Made on first use and kept: no leak of the test that draws first."""
    ltc.get_rng_state()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_where_eager_refuses_it(name: str) -> None:
    for pair in PAIRS:
        wanted = attempt(CALLS[name], pair, "cpu")
        with Counting() as counted:
            got = attempt(CALLS[name], pair, ltc.lazy_device())
            if isinstance(got, Tensor):
                ltc.mark_step()
        if isinstance(wanted, Exception):
            assert isinstance(got, Exception), f"{pair}: eager raises {wanted}"
            assert isinstance(got, type(wanted)), f"{pair}: {got!r}, eager raises {wanted!r}"
        else:
            assert isinstance(got, Tensor), f"{pair}: {got!r}, and eager accepts it"
            assert counted.fallbacks == {}, f"{pair}: recorded in eager's terms, run on the CPU"
            assert_same(got, wanted)


def refused(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> bool:
    return eager_checks.is_refused(OpSchema.of(op), args, kwargs)


def test_it_asks_for_no_values() -> None:
    """Operands may be on the device `meta`: nothing is synced for a check."""
    x = torch.ones(3, device="meta")
    index = torch.zeros(1, dtype=torch.int64, device="meta")
    assert not refused(aten.index_put_.default, x, [index], torch.ones(1, device="meta"))
    wrong = torch.ones(1, dtype=torch.float64, device="meta")
    assert refused(aten.index_put_.default, x, [index], wrong)


def test_values_that_cannot_be_spread_over_the_rows_are_refused() -> None:
    device = ltc.lazy_device()
    for rows in (torch.tensor([0, 1]), torch.tensor([[0], [1]])):
        with pytest.raises((RuntimeError, IndexError), match="broadcast"):
            torch.zeros(4, 3, device=device)[rows] = torch.ones(5, device=device)


def test_a_mask_of_another_shape_is_refused_at_the_call() -> None:
    device = ltc.lazy_device()
    mask = torch.ones(2, dtype=torch.bool).to(device)
    x = torch.zeros(3).to(device)
    with pytest.raises(IndexError, match="shape of the mask"):
        x[mask] = 1.0


@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian", "mode", "argmax", "aminmax"])
@pytest.mark.parametrize("shape", [(2, 0, 4), (0,), (0, 3), ()], ids=str)
def test_a_reduction_over_no_elements_is_refused_at_the_call(
    name: str, shape: tuple[int, ...]
) -> None:
    def attempted(device: torch.device | str, **dim: int) -> type[Exception] | None:
        try:
            getattr(torch, name)(torch.zeros(shape).to(device), **dim)
        except Exception as error:
            return type(error)
        return None

    dims = range(-max(len(shape), 1), max(len(shape), 1))
    for dim in ({}, *({"dim": d} for d in dims)):
        wanted, got = attempted("cpu", **dim), attempted(ltc.lazy_device(), **dim)
        assert (got is None) == (wanted is None) and issubclass(
            got or Exception, wanted or Exception
        ), dim


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(0, 0, 1), (1, -1, 1), (1, 0, 0)], ids=str
)
def test_convolutions_that_make_no_sense_are_refused(
    stride: int, padding: int, dilation: int
) -> None:
    device = ltc.lazy_device()
    x, w = torch.ones(1, 1, 5, 5).to(device), torch.ones(1, 1, 3, 3).to(device)
    with pytest.raises(RuntimeError):
        F.conv2d(x, w, stride=stride, padding=padding, dilation=dilation)


def test_masks_and_indices_without_dims_do_what_they_do_in_eager() -> None:
    for value in (True, False):
        for shape in ((), (3,), (0, 2)):
            answers = []
            for device in ("cpu", ltc.lazy_device()):
                x = torch.ones(shape).to(device)
                mask = torch.tensor(value).to(device)
                x[mask] = 5.0
                x[..., mask] = x[..., mask] * 2
                x[None, mask] = 3.0
                x.masked_fill_(~mask, 4.0)
                answers.append((x, x[mask], torch.masked_select(x, mask)))
            assert_same(*reversed(answers))
    for index in (1, -1):
        answers = []
        for device in ("cpu", ltc.lazy_device()):
            x = torch.zeros(3).to(device)
            x.index_put_((torch.tensor(index).to(device),), torch.tensor(2.0).to(device), True)
            answers.append(x)
        assert_same(*reversed(answers))


ONE_HOT = [
    ([[1, 0], [2, 1]], -1), ([1, 0], 4), (1, 3), ([], 3), ([], -1), ([], 0), ([5], 3), ([5], 0), ([-1], 3),
    ([-1], -1), ([0, -1], -1), ([1.0], 3),
]  # fmt: skip


@pytest.mark.parametrize(("classes", "count"), ONE_HOT, ids=str)
def test_one_hot_refuses_what_is_no_class(classes: list[int], count: int) -> None:
    host = torch.tensor(classes, dtype=None if classes else torch.int64)
    try:
        wanted = F.one_hot(host, count)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            F.one_hot(host.to(ltc.lazy_device()), count).cpu()
    else:
        assert_same(F.one_hot(host.to(ltc.lazy_device()), count), wanted)


def test_an_empty_range_to_draw_from_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expects 'from' to be less than 'to'"):
        torch.zeros(3, device=ltc.lazy_device()).random_(5, 5)
    with pytest.raises(RuntimeError, match="expects to return"):
        # A call that was recorded before with other numbers fails where it runs.
        torch.zeros(3, device=ltc.lazy_device()).uniform_(5.0, 2.0).tolist()


def test_a_range_that_the_dtype_does_not_hold_is_refused() -> None:
    x = torch.zeros(3, dtype=torch.float16, device=ltc.lazy_device())
    assert int(x.random_(0, 65505).max()) <= 65504
    with pytest.raises(RuntimeError, match="to - 1 is out of bounds"):
        x.random_(3, 65506)


def test_the_largest_of_nothing_is_refused() -> None:
    with pytest.raises((RuntimeError, IndexError), match="max"):
        torch.zeros(0, device=ltc.lazy_device()).max()


def test_a_draw_in_a_check_does_not_move_the_random_state() -> None:
    """Some calls are tried on stand-ins; the generators of the process must not notice."""
    device = ltc.lazy_device()
    weights = torch.ones(7).to(device)
    torch.manual_seed(3)
    host_before = torch.get_rng_state()
    torch.multinomial(weights, 3)
    weights.clone().bernoulli_(0.5)
    assert torch.equal(torch.get_rng_state(), host_before)
    torch.manual_seed(3)
    drawn = torch.multinomial(weights, 3)
    torch.manual_seed(3)
    assert torch.equal(drawn.cpu(), torch.multinomial(torch.ones(7), 3))


# -- operands that share memory ------------------------------------------------------------------

# Each is given the numbers 0 to 5, and may read and write parts of them.
SHARED: dict[str, Callable[[Tensor], object]] = {
    "add_, a step apart": lambda x: x[1:].add_(x[:-1]),
    "add_, values elsewhere": lambda x: x[1:].add_(x.clone()[:-1]),
    "add_, the whole": lambda x: x.add_(x),
    "add_, one part": lambda x: x[1:].add_(x[1:]),
    "add_, with gaps": lambda x: x[::2].add_(x[1::2]),
    "lerp_": lambda x: x[1:].lerp_(x[:-1], 0.5),
    "clamp_": lambda x: x[1:].clamp_(max=x[:-1]),
    "copy_": lambda x: x[1:].copy_(x[:-1]),
    "copy_, transposed": lambda x: x[:4].view(2, 2).copy_(x[:4].view(2, 2).t()),
    "out, a step apart": lambda x: torch.add(x[1:], 1, out=x[:-1]),
    "out, the operand": lambda x: torch.add(x, 1, out=x),
    "cumsum, out": lambda x: torch.cumsum(x[1:], 0, out=x[:-1]),
    "where, out": lambda x: torch.where(x[1:] > 0, x[1:], x[:-1], out=x[:-1]),
    "cat, out": lambda x: torch.cat([x[:2], x[3:4]], out=x[:3]),
    "foreach, a step apart": lambda x: torch._foreach_add_([x[1:]], [x[:-1]]),
    "foreach copy": lambda x: torch._foreach_copy_([x[1:]], [x[:-1]]),
    "foreach, crossed": lambda x: torch._foreach_add_([x[:3], x[3:]], [x[3:], x[:3]]),
    "foreach, overlapping writes": lambda x: torch._foreach_add_([x[:4], x[2:]], 1.0),
    "index_put_": lambda x: x.index_put_((_indices(x)[:2],), x[:2]),
    "index_add_": lambda x: x.index_add_(0, _indices(x), x),
    "index_copy_": lambda x: x.index_copy_(0, _indices(x), x),
    "scatter_": lambda x: x.scatter_(0, _indices(x), x),
    "masked_scatter_": lambda x: x.masked_scatter_(x > 2, x),
    "put_": lambda x: x.put_(_indices(x)[:2], x[:2]),
    "expanded, add_": lambda x: x[:1].expand(3).add_(1),
    "expanded, copy_": lambda x: x[:1].expand(3).copy_(x[:3]),
    "expanded, foreach": lambda x: torch._foreach_add_([x[:1].expand(3)], 1.0),
}  # fmt: skip


def _indices(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), device=x.device)


def test_shared_memory_is_refused_where_eager_refuses_it() -> None:
    """Twice, so that the steps of the accepted calls are known."""
    for name, write in SHARED.items():
        wanted = _written(write, "cpu")
        for _ in range(2):
            with Counting() as counted:
                got = _written(write, ltc.lazy_device())
            if isinstance(wanted, Exception):
                assert isinstance(got, type(wanted)), f"{name}: {got!r}, eager raises {wanted!r}"
            else:
                assert isinstance(got, Tensor), f"{name}: {got!r}, and eager accepts it"
                assert counted.fallbacks == {}, name
                assert_same(got, wanted)


def _written(write: Callable[[Tensor], object], device: torch.device | str) -> Tensor | Exception:
    x = torch.arange(6.0).to(device)
    try:
        write(x)
    except Exception as error:
        return error
    return x


def test_large_memory_that_is_shared_is_not_copied_for_a_check() -> None:
    x = torch.zeros(2**20 + 8).to(ltc.lazy_device())
    with Counting() as counted:
        x.add_(x)
        torch._foreach_mul_([x[:8], x[8:]], [x[:8], x[8:]])
        ltc.mark_step()
    assert counted.fallbacks == {}
    with pytest.raises(RuntimeError, match="single memory location"):
        x[1:].add_(x[:-1])


class Pivots(TorchDispatchMode):
    """The second operands of the calls within."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname.endswith("_solve"):
            self.seen.append(args[1].tolist())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", [aten.linalg_ldl_solve.default, aten.linalg_lu_solve.default])
def test_pivots_of_a_rehearsal_are_rows_of_the_matrix(op: torch._ops.OpOverload) -> None:
    """LAPACK swaps the rows that they name, whatever memory that is."""
    eager_checks._with_kernel.clear()
    operands = torch.eye(3), torch.tensor([2, 3, 3], dtype=torch.int32), torch.ones(3, 2)
    with Pivots() as pivots:
        assert not eager_checks.is_refused(OpSchema.of(op), operands, {})
    assert pivots.seen == [[1, 1, 1]]
    assert operands[1].tolist() == [2, 3, 3]


def test_a_rehearsal_changes_no_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of all threads: two rehearsals at once left an "ignore" behind."""
    seen = []

    def note(kind: str) -> Callable[..., None]:
        return lambda *args, **kwargs: seen.append(kind)

    def rehearse(size: int) -> None:
        x = torch.ones(3, size, device=ltc.lazy_device())
        torch.atan2(x, x), torch.hypot(x, x), torch.bucketize(x, x[0].contiguous())

    rehearse(11)  # here PyTorch imports what it had not yet
    for name in ("catch_warnings", "simplefilter", "filterwarnings", "resetwarnings"):
        monkeypatch.setattr(warnings, name, note(name))
    rehearse(12)
    monkeypatch.undo()
    assert seen == []
