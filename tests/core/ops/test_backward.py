"""Backward passes run in the thread that calls them; what the user says about autograd's threads stays said."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import ltc_core as ltc
from tests.core.counting import Counting

is_multithreaded = torch._C._is_multithreading_enabled
Pass = Callable[[torch.Tensor, torch.Tensor], None]


def _edge(x: torch.Tensor, loss: torch.Tensor) -> None:
    torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))


PASSES: dict[str, Pass] = {
    "backward": lambda x, loss: loss.backward(),
    "grad": lambda x, loss: x.__setattr__("grad", *torch.autograd.grad(loss, x)),
    "from_the_cpu": lambda x, loss: (loss.cpu() * 1).backward(),
    "from_an_edge": _edge,
    "from_several": lambda x, loss: torch.autograd.backward([loss.cpu(), loss.sum()]),
}


@pytest.mark.parametrize("name", PASSES)
def test_it_runs_in_the_calling_thread(name: str) -> None:
    """Recorded, and followed; no step compiles anew, as one would whose values another thread still holds."""
    device = ltc.lazy_device()
    threads: set[int] = set()
    compiles = []
    for _ in range(4):
        x = torch.ones(3, device=device, requires_grad=True)
        loss = (x * 2).sum()
        loss.grad_fn.register_hook(lambda *_: threads.add(threading.get_ident()))
        with Counting() as counted:
            PASSES[name](x, loss)
            assert is_multithreaded()
            ltc.mark_step()
        compiles.append(counted.compiles)
        assert x.grad is not None and x.grad[0].item() == (4 if name == "from_several" else 2)
        del x, loss
    assert threads == {threading.get_ident()} and compiles[2:] == [0, 0]


def test_the_setting_of_the_user_stays() -> None:
    x = torch.ones(3, device=ltc.lazy_device(), requires_grad=True)
    seen = []
    for wanted in (True, False):
        with torch.autograd.set_multithreading_enabled(wanted):
            for _ in range(4):
                loss = (x * 2).sum()
                assert is_multithreaded() is wanted
                loss.backward()
                ltc.mark_step()
                assert is_multithreaded() is wanted
            host = torch.ones(2, requires_grad=True)
            doubled = host * 2
            doubled.grad_fn.register_hook(lambda *_: seen.append(is_multithreaded()))
            doubled.sum().backward()
    assert seen == [True, False] and is_multithreaded()


def test_the_setting_is_back_when_a_pass_raises() -> None:
    x = torch.ones(3, device=ltc.lazy_device(), requires_grad=True)
    loss = (x * 2).sum()

    def fails(*_: object) -> None:
        raise KeyError("mine")

    loss.grad_fn.register_hook(fails)
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    assert is_multithreaded()
