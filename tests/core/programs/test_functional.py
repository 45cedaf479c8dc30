"""`torch.func` on the device: grad, vmap, jacobians, functional_call, as on other devices."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting


def wave(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).sum()


def mix(x: Tensor) -> Tensor:
    return x.outer(x).cumsum(0)[:, 1] * x.sum()


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: grad(wave)(x),
    "grad_of_grad": lambda x: grad(lambda t: grad(wave)(t).sum())(x),
    "grad_and_value": lambda x: grad_and_value(wave)(x),
    "vjp": lambda x: vjp(mix, x)[1](torch.ones_like(x)),
    "jvp": lambda x: jvp(mix, (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: jacrev(mix)(x),
    "jacfwd": lambda x: jacfwd(mix)(x),
    "hessian": lambda x: hessian(wave)(x),
    "vmap": lambda x: vmap(lambda row: row * 2 + row.sum())(x.outer(x)),
    "vmap_over_columns": lambda x: vmap(torch.dot, (1, None))(x.outer(x), x),
    "vmap_of_grad": lambda x: vmap(grad(wave))(x.outer(x)),
    "vmap_of_vmap": lambda x: vmap(vmap(lambda t: t.clamp(min=0)))(x.outer(x)),
    "vmap_matmul": lambda x: vmap(torch.matmul)(x.outer(x).expand(3, -1, -1), x.expand(3, -1)),
    "vmap_in_place": lambda x: vmap(lambda row: row.clone().add_(1).mul_(row))(x.outer(x)),
    "vmap_index": lambda x: vmap(lambda row: row[1:].flip(0))(x.outer(x)),
    "functionalize": lambda x: functionalize(lambda t: t.clone().add_(1).view(-1).mul_(2))(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's jvp rules use it
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    def program(device: torch.device) -> Any:
        x = torch.linspace(-1, 1, 4).to(device)
        return TRANSFORMS[name](x), x

    beside_eager(program, rtol=1e-5, atol=1e-6)


def test_gradients_for_each_sample() -> None:
    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
        params = {k: v.detach() for k, v in model.named_parameters()}
        x, y = torch.ones(5, 3, device=device), torch.tensor([0, 1, 0, 1, 1], device=device)

        def loss(p: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, p, (sample[None],)), label[None])

        return vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)

    beside_eager(program, rtol=1e-5, atol=1e-6)


def test_an_ensemble() -> None:
    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        models = [nn.Linear(3, 2).to(device) for _ in range(3)]
        params, buffers = stack_module_state(models)  # type: ignore[arg-type]

        def call(p: Any, b: Any, x: Tensor) -> Tensor:
            return functional_call(models[0], (p, b), (x,))

        return vmap(call, in_dims=(0, 0, None))(params, buffers, torch.ones(4, 3, device=device))

    beside_eager(program, rtol=1e-6)


def test_random_numbers_under_vmap() -> None:
    def program(device: torch.device) -> Any:
        x = torch.zeros(3, 4, device=device)
        same = vmap(lambda row: row + torch.rand_like(row), randomness="same")(x)
        different = vmap(lambda row: F.dropout(row + 1), randomness="different")(x)
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(lambda row: torch.rand_like(row))(x)
        return same, different

    beside_eager(program)


def test_a_step_written_with_grad_is_one_graph() -> None:
    device = ltc.lazy_device()
    w = torch.ones(4, device=device)
    for _ in range(3):
        with Counting() as counted:
            w = w - 0.1 * grad(wave)(w)
            ltc.mark_step()
    assert counted.syncs == {"MarkStep": 1} and not counted.fallbacks and not counted.compiles


# The function, and where the point is taken from. Its tangent is other memory.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[0],
    "column": lambda x: x[:, 1],
    "part_of_a_part": lambda x: x[1:].t()[0],
    "chunk": lambda x: x.chunk(3)[2][0],
    "all": lambda x: x.view(-1)[:3],
    "turned": lambda x: x.t()[1],
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("tangent", ["own", "same_memory"])
@pytest.mark.parametrize("name", PARTS)
def test_jvp_at_a_part_of_a_tensor(name: str, tangent: str) -> None:
    """Views of the point and of its tangent must lie alike, whatever memory the tangent came in."""

    def program(device: torch.device) -> Any:
        x = torch.linspace(-1, 1, 9).view(3, 3).to(device)
        weight = torch.linspace(0, 1, 6).view(2, -1).to(device)
        point = PARTS[name](x)
        along = (x[2] if tangent == "same_memory" else torch.ones(3, device=device))[: len(point)]

        def f(t: Tensor) -> Tensor:
            return F.linear(t[1:].unsqueeze(0), weight[:, : len(t) - 1]).view(-1).sin()

        return jvp(f, (point,), (along,)), jacfwd(f)(point), hessian(lambda t: f(t).sum())(point)

    beside_eager(program, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_jvp_at_a_part_of_complex_numbers_that_were_real_ones() -> None:
    def program(device: torch.device) -> Any:
        x = torch.view_as_complex(torch.linspace(-1, 1, 12).view(3, 2, 2).to(device))
        return jvp(lambda t: t.conj() * t[0], (x[1],), (x[2].clone(),))

    beside_eager(program)


# PyTorch's own rules for jvp are scripts; the first use of one in a process warns.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_step_written_with_jvp_is_one_graph() -> None:
    """Forward-mode autograd asks for sizes and memory, which are known without values."""
    device = ltc.lazy_device()
    w = torch.ones(4, device=device)
    for _ in range(3):
        with Counting() as counted:
            w = w - 0.1 * jvp(wave, (w,), (torch.ones_like(w),))[1]
            ltc.mark_step()
    assert counted.syncs == {"MarkStep": 1} and not counted.fallbacks and not counted.compiles


def test_linearize_is_refused_and_jvp_named() -> None:
    x = torch.ones(3, device=ltc.lazy_device())
    with pytest.raises(ltc.errors.UnsupportedOpError, match="call torch.func.jvp") as error:
        linearize(wave, x)
    assert "torch.func.linearize" in str(error.value)


def test_backward_holds_nothing_when_it_has_returned() -> None:
    """Were it run by a thread of autograd's, that one might let go of a value after the cut."""
    w = torch.ones(4, device=ltc.lazy_device(), requires_grad=True)
    ran: list[int] = []

    def step() -> None:
        loss = (w * 2).sum()
        loss.register_hook(lambda gradient: ran.append(threading.get_ident()))
        loss.backward()

    step()
    other = threading.Thread(target=step)
    other.start()
    assert other.ident is not None
    other.join()
    assert ran == [threading.get_ident(), other.ident]
