"""Storage types: under LTC_USE_BF16 and LTC_DOWNCAST_BF16 tensors are narrower than they say.

The settings are read once, so each combination runs in a process of its own: this file, as a program,
prints what it observed. The tests read that.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ltc_core as ltc
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta
from ltc_core.program.passes.narrow_dtypes import StorageTypes
from ltc_core.settings import Settings, settings
from ltc_core.tensor.handles import base_of
from tests import prepared

aten = torch.ops.aten
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16

# Stored as: reported dtype -> dtype, for each way to ask.
MODES = {
    "LTC_USE_BF16": {"float32": "bfloat16", "float64": "bfloat16"},
    "LTC_DOWNCAST_BF16": {"float32": "bfloat16", "float64": "float32"},
}
ALIASES = {"XLA_USE_BF16": "LTC_USE_BF16", "XLA_DOWNCAST_BF16": "LTC_DOWNCAST_BF16"}
OTHER_DTYPES = ("int64", "int32", "uint8", "bool", "float16", "bfloat16", "complex64")

# -- what is observed ------------------------------------------------------------------------------


def _matrix(device: torch.device | str, dtype: torch.dtype = f32) -> Tensor:
    host = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]], dtype=dtype)
    return host.to(device)


def _written(t: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    t = t.clone()
    write(t)
    return t


# Each takes the symmetric, positive matrix above. None of the second group has a bfloat16 kernel.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda t: (t * 2 + 1) / 3 - t,
    "matmul": lambda t: t @ t,
    "linear": lambda t: F.linear(t, t, t[0]),
    "sum": lambda t: t.sum(),
    "sum as double": lambda t: t.sum(dtype=f64),
    "softmax as float": lambda t: t.softmax(1, dtype=f32),
    "mean over a dim": lambda t: t.mean(0),
    "compare": lambda t: t > 1,
    "max": lambda t: t.max(1)[0],
    "sort": lambda t: t.sort(1)[0],
    "cat with integers": lambda t: torch.cat([t, torch.ones(1, 3, dtype=torch.int64).to(t.device)]),
    "where": lambda t: torch.where(t > 1, t, 0.5),
    "in place": lambda t: _written(t, lambda w: w.mul_(2).add_(1)),
    "part in place": lambda t: _written(t, lambda w: w[1].zero_()),
    "index_put": lambda t: _written(t, lambda w: w.index_put_((w[0] > 1,), w[0].clone())),
    "norm": lambda t: F.layer_norm(t, (3,)),
    "to double": lambda t: t.double() * 2,
    "to float": lambda t: t.double().float() * 2,
    "to half": lambda t: t.half() + 1,
    "integers divided": lambda t: torch.arange(1, 4).to(t.device) / 2,
    "integers and floats": lambda t: torch.arange(1, 4).to(t.device) + t,
    "full": lambda t: torch.full((2,), 2.5, device=t.device),
    "double factory": lambda t: torch.ones(2, dtype=f64, device=t.device) / 3,
    "attention": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None]),
    "conv": lambda t: F.conv1d(t[None], t[:, :, None]),
    "out": lambda t: torch.mul(t, 2, out=torch.empty(3, 3, device=t.device)),
    # without bfloat16 kernels
    "inv": lambda t: torch.linalg.inv(t),
    "cholesky": lambda t: torch.linalg.cholesky(t),
    "solve": lambda t: torch.linalg.solve(t, t[:, :1]),
    "qr": lambda t: torch.linalg.qr(t)[1].abs(),
    "eigvalsh": lambda t: torch.linalg.eigvalsh(t),
    "inv in place": lambda t: _written(t, lambda w: torch.linalg.inv(w, out=w)),
    "fft": lambda t: torch.fft.rfft(t).abs(),
    "cdist": lambda t: torch.cdist(t, t[:1]),
    "complex": lambda t: torch.complex(t, t).abs(),
    "polar": lambda t: torch.polar(t, t).real * 1,
    "histc": lambda t: t.histc(3, 0, 4),
}  # fmt: skip


def _stored(t: Tensor) -> str:
    """What the device holds for a tensor, once it has run."""
    buffer = base_of(t._h).value.buffer
    return str(buffer.take().dtype).removeprefix("torch.")


def _outcome(call: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, Any]:
    wanted = call(_matrix("cpu"))
    try:
        got = call(_matrix(device))
        ltc.mark_step(wait=True)
        back = got.cpu()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    close = torch.allclose(back.double(), wanted.double(), rtol=0.04, atol=0.04)
    return {
        "reported": str(got.dtype),
        "expected": str(wanted.dtype),
        "back": str(back.dtype),
        "stored": _stored(got),
        "close": close or f"{back.tolist()} is not {wanted.tolist()}",
    }


def observe() -> dict[str, Any]:
    device = ltc.lazy_device()
    found: dict[str, Any] = {"calls": {n: _outcome(call, device) for n, call in CALLS.items()}}
    found["kinds"] = {}
    for name in ("float32", "float64", *OTHER_DTYPES):
        host = torch.tensor([1.0, 0.0, 3.0]).to(getattr(torch, name))
        t = host.to(device)
        found["kinds"][name] = [_stored(t), str(t.dtype), str(t.cpu().dtype), t.element_size()]
    third = torch.tensor([1 / 3, 1e-3, 300.7], dtype=f64)
    found["third as float"] = third.float().to(device).tolist()
    found["third as double"] = third.to(device).tolist()
    found["256 + 1"] = (torch.tensor([256.0]).to(device) + 1).item()
    found["double 2**30 + 1"] = (torch.tensor([2.0**30], dtype=f64).to(device) + 1).item()
    found["bits"] = _observe_bits(device)
    found["training"] = _observe_training(device)
    torch.manual_seed(5)
    first = torch.rand(4, device=device).tolist()
    torch.manual_seed(5)
    found["same seed, same numbers"] = first == torch.rand(4, device=device).tolist()
    found["settings"] = [settings.use_bf16, settings.downcast_bf16]
    return found


def _observe_bits(device: torch.device) -> dict[str, Any]:
    ones = torch.tensor([1.0, -2.5]).to(device)
    found: dict[str, Any] = {}
    found["float as int32"] = ones.view(torch.int32).tolist()
    found["int32 as float"] = (
        torch.tensor([0x3FC00000], dtype=torch.int32).to(device).view(f32).tolist()
    )
    found["float as bytes"] = list(ones.view(torch.uint8).shape)
    found["double as int64"] = ones.double().view(torch.int64).tolist()
    try:
        ones.view(torch.int32).bitwise_xor_(torch.tensor(-(2**31), dtype=torch.int32).to(device))
        found["sign flipped"] = ones.tolist()
    except Exception as error:
        found["sign flipped"] = f"{type(error).__name__}: {error}"
    return found


def _observe_training(device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(8, 4).to(device)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        ltc.mark_step()
        losses.append(loss.detach())
    weight = net.weight.detach().cpu()
    return {
        "losses": [float(v) for v in losses],
        "weight dtype": str(weight.dtype),
        "weight fits in bfloat16": torch.equal(weight, weight.bfloat16().float()),
        "grad stored": _stored(net.weight.grad),
    }


@functools.cache
def _run_with(variable: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, variable: "1", "PYTHONPATH": os.getcwd()}
    return prepared.run(
        [sys.executable, os.path.abspath(__file__)],
        env=environ, capture_output=True, text=True, timeout=50,
    )  # fmt: skip


def observed(variable: str) -> dict[str, Any]:
    done = _run_with(variable)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- what is held ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_floats_are_stored_narrow_and_report_their_own_dtype(mode: str) -> None:
    sizes = {"float32": 4, "float64": 8}
    for name, stored in MODES[mode].items():
        reported = f"torch.{name}"
        assert observed(mode)["kinds"][name] == [stored, reported, reported, sizes[name]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_other_dtypes_are_stored_as_they_are(mode: str, name: str) -> None:
    stored, reported, back, _ = observed(mode)["kinds"][name]
    assert (stored, reported, back) == (name, f"torch.{name}", f"torch.{name}")


def test_nothing_is_narrowed_unless_asked() -> None:
    t = torch.ones(3).to(ltc.lazy_device())
    doubled = t.double() * 2
    ltc.mark_step(wait=True)
    assert (_stored(t), _stored(doubled)) == ("float32", "float64")


@pytest.mark.parametrize("mode", MODES)
def test_values_come_back_rounded_in_their_reported_dtype(mode: str) -> None:
    third = torch.tensor([1 / 3, 1e-3, 300.7], dtype=f64)
    found = observed(mode)
    narrow = {name: getattr(torch, stored) for name, stored in MODES[mode].items()}
    assert found["third as float"] == third.float().to(narrow["float32"]).tolist()
    assert found["third as double"] == third.to(narrow["float64"]).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_arithmetic_is_that_of_the_stored_type(mode: str) -> None:
    found = observed(mode)
    assert found["256 + 1"] == 256.0  # bfloat16 has eight bits
    assert found["double 2**30 + 1"] == 2.0**30


# -- ops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_ops_give_eagers_dtype_and_about_its_values(mode: str, name: str) -> None:
    outcome = observed(mode)["calls"][name]
    assert "error" not in outcome, outcome["error"]
    assert outcome["reported"] == outcome["expected"] == outcome["back"]
    assert outcome["close"] is True
    bare = outcome["reported"].removeprefix("torch.")
    assert outcome["stored"] == MODES[mode].get(bare, bare)


@pytest.mark.parametrize("mode", MODES)
def test_bits_are_those_of_the_reported_type(mode: str) -> None:
    bits = observed(mode)["bits"]
    ones = torch.tensor([1.0, -2.5])
    assert bits["float as int32"] == ones.view(torch.int32).tolist()
    assert bits["int32 as float"] == [1.5]
    assert bits["float as bytes"] == [8]
    assert bits["double as int64"] == ones.double().view(torch.int64).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_a_write_to_bits_that_are_not_there_is_refused(mode: str) -> None:
    refused = observed(mode)["bits"]["sign flipped"]
    assert refused.startswith("UnsupportedOpError: a write through view(dtype)")
    assert "unset LTC_USE_BF16" in refused


@pytest.mark.parametrize("mode", MODES)
def test_a_model_trains_in_the_stored_type(mode: str) -> None:
    found = observed(mode)["training"]
    wanted = _observe_training(torch.device(ltc.lazy_device()))
    assert found["losses"] == pytest.approx(wanted["losses"], rel=0.05)
    assert found["losses"] != wanted["losses"]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["weight dtype"] == "torch.float32"
    assert found["weight fits in bfloat16"]
    assert found["grad stored"] == "bfloat16"
    assert not wanted["weight fits in bfloat16"]


@pytest.mark.parametrize("mode", MODES)
def test_seeds_hold(mode: str) -> None:
    assert observed(mode)["same seed, same numbers"] is True


# -- how it is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ALIASES)
def test_the_peers_names_ask_for_the_same(alias: str) -> None:
    wanted = Settings.from_environ({ALIASES[alias]: "1"})
    found = Settings.from_environ({alias: "1"})
    assert (found.use_bf16, found.downcast_bf16) == (wanted.use_bf16, wanted.downcast_bf16)
    assert found.use_bf16 or found.downcast_bf16


def test_the_peers_names_work_in_a_program() -> None:
    found = observed("XLA_USE_BF16")
    assert found["settings"] == [True, False]
    assert found["kinds"] == observed("LTC_USE_BF16")["kinds"]


def test_the_settings_choose_the_mapping() -> None:
    assert StorageTypes.from_settings() is None
    with settings.override(use_bf16=True):
        wide = StorageTypes.from_settings()
    with settings.override(downcast_bf16=True):
        down = StorageTypes.from_settings()
    assert wide is not None
    assert down is not None
    assert (wide.of(f32), wide.of(f64), wide.of(torch.int64)) == (bf16, bf16, torch.int64)
    assert (down.of(f32), down.of(f64)) == (bf16, f32)


# -- rewriting -------------------------------------------------------------------------------------


def test_dtypes_that_nodes_name_are_the_stored_ones() -> None:
    types = StorageTypes({f32: bf16})
    meta = TensorMeta.packed((2,), f32)
    cast = Node(aten._to_copy.default, (Ref(0),), {"dtype": f32}, 1, (meta,), result=0)
    made = Node(aten.ones.default, ((2,),), {"dtype": torch.int64}, 2, (meta,), result=0)
    bits = Node(aten.view.dtype, (Ref(0), f32), {}, 3, (meta,), view=True, result=0)
    graph = types.rewrite(Graph((cast, made, bits), {0: meta}, (1, 2, 3)))
    assert graph.nodes[0].kwargs == {"dtype": bf16}
    assert graph.nodes[1].kwargs == {"dtype": torch.int64}
    assert graph.nodes[2].args == (Ref(0), f32)  # bits are those of the reported type
    assert cast.kwargs == {"dtype": f32}  # the recorded node is as it was


def test_an_op_that_is_wrong_in_any_type_still_raises() -> None:
    types = StorageTypes({f32: bf16})

    def run(*args: torch.Tensor) -> Any:
        return types.call(aten.mm.default, aten.mm.default, args, {})

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run(torch.ones(2, 3, dtype=bf16), torch.ones(2, 3, dtype=bf16))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run(torch.ones(2, 3), torch.ones(2, 3))


def test_what_an_op_writes_in_the_wide_type_is_brought_back() -> None:
    types = StorageTypes({f32: bf16})

    def invert(t: Tensor, out: Tensor) -> Tensor:
        if t.dtype is bf16:
            raise NotImplementedError("no such kernel")
        return out.copy_(torch.linalg.inv(t))

    t = (torch.eye(2) * 2).to(bf16)
    out = torch.zeros(2, 2, dtype=bf16)
    result = types.call(aten.linalg_inv_ex.default, invert, (t,), {"out": out})
    assert result is out
    assert torch.equal(out, torch.eye(2, dtype=bf16) / 2)
    assert torch.equal(t, torch.eye(2, dtype=bf16) * 2)


if __name__ == "__main__":
    print(json.dumps(observe()))
