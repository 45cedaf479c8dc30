"""`torch.autocast` on the device: PyTorch's own op lists, its header, and training beside the CPU.

Dtypes must be those of CPU autocast where the two lists agree and those of CUDA's list elsewhere;
values must be those of the same ops, cast by hand, on the CPU.
"""

import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastTestLists

import ltc_core as ltc
from ltc_core.ops import autocast
from tests.core.counting import Counting

DEVICE = ltc.lazy_device().type
LOWER = [torch.bfloat16, torch.float16]
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def lazy(*size: int) -> Tensor:
    return torch.randn(*size).to(DEVICE)


# -- the table -------------------------------------------------------------------------------------


def listed_in_header(macro: str) -> set[str]:
    """The ops of one list of PyTorch's header, as 'name' or 'name.overload'."""
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)(.*?[^\\])\n", text, re.S)
    assert body is not None, f"{HEADER} has no {macro}"
    rows = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {f"{name}.{overload}" if overload else name for name, overload in rows}


def test_every_op_of_pytorchs_lists_has_a_rule() -> None:
    lower = listed_in_header("AT_FORALL_LOWER_PRECISION_FP")
    assert len(lower) > 30
    assert lower <= set(autocast.LOWER_PRECISION)
    assert listed_in_header("AT_FORALL_FP32") <= set(autocast.FLOAT32)
    assert listed_in_header("AT_FORALL_FP32_SET_OPT_DTYPE") == set(autocast.FLOAT32_RESULT)
    # The one op that CUDA promotes and we, as the CPU, cast.
    promoted = listed_in_header("AT_FORALL_PROMOTE") - {"grid_sampler"}
    assert promoted <= set(autocast.PROMOTE)


def test_every_rule_is_registered_once() -> None:
    names = [
        *autocast.LOWER_PRECISION,
        *autocast.FLOAT32,
        *autocast.FLOAT32_RESULT,
        *autocast.FLOAT32_OVERLOAD,
        *autocast.PROMOTE,
    ]
    assert len(names) == len(set(names))
    kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [n for n in names if not kernel_for(f"aten::{n}", "AutocastPrivateUse1")] == []


# -- every op, against the same op cast by hand ----------------------------------------------------


def tree_map(function: Callable[[Tensor], Tensor], item: Any) -> Any:
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, list | tuple):
        return type(item)(tree_map(function, i) for i in item)
    return item


def cast_on_cpu(item: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda t: t.cpu().to(dtype) if t.is_floating_point() else t.cpu(), item)


