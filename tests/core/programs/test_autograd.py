"""Autograd on the device: hooks, custom Functions, double backward, accumulation, threads.

Each program is run beside eager PyTorch. Modes such as no_grad, activation checkpointing and
`torch.func` have files of their own: test_grad_modes.py, test_activation_checkpointing.py, test_functional.py.
"""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltc_core as ltc
from tests.core.beside_eager import assert_same, beside_eager
from tests.core.counting import Counting

pytestmark = pytest.mark.usefixtures("marked_steps")


def leaf(device: torch.device, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    values = torch.linspace(-1, 1, count).view(shape) if count > 1 else torch.full(shape, 0.5)
    return values.to(device).requires_grad_()


class TestHooks:
    def test_on_tensors(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 4)
            seen: list[Tensor] = []
            y = x * 2
            y.register_hook(lambda g: g * 10)
            y.register_hook(seen.append)
            y.retain_grad()
            x.register_hook(lambda g: g.clamp(max=30))
            removed = x.register_hook(lambda g: g * 0)
            removed.remove()
            (y * y).sum().backward()
            return x.grad, y.grad, seen

        beside_eager(program)

    def test_after_accumulation(self) -> None:
        """The way to an optimizer that steps inside backward: no gradient outlives its use."""

        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
            for p in model.parameters():
                optimizer = torch.optim.SGD([p], lr=0.1)

                def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(step)
            for _ in range(3):
                model(torch.ones(5, 3, device=device)).square().sum().backward()
            return model.state_dict(), [p.grad for p in model.parameters()]

        beside_eager(program, rtol=1e-6, atol=1e-7)

    def test_on_modules(self) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).to(device)
            seen: list[Any] = []
            model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
            model[1].register_forward_hook(lambda m, args, out: seen.append(out) or out * 2)
            model[2].register_full_backward_hook(lambda m, gin, gout: (gin[0] * 3,))
            model[2].register_full_backward_pre_hook(lambda m, gout: (gout[0] + 1,))
            model(torch.ones(2, 3, device=device)).sum().backward()
            return seen, [p.grad for p in model.parameters()]

        beside_eager(program, rtol=1e-6)

    def test_on_nodes_and_saved_tensors(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 3)
            packed: list[Tensor] = []

            def pack(t: Tensor) -> Tensor:
                packed.append(t.detach().clone())
                return t * 2

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / 2):
                y = x.exp() * x
            y.grad_fn.register_hook(lambda gin, gout: tuple(g * 5 for g in gin))
            y.sum().backward()
            return x.grad, packed

        beside_eager(program, rtol=1e-6)

    def test_saved_tensors_on_the_cpu(self) -> None:
        """Offloading activations: they leave the device and come back."""

        def program(device: torch.device) -> Any:
            x = leaf(device, 3)
            with torch.autograd.graph.save_on_cpu():
                y = (x.sin() * x.cos()).sum()
            y.backward()
            return x.grad

        beside_eager(program, rtol=1e-6)


