"""`nn.TransformerEncoder` with a padding mask: as eager in each mode, rows of padding too."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from tests.core.beside_eager import run_beside_eager
from tests.core.counting import Counting
from tests.nets.tiers import tier

AT_THE_END = [[False, False, True, True], [False] * 4, [True] * 4]
WITHIN = [[False, True, False, True], [False] * 4]


def encoder(device: torch.device, **kwargs: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **kwargs).to(device).eval()


def batch(device: torch.device, rows: list[list[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.arange(float(len(rows) * 32)) * 37 % 23 / 7 - 1.5).view(-1, 4, 8)
    return x.to(device), torch.tensor(rows, device=device)


def modes(device: torch.device) -> Any:
    model = encoder(device)
    x, mask = batch(device, AT_THE_END)
    y, holes = batch(device, WITHIN)
    some = mask[:2]  # a sequence that is all padding is NaN where it is computed
    found = [model(x[:2], src_key_padding_mask=some)]  # with a gradient: no fast path
    with torch.no_grad():
        found += [
            model(x, src_key_padding_mask=mask),
            model(x[:2], None, torch.zeros(2, 4, device=device).masked_fill(some, -torch.inf)),
            model(y, src_key_padding_mask=holes),
            model(x[:2], torch.zeros(4, 4, device=device), some),
            model(x),
            encoder(device, norm=nn.LayerNorm(8, bias=True))(x, src_key_padding_mask=mask),
            encoder(device, enable_nested_tensor=False)(x[:2], src_key_padding_mask=some),
            encoder(device, mask_check=False)(y, src_key_padding_mask=holes),
            encoder(device).train()(x[:2], src_key_padding_mask=some).isfinite(),
        ]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found.append(model(x, src_key_padding_mask=mask))
    with torch.inference_mode():
        found.append(model(x, src_key_padding_mask=mask))
    model.requires_grad_(False)
    return [*found, model(x, src_key_padding_mask=mask)]


@pytest.mark.parametrize("chosen", ["ops", "lowered"])
def test_rows_of_padding_are_as_in_eager(chosen: str) -> None:
    with tier(chosen):
        run_beside_eager(modes, rounds=2)


def test_no_mask_is_read() -> None:
    device = ltc.lazy_device()
    model = encoder(device)
    x, mask = batch(device, AT_THE_END)
    ltc.mark_step(wait=True)
    with Counting() as counted, torch.no_grad():
        out = model(x, src_key_padding_mask=mask)
        ltc.mark_step(wait=True)
    assert counted.syncs == {"MarkStep": 1} and counted.fallbacks == {}
    assert out[0, 2:].abs().sum().item() == 0


def test_a_model_of_the_cpu_is_scripted_as_before() -> None:
    cpu = torch.device("cpu")
    model, (x, mask) = encoder(cpu, enable_nested_tensor=False), batch(cpu, WITHIN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    assert torch.equal(scripted(x, None, mask), model(x, None, mask))
