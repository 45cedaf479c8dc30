"""Hooks, double backward, torch.func, checkpointing, and the modes of autograd."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.core.beside_eager import attempt

Device = torch.device


def numbers(device: Device, *shape: int) -> torch.Tensor:
    return (torch.arange(float(torch.Size(shape).numel())).view(shape) / 7).to(device)


def net(on: Device) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(on)


def hooks_of_tensors(device: Device) -> Any:
    x, seen = numbers(device, 3).requires_grad_(), []
    y = x * 2
    y.register_hook(lambda g: g * 10)
    y.register_hook(seen.append)
    y.retain_grad()
    handle = x.register_hook(lambda g: g + 1)
    (y * y).sum().backward(retain_graph=True)
    handle.remove()
    (y * y).sum().backward()
    return x.grad, y.grad, seen


def hooks_after_accumulation(device: Device) -> Any:
    model = net(device)
    for p in model.parameters():

        def step(p: torch.Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(numbers(device, 2, 4)).square().sum().backward()
    return list(model.parameters())


def hooks_of_modules(device: Device) -> Any:
    model, seen = net(device), []
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda m, args, out: out + 1)
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append((gi, go)))
    model[1].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    model(numbers(device, 2, 4)).sum().backward()
    return seen, [p.grad for p in model.parameters()]


def saved_tensor_hooks(device: Device) -> Any:
    x, packed = numbers(device, 4).requires_grad_(), []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t.shape)
        return t.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
        y = (x.exp() * x).sum()
    y.backward()
    return x.grad, packed


def save_on_cpu(device: Device) -> Any:
    x = numbers(device, 4).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = x.sin() * x
    y.sum().backward()
    return x.grad


def double_backward(device: Device) -> Any:
    x = numbers(device, 4).requires_grad_()
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad((g * g).sum(), x, create_graph=True)
    h.sum().backward()
    return g, h, x.grad


def gradient_penalty(device: Device) -> Any:
    model, x = net(device), numbers(device, 3, 4).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = ((g.norm(2, dim=1) - 1) ** 2).mean()
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def double_backward_of_networks(device: Device) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 1),
    )
    model, x = model.to(device), numbers(device, 2, 1, 6, 6).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    return g, [p.grad for p in model.parameters() if p.grad is not None]


def autograd_grad_options(device: Device) -> Any:
    x, y = numbers(device, 3).requires_grad_(), numbers(device, 3).requires_grad_()
    z = (x * x).sum()
    return (
        torch.autograd.grad(z, [x, y], allow_unused=True, retain_graph=True),
        torch.autograd.grad(z, [x, y], materialize_grads=True, retain_graph=True),
        attempt(lambda: torch.autograd.grad(z, [y], retain_graph=True)),
        torch.autograd.grad(x * x, x, grad_outputs=torch.ones(3, device=device)),
        attempt(lambda: (x * x).backward()),
        torch.autograd.grad([z, z * 2], x),
        attempt(lambda: z.backward()),
    )


def batched_gradients(device: Device) -> Any:
    x = numbers(device, 3).requires_grad_()
    y = x**2
    return torch.autograd.grad(y, x, torch.eye(3, device=device), is_grads_batched=True)


def jacobian_and_hessian(device: Device) -> Any:
    x = numbers(device, 3)
    return (
        torch.autograd.functional.jacobian(lambda v: v**2, x),
        torch.autograd.functional.hessian(lambda v: (v**3).sum() + v[0] * v[1], x),
        torch.autograd.functional.vhp(lambda v: (v**3).sum(), x, torch.ones_like(x)),
        torch.autograd.functional.jvp(lambda v: v.exp(), x, torch.ones_like(x)),
    )


def func_hessian(device: Device) -> Any:
    x = numbers(device, 3)
    return torch.func.hessian(lambda v: (v**3).sum() + v[0] * v[1])(x)


def func_grads(device: Device) -> Any:
    x = numbers(device, 4)
    f = lambda v: (v.sin() * v).sum()  # noqa: E731
    return (
        torch.func.grad(f)(x), torch.func.grad_and_value(f)(x),
        torch.func.grad(torch.func.grad(lambda v: v**3))(x[1]), torch.func.jacrev(lambda v: v[:2] * v[2])(x),
        torch.func.jacfwd(lambda v: v * v.sum())(x), torch.func.vjp(f, x)[1](torch.ones((), device=device)),
        torch.func.jvp(f, (x,), (x,)),
    )  # fmt: skip


def func_vmap(device: Device) -> Any:
    x, y = numbers(device, 3, 4), numbers(device, 3, 4) + 1
    return (
        torch.func.vmap(torch.dot)(x, y), torch.func.vmap(lambda a: a.sum() * a, in_dims=1, out_dims=1)(x),
        torch.func.vmap(lambda a, b: (a @ b, a > b), in_dims=(0, None))(x, y[0]),
        torch.func.vmap(torch.func.grad(lambda a: (a**2).sum()))(x),
        torch.func.vmap(lambda a: a.cumsum(0), chunk_size=2)(x),
        attempt(lambda: torch.func.vmap(lambda a: a.sum().item())(x)),
    )  # fmt: skip


def per_sample_gradients(device: Device) -> Any:
    model = net(device)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, params, (x[None],))
        return F.cross_entropy(out, y[None])

    x, y = numbers(device, 3, 4), torch.tensor([0, 1, 1], device=device)
    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)


def ensembles(device: Device) -> Any:
    models = [net(device), net(device)]
    params, buffers = torch.func.stack_module_state(models)
    x = numbers(device, 3, 4)
    call = lambda p, b: torch.func.functional_call(models[0], (p, b), (x,))  # noqa: E731
    return torch.func.vmap(call)(params, buffers)


def vmapped_randomness(device: Device) -> Any:
    x = numbers(device, 3, 4)
    return (
        attempt(lambda: torch.func.vmap(lambda a: a + torch.rand_like(a))(x)),
        torch.func.vmap(lambda a: F.dropout(a, 0.5) * 0, randomness="different")(x),
    )


def functionalized(device: Device) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0].add_(1)
        return y * 2

    return torch.func.functionalize(step)(numbers(device, 2, 3))


def a_function_of_ones_own(device: Device) -> Any:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            ctx.save_for_backward(x)
            ctx.mark_non_differentiable(mask := x > 0)
            return x**3, mask

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
            return grad * 3 * ctx.saved_tensors[0] ** 2

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = numbers(device, 4).requires_grad_()
    y, mask = Cube.apply(x)
    z = Doubled.apply(y * 1)
    z.sum().backward()
    return y, mask, z, x.grad


def an_error_in_backward(device: Device) -> Any:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("broken")

    x = numbers(device, 3).requires_grad_()
    raised = attempt(lambda: Broken.apply(x * 1).sum().backward())
    (x * x).sum().backward()
    return raised, x.grad


def checkpoints_of_both_kinds(device: Device) -> Any:
    found = []
    for reentrant in (False, True):
        model, x = net(device), numbers(device, 3, 4).requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
        found += [y, x.grad, [p.grad for p in model.parameters()]]
    return found


def checkpointed_dropout(device: Device) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
    torch.manual_seed(1)
    x = numbers(device, 3, 4).requires_grad_()
    y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    return y, x.grad, [p.grad for p in model.parameters()]


def nested_checkpoints(device: Device) -> Any:
    a, b, x = net(device), nn.Linear(2, 4).to(device), numbers(device, 3, 4).requires_grad_()
    inner = lambda v: b(checkpoint(a, v, use_reentrant=False))  # noqa: E731
    y = checkpoint(inner, x, use_reentrant=False)
    y = checkpoint_sequential(net(device), 2, y, use_reentrant=False)
    y.square().sum().backward()
    return y, x.grad, [p.grad for p in a.parameters()]


def modes_of_autograd(device: Device) -> Any:
    x = numbers(device, 3).requires_grad_()
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
    with torch.inference_mode():
        c = x * 4
        c.add_(1)
    with torch.set_grad_enabled(False):
        d = x[1:]
    e = attempt(lambda: (c * x).sum().backward())
    return a, b, c, d, e, c.is_inference(), attempt(lambda: c.add_(1)), attempt(lambda: x + c)


def inference_mode_draws(device: Device) -> Any:
    with torch.inference_mode():
        a = torch.rand(3, device=device)
    b = torch.rand(3, device=device)
    x = torch.ones(3, device=device, requires_grad=True)
    (F.dropout(x, 0.5) * b).sum().backward()
    return a, b, x.grad


def inference_mode_loads(device: Device) -> Any:
    model, state = net(device), {k: v * 2 for k, v in net(Device("cpu")).state_dict().items()}
    with torch.inference_mode():
        model.load_state_dict(state)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        opt.zero_grad()
        loss = model(numbers(device, 2, 4)).square().sum()
        loss.backward()
        opt.step()
    return loss, list(model.parameters())


def inference_mode_evaluation_between_steps(device: Device) -> Any:
    model, losses = net(device), []
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(4):
        loss = model(numbers(device, 2, 4)).square().sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.inference_mode():
            losses.append(model(numbers(device, 1, 4)).sum().item())
    return losses


def views_in_inference_mode(device: Device) -> Any:
    w = numbers(device, 2, 3).requires_grad_()
    with torch.inference_mode():
        views = [
            w.view_as(w),
            w.movedim(0, -1),
            w.flatten(),
            w.mT,
            w[0],
            w.T,
            w.swapaxes(0, 1),
            w.chunk(2)[0],
        ]
    return [(v, v.requires_grad, v.is_inference(), v.is_leaf) for v in views]


def data_in_inference_mode(device: Device) -> Any:
    t, y = torch.ones(3, device=device), torch.zeros(3, device=device)
    with torch.inference_mode():
        t.data = y
        z = torch.ones(3).to(device)
    t.add_(1)
    return t, y, z, t.is_inference()


def gradients_that_are_none(device: Device) -> Any:
    model = net(device)
    model[2].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(5, 4, device=device)
    model(numbers(device, 2, 4)).sum().backward()
    model.zero_grad(set_to_none=False)
    return [p.grad for p in model.parameters()]


def anomaly_mode(device: Device) -> Any:
    x = torch.zeros(3, device=device, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        return (
            attempt(lambda: (x / x).sum().backward()),
            attempt(lambda: (x * 2).sum().backward()),
            x.grad,
        )


def forward_mode(device: Device) -> Any:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(numbers(device, 3), torch.ones(3, device=device))
        primal, tangent = torch.autograd.forward_ad.unpack_dual(x.exp() * x)
        return primal * 1, tangent * 1


def weights_shared_and_frozen(device: Device) -> Any:
    a, b = nn.Linear(3, 3).to(device), nn.Linear(3, 3).to(device)
    b.weight = a.weight
    out = b(a(numbers(device, 2, 3)))
    out.sum().backward()
    return out, a.weight.grad, a.weight is b.weight


def parametrizations(device: Device) -> Any:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).to(device)
    other = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).to(device)
    ortho = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)).to(device)
    out = (
        layer(numbers(device, 2, 3)).sum()
        + other(numbers(device, 2, 3)).sum()
        + ortho(numbers(device, 2, 3)).sum()
    )
    out.backward()
    return out, [p.grad for p in layer.parameters()], [p.grad for p in other.parameters()]


def old_weight_norm(device: Device) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.utils.weight_norm(nn.Linear(3, 2)).to(device)
    out = layer(numbers(device, 2, 3))
    out.sum().backward()
    return out, [p.grad for p in layer.parameters()]