class Cube(torch.autograd.Function):
    """With a gradient that is wrong on purpose, so that it is seen to be used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x * 100 * ctx.factor, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.mark_dirty(x)
        counts = (y > 0).sum()
        ctx.mark_non_differentiable(counts)
        ctx.set_materialize_grads(False)
        return x.mul_(2), counts, y + 1

    @staticmethod
    def backward(ctx: Any, gx: Any, gcounts: Any, gy: Any) -> Any:
        assert gcounts is None and gy is None  # not materialized
        return gx * 2, None


class TestCustomFunctions:
    def test_forward_and_backward(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 4)
            y = Cube.apply(x * 1, 2.0)
            y.sum().backward(retain_graph=True)
            (second,) = torch.autograd.grad(Cube.apply(x, 1.0).sum(), x, create_graph=True)
            return x.grad, y, second

        beside_eager(program, rtol=1e-6)

    def test_writing_an_argument(self) -> None:
        def program(device: torch.device) -> Any:
            x, y = leaf(device, 4), leaf(device, 4)
            z = x * 3
            out, counts, _ = InPlace.apply(z, y)
            assert out is z and not counts.requires_grad
            (out * out).sum().backward()
            return x.grad, y.grad, counts, z

        beside_eager(program, rtol=1e-6)

    def test_straight_through(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 5)
            y = x + (x.round() - x).detach()
            (y * torch.arange(5.0, device=device)).sum().backward()
            return x.grad, y

        beside_eager(program)

    def test_an_error_in_backward_comes_out_as_itself(self) -> None:
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                raise KeyError("mine")

        x = leaf(ltc.lazy_device(), 2)
        with pytest.raises(KeyError, match="mine"):
            Broken.apply(x).sum().backward()
        x.square().sum().backward()
        assert_same(x.grad, torch.tensor([-2.0, 2.0]))


class TestGraphs:
    def test_double_backward(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 5)
            (first,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            (third,) = torch.autograd.grad(second.pow(2).sum(), x)
            return first, second, third

        beside_eager(program, rtol=1e-6)

    def test_gradient_penalty_trains(self) -> None:
        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            critic = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1)).to(device)
            optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
            losses = []
            for step in range(4):
                x = torch.full((6, 3), float(step), device=device, requires_grad=True)
                (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
                loss = (grad.norm(dim=1) - 1).square().mean() - critic(x).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss)
                if device.type != "cpu":
                    ltc.mark_step()
            return [loss.detach() for loss in losses]

        beside_eager(program, rtol=1e-5, atol=1e-6)

    def test_retain_graph(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 3)
            y = (x * x).sum()
            y.backward(retain_graph=True)
            if device.type != "cpu":
                ltc.mark_step()
            y.backward()
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()
            return x.grad

        beside_eager(program)

    def test_a_backward_that_begins_after_the_cut(self) -> None:
        """What forward saved are values of an earlier step by then."""

        def program(device: torch.device) -> Any:
            x, w = leaf(device, 4, 3), leaf(device, 3, 3)
            y = (x @ w).relu().softmax(1)
            if device.type != "cpu":
                ltc.mark_step()
            (y * y).sum().backward()
            return x.grad, w.grad

        beside_eager(program, rtol=1e-6, atol=1e-7)

    def test_accumulation(self) -> None:
        """Several backwards, with and without a cut between them, then one step."""

        def program(device: torch.device) -> Any:
            torch.manual_seed(0)
            model = nn.Linear(4, 2).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                for part in range(3):
                    x = torch.full((2, 4), float(step + part), device=device)
                    (model(x).square().mean() / 3).backward()
                    if device.type != "cpu" and step:
                        ltc.mark_step()
                grads = [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad(set_to_none=bool(step))
            return grads, model.state_dict(), [p.grad for p in model.parameters()]

        beside_eager(program, rtol=1e-5, atol=1e-7)

    def test_grad_arguments(self) -> None:
        def program(device: torch.device) -> Any:
            x, y, z = (leaf(device, 3) for _ in range(3))
            out = x * y
            weights = torch.arange(3.0, device=device)
            grads = torch.autograd.grad(out, (x, z), weights, allow_unused=True, retain_graph=True)
            out.backward(weights, inputs=[y])
            with pytest.raises(RuntimeError, match="scalar outputs"):
                (x * 2).backward()
            batched = torch.autograd.grad(
                (x * x, y.sum()), (x, y), (torch.ones(3, device=device), None)
            )
            return grads[0], grads[1], x.grad, y.grad, batched

        beside_eager(program)

    def test_jacobian_and_hessian(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 3).detach()
            f = torch.autograd.functional
            return (
                f.jacobian(lambda t: t.exp() * t.sum(), x),
                f.hessian(lambda t: t.pow(3).sum(), x),
                f.vjp(lambda t: t * t, x, torch.ones(3, device=device))[1],
                f.hvp(lambda t: t.pow(3).sum(), x, torch.ones(3, device=device))[1],
            )

        beside_eager(program, rtol=1e-6)

    def test_gradcheck(self) -> None:
        x = leaf(torch.device("cpu"), 2, 3).detach().double().to(ltc.lazy_device())
        assert torch.autograd.gradcheck(
            lambda t: F.layer_norm(t.tanh(), (3,)).cumsum(1), x.requires_grad_()
        )

    @pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own rules use it
    def test_forward_mode(self) -> None:
        def program(device: torch.device) -> Any:
            import torch.autograd.forward_ad as fwAD

            x = leaf(device, 3).detach()
            with fwAD.dual_level():
                dual = fwAD.make_dual(x, torch.ones(3, device=device))
                return fwAD.unpack_dual((dual.sin() * dual).exp()).tangent.clone()

        beside_eager(program, rtol=1e-6)

    def test_a_graph_that_is_dropped_frees_its_values(self) -> None:
        device = ltc.lazy_device()
        x = leaf(device, 256, 256)
        ltc.mark_step(wait=True)
        gc.collect()
        before = ltc.get_memory_info()["bytes_used"]
        y = x
        for _ in range(10):
            y = y.sin()
        held = weakref.ref(y)
        ltc.mark_step(wait=True)
        assert ltc.get_memory_info()["bytes_used"] - before == 10 * 256 * 256 * 4
        del y
        assert held() is None
        assert ltc.get_memory_info()["bytes_used"] == before


class TestThreads:
    def test_backward_in_another_thread(self) -> None:
        def program(device: torch.device) -> Any:
            x = leaf(device, 4)
            y = (x.exp() * x).sum()
            thread = threading.Thread(target=y.backward)
            thread.start()
            thread.join()
            return x.grad, y

        beside_eager(program, rtol=1e-6)

    def test_backwards_at_the_same_time_accumulate(self) -> None:
        device = ltc.lazy_device()
        weight = torch.ones(8, device=device, requires_grad=True)
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for _ in range(20):
                    (weight * number).sum().backward()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert_same(weight.grad, torch.full((8,), 120.0))

    def test_the_line_of_an_error_in_backward_is_the_users(self) -> None:
        x = torch.ones(3, device=ltc.lazy_device(), requires_grad=True)
        y = x * 2
        y.register_hook(lambda g: g.mm(g))
        with pytest.raises(RuntimeError) as raised:
            y.sum().backward()
        assert "test_autograd.py" in str(raised.value)
        x.sum().backward()
        assert_same(x.grad, torch.ones(3))


def test_a_step_with_hooks_and_custom_functions_is_one_graph() -> None:
    device = ltc.lazy_device()
    x = leaf(device, 4)
    optimizer = torch.optim.SGD([x], lr=0.1)
    x.register_hook(lambda g: g.clamp(-1, 1))

    def step() -> None:
        optimizer.zero_grad()
        Cube.apply(x, 2.0).sum().backward()
        optimizer.step()
        ltc.mark_step()

    step()
    step()
    with Counting() as counted:
        step()
    assert counted.syncs == {"MarkStep": 1} and not counted.fallbacks and not counted.compiles


class TestWritesToLists:
    """`torch._foreach_add_` and its kin count as writes into each tensor, as eager PyTorch's do."""

    def test_versions(self) -> None:
        for _ in range(4):  # recorded first, then followed
            versions = []
            for device in (torch.device("cpu"), ltc.lazy_device()):
                a, b = torch.ones(3).to(device), torch.ones(2).to(device)
                start = a._version, b._version
                torch._foreach_add_([a, b], 1)
                torch._foreach_mul_([a], [a])
                torch._foreach_zero_([b])
                versions.append((a._version - start[0], b._version - start[1]))
            assert versions == [(2, 2)] * 2
            ltc.mark_step()
        with torch.inference_mode():
            c = torch.ones(2, device=ltc.lazy_device())
            torch._foreach_add_([c], 1)
            assert c.tolist() == [2, 2]

    @pytest.mark.parametrize("foreach", [False, True])
    def test_backward_after_a_step_is_refused(self, foreach: bool) -> None:
        device = ltc.lazy_device()
        for _ in range(3):
            model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=foreach)
            x = torch.ones(4, 2, device=device)
            first, second = model(x).sum(), model(x).square().sum()
            first.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                second.backward()
            ltc.mark_step()