def function_named(name: str) -> Callable[..., Any]:
    places = (torch, torch._C._nn, torch._C._linalg)
    return next(getattr(place, name) for place in places if hasattr(place, name))


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize(
    "group",
    [
        "torch_fp16",
        "nn_fp16",
        "linalg_fp16",
        "torch_fp32",
        "nn_fp32",
        "torch_need_autocast_promote",
    ],
)
def test_ops_of_pytorchs_test_lists(group: str, lower: torch.dtype) -> None:
    torch.manual_seed(0)
    runs_in = lower if group.endswith("fp16") else torch.float32
    checked = 0
    for name, args, *rest in getattr(AutocastTestLists(DEVICE), group):
        # CUDA's own ops, and one row whose arguments are no arguments (PyTorch skips it too).
        if name.startswith("cudnn") or name == "einsum":
            continue
        kwargs = rest[0] if rest else {}
        function = function_named(name)
        with torch.autocast(DEVICE, dtype=lower):
            found = function(*args, **kwargs)
        wanted = function(*cast_on_cpu(args, runs_in), **kwargs)
        cell = name in ("lstm_cell", "gru_cell")  # fused differently: rounded at other places
        tolerance = {"atol": 0.05, "rtol": 0.02} if cell else {}
        torch.testing.assert_close(
            tree_map(Tensor.cpu, found), wanted, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
        checked += 1
    assert checked > 0


# -- the ops a model is made of, against CPU autocast ----------------------------------------------

MAIN_OPS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(2, 3, 4), (4, 5)]),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), [(2, 3, 4), (4, 5)]),
    "linear": (F.linear, [(3, 4), (5, 4), (5,)]),
    "conv1d": (F.conv1d, [(2, 3, 8), (4, 3, 3), (4,)]),
    "conv2d": (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    "conv2d same": (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "conv3d": (F.conv3d, [(2, 3, 5, 5, 5), (4, 3, 3, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 4, 4), (3, 4, 3, 3)]),
    "sdpa": (F.scaled_dot_product_attention, [(2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)]),
    "sdpa causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)],
    ),
    "softmax": (lambda x: x.softmax(1), [(3, 4)]),
    "log_softmax": (lambda x: x.log_softmax(1), [(3, 4)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(3, 4), (4,), (4,)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [(3, 4)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(3, 4)]),
    "gelu": (F.gelu, [(3, 4)]),
    "avg_pool3d": (lambda x: F.avg_pool3d(x.bfloat16(), 2), [(1, 2, 4, 4, 4)]),
    "cat": (lambda a, b: torch.cat([a, b.bfloat16()]), [(3, 4), (3, 4)]),
    "mse_loss": (lambda a, b: F.mse_loss(a.bfloat16(), b), [(3, 4), (3, 4)]),
    "fft": (lambda x: torch.fft.rfft(x.bfloat16()).abs(), [(3, 8)]),
    "inverse": (lambda x: torch.linalg.inv((x + 4).tril().bfloat16()), [(4, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", MAIN_OPS)
def test_like_cpu_autocast(name: str) -> None:
    """Dtype, values and gradients, on float32 arguments."""
    function, sizes = MAIN_OPS[name]
    torch.manual_seed(0)
    on_cpu = [torch.randn(size) for size in sizes]
    results = {}
    for device in ("cpu", DEVICE):
        args = [x.clone().to(device).requires_grad_() for x in on_cpu]
        with torch.autocast(device, dtype=torch.bfloat16):
            out = function(*args)
        out.float().square().mean().backward()
        results[device] = [out.detach(), *(x.grad for x in args)]
    for wanted, found in zip(results["cpu"], results[DEVICE], strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found.cpu(), wanted, atol=0.02, rtol=0.02)


def test_softmax_and_norms_of_lower_precision_are_in_float32_as_on_cuda() -> None:
    x = lazy(3, 4).bfloat16()
    with torch.autocast(DEVICE):
        for out in (x.softmax(1), F.layer_norm(x, (4,)), x.sum(), x.norm(), x.norm(dim=0), x.exp()):
            assert out.dtype == torch.float32
        assert x.norm(dtype=torch.bfloat16).dtype == torch.bfloat16
        assert x.softmax(1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert x.sum(dtype=torch.float64).dtype == torch.float64


def test_other_dtypes_are_left_alone() -> None:
    with torch.autocast(DEVICE):
        double = lazy(3, 3).double()
        assert (double @ double).dtype == torch.float64
        assert double.norm().dtype == torch.float64
        whole = torch.ones(3, 3, dtype=torch.long, device=DEVICE)
        assert (whole @ whole).dtype == torch.long
        assert whole.sum().dtype == torch.long
        on_cpu = torch.randn(3, 3)
        assert (on_cpu @ on_cpu).dtype == torch.float32


def test_promotion_takes_the_widest_dtype() -> None:
    half, single = lazy(4).half(), lazy(4)
    with torch.autocast(DEVICE):
        assert torch.dot(half.bfloat16(), half.bfloat16()).dtype == torch.bfloat16
        assert torch.dot(half, single).dtype == torch.float32
        # CUDA refuses the other lower precision here; float32 holds both.
        assert torch.dot(half, half.bfloat16()).dtype == torch.float32
        assert torch.stack([half, single]).dtype == torch.float32


# -- regions ---------------------------------------------------------------------------------------


def test_the_default_is_bfloat16_and_float16_is_allowed() -> None:
    x = lazy(3, 3)
    with torch.autocast(DEVICE):
        assert (x @ x).dtype == torch.bfloat16
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert (x @ x).dtype == torch.float16
    with getattr(torch, DEVICE).amp.autocast():
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32


def test_a_dtype_that_is_not_allowed_warns_and_disables() -> None:
    x = lazy(3, 3)
    with pytest.warns(UserWarning, match="only supports dtypes of torch.bfloat16, torch.float16"):
        region = torch.autocast(DEVICE, dtype=torch.float64)
    with region:
        assert (x @ x).dtype == torch.float32


def test_nested_and_disabled_regions() -> None:
    x = lazy(3, 3)
    with torch.autocast(DEVICE):
        with torch.autocast(DEVICE, enabled=False):
            assert (x @ x).dtype == torch.float32
            with torch.autocast(DEVICE, dtype=torch.float16):
                low = x @ x
                assert low.dtype == torch.float16
            assert (x @ low.float()).dtype == torch.float32
        assert (x @ low).dtype == torch.bfloat16
        with torch.autocast("cpu"):
            assert (x @ x).dtype == torch.bfloat16
    with torch.autocast("cpu"):
        assert (x @ x).dtype == torch.float32


def test_a_region_ends_when_it_raises() -> None:
    x = lazy(3, 3)
    with pytest.raises(RuntimeError, match="shape|size"), torch.autocast(DEVICE):
        x @ lazy(4, 4)
    assert not torch.is_autocast_enabled(DEVICE)
    assert (x @ x).dtype == torch.float32


def test_as_a_decorator() -> None:
    @torch.autocast(DEVICE)
    def square(x: Tensor) -> Tensor:
        return x @ x

    assert square(lazy(3, 3)).dtype == torch.bfloat16


def test_a_region_is_of_its_thread() -> None:
    x = lazy(3, 3)
    found = []

    def work() -> None:
        found.append((x @ x).dtype)
        # The default of a new thread is PyTorch's own, float16: nobody can set it from outside.
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            found.append((x @ x).dtype)

    with torch.autocast(DEVICE):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [torch.float32, torch.bfloat16]


def test_out_and_in_place_calls_are_not_cast() -> None:
    x, out = lazy(3, 3), lazy(3, 3)
    with torch.autocast(DEVICE):
        torch.mm(x, x, out=out)
        assert out.dtype == torch.float32
        assert x.addmm_(x, x).dtype == torch.float32


def test_outside_a_region_no_kernel_of_ours_is_reached() -> None:
    key = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    x = lazy(3, 3)
    with Counting() as plain:
        x @ x
        ltc.mark_step(wait=True)
    assert "_to_copy" not in plain.ops
    with torch.autocast(DEVICE):
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(key)


# -- backward and casts of weights -----------------------------------------------------------------


def test_gradients_of_weights_are_float32_and_saved_tensors_are_not() -> None:
    layer = nn.Linear(4, 4).to(DEVICE)
    saved = []

    def note(t: Tensor) -> Tensor:
        saved.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast(DEVICE):
        out = layer(layer(lazy(3, 4)))
    assert saved and set(saved) == {torch.bfloat16}
    out.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("cache_enabled", "casts"), [(True, 4), (False, 8)])
def test_a_weight_used_often_is_cast_once(cache_enabled: bool, casts: int) -> None:
    """Each cast of the region is one more in backward, of the gradient."""
    weight, x = lazy(4, 4).requires_grad_(), lazy(3, 4).requires_grad_()
    ltc.mark_step()
    with Counting() as seen:
        with torch.autocast(DEVICE, cache_enabled=cache_enabled):
            out = ((x @ weight) @ weight) @ weight
        out.backward(out.detach())
        ltc.mark_step(wait=True)
    assert seen.ops["_to_copy"] == casts


def test_a_weight_changed_in_the_region_is_cast_again() -> None:
    weight = torch.ones(2, 2, device=DEVICE).requires_grad_()
    x = torch.ones(2, 2, device=DEVICE).requires_grad_()
    with torch.autocast(DEVICE):
        first = x @ weight
        with torch.no_grad():
            weight.mul_(3)
        second = x @ weight
        weight.data = torch.full((2, 2), 5.0, device=DEVICE)
        third = x @ weight
    assert [y[0, 0].item() for y in (first, second, third)] == [2, 6, 10]


def test_a_cast_made_without_grad_is_not_used_with_it() -> None:
    weight = lazy(2, 2).requires_grad_()
    x = lazy(2, 2).requires_grad_()
    with torch.autocast(DEVICE):
        with torch.no_grad():
            kept = x @ weight
        out = x @ weight
    out.sum().backward()
    assert weight.grad is not None and not kept.requires_grad


def test_casts_do_not_outlive_weight_or_graph() -> None:
    gc.collect()
    before = len(autocast._weight_casts)
    weight = lazy(4, 4).requires_grad_()
    x = lazy(3, 4).requires_grad_()
    with torch.autocast(DEVICE):
        out = x @ weight
    entry = autocast._weight_casts[id(weight)]
    assert entry.copy() is not None
    out.sum().backward()
    ltc.mark_step(wait=True)
    assert entry.copy() is None
    del weight, x, out
    gc.collect()
    assert len(autocast._weight_casts) == before
