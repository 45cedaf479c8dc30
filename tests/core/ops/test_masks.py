"""Indexing by a mask: eager's numbers and errors; each mask is read once."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows": lambda x, m, k: x[m],
    "rows and a column": lambda x, m, k: x[m, 1],
    "rows and columns": lambda x, m, k: x[m, k[: int(m.sum())]],
    "a dim within": lambda x, m, k: x.t()[:, m],
    "elements": lambda x, m, k: x[x > 0.2],
    "a part": lambda x, m, k: x[1:][m[1:]],
    "none": lambda x, m, k: x[m & ~m],
    "all": lambda x, m, k: x[m | ~m],
    "of a mask": lambda x, m, k: m[m],
    "a number's worth": lambda x, m, k: x[torch.tensor(True, device=x.device)],
    "with a new dim": lambda x, m, k: x[None, m],
}


@pytest.mark.parametrize("name", CALLS)
def test_values(name: str) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        x, m = torch.randn(6, 5).to(device), (torch.rand(6) > 0.5).to(device)
        k = torch.arange(5).to(device)
        return [CALLS[name](x, m, k) for _ in range(3)]

    beside_eager(program)


def test_gradients_and_writes() -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(8, 4).to(device).requires_grad_()
        found = []
        for n in range(6):
            x = torch.randn(5 + n, 8).to(device)
            out = torch.zeros(5 + n, 4, device=device)
            for sign in (False, True):
                mask = (x[:, 0] > 0) == sign
                out[mask] = (x[mask] @ weight) * x[mask].sum(-1, keepdim=True)
            out.square().sum().backward()
            found += [out.detach(), weight.grad.clone()]
            weight.grad = None
        return found

    beside_eager(program)


def test_a_mask_is_read_once_until_it_changes(device: torch.device) -> None:
    x, mask = torch.arange(4.0).to(device), torch.tensor([True, False, True, False]).to(device)
    with Counting() as counted:
        found = [x[mask], x[mask] * 2, mask[mask]]
    assert counted.fallbacks == {"nonzero": 1}
    assert [t.tolist() for t in found] == [[0.0, 2.0], [0.0, 4.0], [True, True]]
    mask[1] = True
    assert x[mask].tolist() == [0.0, 1.0, 2.0]


def test_what_is_known_of_a_mask_dies_with_it(device: torch.device) -> None:
    mask = torch.tensor([True, False]).to(device)
    torch.ones(2).to(device)[mask].cpu()
    value = weakref.ref(mask._h.value)  # type: ignore[attr-defined]
    del mask
    gc.collect()
    assert value() is None


@pytest.mark.parametrize("size", [(3,), (4, 2), (2, 2, 2)])
def test_a_mask_that_does_not_fit(size: tuple[int, ...], device: torch.device) -> None:
    x, mask = torch.ones(4, 3), torch.ones(size, dtype=torch.bool)
    with pytest.raises(IndexError) as eager:
        x[mask]
    with pytest.raises(IndexError) as ours:
        x.to(device)[mask.to(device)].cpu()
    assert str(eager.value).partition("\n")[0] in str(ours.value)
