"""Optimizers, closures, averaging, schedules, copies of models: what a training script does around its step."""

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from tests.core.beside_eager import attempt

Device = torch.device


def net(device: Device, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 2)
    ).to(device)


def batch(device: Device, k: int = 0) -> torch.Tensor:
    return ((torch.arange(12.0) * (k + 3) % 7).view(3, 4) / 7).to(device)


def steps(device: Device, make: Any, count: int = 3, **kwargs: Any) -> Any:
    model = net(device)
    opt, losses = make(model.parameters(), **kwargs), []
    for k in range(count):
        opt.zero_grad()
        loss = model(batch(device, k)).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses, list(model.parameters()), [dict(s) for s in opt.state.values()]


def sgd_in_all_modes(device: Device) -> Any:
    kinds = [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "dampening": 0.5},
    ]
    return [steps(device, torch.optim.SGD, lr=0.1, **kind) for kind in kinds]


def adam_in_all_modes(device: Device) -> Any:
    kinds = [
        {},
        {"amsgrad": True},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"foreach": False},
        {"foreach": True},
    ]
    return [
        attempt(lambda kind=kind: steps(device, torch.optim.Adam, lr=0.01, **kind))
        for kind in kinds
    ]


def adamw_with_a_tensor_as_learning_rate(device: Device) -> Any:
    return steps(device, torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False), steps(
        device, torch.optim.AdamW, lr=0.01, betas=(0.5, 0.7)
    )


def other_optimizers(device: Device) -> Any:
    kinds = [
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
    ]
    kinds += [torch.optim.Rprop, torch.optim.ASGD]
    return [steps(device, kind, lr=0.01)[:2] for kind in kinds]


def rmsprop_in_all_modes(device: Device) -> Any:
    return [
        steps(device, torch.optim.RMSprop, lr=0.01, **kind)
        for kind in ({"centered": True}, {"momentum": 0.5}, {"foreach": False})
    ]


def lbfgs_with_a_closure(device: Device) -> Any:
    model = net(device)
    opt, losses = (
        torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
        [],
    )

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(batch(device)).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    return opt.step(closure), opt.step(closure), len(losses), list(model.parameters())


def a_closure_of_adam(device: Device) -> Any:
    model = net(device)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(batch(device)).square().mean()
        loss.backward()
        return loss

    return [opt.step(closure) for _ in range(3)], list(model.parameters())


def sharpness_aware_steps(device: Device) -> Any:
    model = net(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(3):
        model(batch(device, k)).square().mean().backward()
        moved = []
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                e = p.grad * (0.05 / norm)
                p.add_(e)
                moved.append(e)
        opt.zero_grad()
        model(batch(device, k)).square().mean().backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        opt.step()
        opt.zero_grad()
    return list(model.parameters())


def parameter_groups_that_change(device: Device) -> Any:
    model = net(device)
    opt = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    for k in range(4):
        if k == 1:
            opt.add_param_group({"params": model[2].parameters(), "lr": 0.1})
        if k == 2:
            model[0].bias.requires_grad_(False)
        opt.param_groups[0]["lr"] = 0.01 / (k + 1)
        opt.zero_grad()
        model(batch(device, k)).square().mean().backward()
        opt.step()
    return list(model.parameters())


def schedules(device: Device) -> Any:
    model, found = net(device), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.5, total_steps=5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    for k in range(4):
        opt.zero_grad()
        loss = model(batch(device, k)).square().mean()
        loss.backward()
        opt.step()
        schedule.step()
        plateau.step(loss)
        found.append(opt.param_groups[0]["lr"])
    return found, list(model.parameters())


def gradients_accumulated(device: Device) -> Any:
    model = net(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(6):
        (model(batch(device, k)).square().mean() / 3).backward()
        if k % 3 == 2:
            opt.step()
            opt.zero_grad(set_to_none=k % 2 == 0)
    return list(model.parameters()), [p.grad for p in model.parameters()]


def ema_by_hand(device: Device) -> Any:
    model = net(device, norm=True)
    shadow = copy.deepcopy(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(3):
        opt.zero_grad()
        model(batch(device, k)).square().mean().backward()
        opt.step()
        with torch.no_grad():
            for s, p in zip(shadow.parameters(), model.parameters(), strict=True):
                s.mul_(0.9).add_(p, alpha=0.1)
            for s, b in zip(shadow.buffers(), model.buffers(), strict=True):
                s.copy_(b)
    return shadow.state_dict(), model.state_dict()


def ema_of_buffers_in_one_graph(device: Device) -> Any:
    model = net(device, norm=True)
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for k in range(4):
        model(batch(device, k))
        average.update_parameters(model)
    return dict(average.state_dict()), dict(model.state_dict())


def stochastic_weight_averaging(device: Device) -> Any:
    model = net(device, norm=True)
    average, opt = swa_utils.AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = swa_utils.SWALR(opt, 0.05, 2)
    for k in range(3):
        opt.zero_grad()
        model(batch(device, k)).square().mean().backward()
        opt.step()
        average.update_parameters(model)
        schedule.step()
    swa_utils.update_bn([batch(device, k) for k in range(3)], average)
    return dict(average.state_dict())


def copies_of_a_tensor_and_its_view(device: Device) -> Any:
    x = torch.arange(4.0).to(device)
    y, v = copy.deepcopy([x, x[1:]])
    y.add_(10)
    a, b = copy.deepcopy((x, x))
    b[0] = -1
    c = copy.deepcopy({"first": x[:2], "second": x[2:], "all": x})
    c["all"].mul_(3)
    return x, y, v, a, b, a is b, c


def copies_of_models(device: Device) -> Any:
    model = net(device, norm=True)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    other = copy.deepcopy(model)
    other[0].weight.data.zero_()
    return (
        dict(model.state_dict()),
        dict(other.state_dict()),
        other[2].weight.grad,
        attempt(lambda: copy.deepcopy(other[0].weight * 1)),
    )


def copies_of_tied_weights_and_optimizers(device: Device) -> Any:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device)
    model[1].weight = model[0].weight
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        model(batch(device)).sum().backward()
        opt.step()
    other, other_opt = copy.deepcopy((model, opt))
    other(batch(device)).sum().backward()
    other_opt.step()
    return other[0].weight is other[1].weight, model[0].weight, other[0].weight


def states_saved_and_loaded(device: Device) -> Any:
    model = net(device, norm=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(batch(device)).sum().backward()
    opt.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, map_location=device)
    other = net(device, norm=True)
    other_opt = torch.optim.SGD(other.parameters(), lr=0.5)
    other.load_state_dict(state["model"])
    other_opt.load_state_dict(state["opt"])
    other(batch(device, 1)).sum().backward()
    other_opt.step()
    return dict(other.state_dict()), attempt(lambda: other.load_state_dict({"x": torch.ones(1)}))


def a_state_that_is_assigned(device: Device) -> Any:
    model, other = net(device), net(device)
    with torch.no_grad():
        other[0].weight.mul_(2)
    model.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad():
        other[0].weight.zero_()
    return model[0].weight


def pickled_tensors(device: Device) -> Any:
    x = torch.arange(4.0).to(device)
    y, v = pickle.loads(pickle.dumps((x, x[1:])))
    y.add_(1)
    p = pickle.loads(pickle.dumps(nn.Parameter(x)))
    return y, v, p, p.requires_grad


def moves_and_conversions_of_models(device: Device) -> Any:
    model = net(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double()
    model(batch(device).double()).sum().backward()
    opt.step()
    model.float().cpu()
    model.to(device)
    out = model(batch(device))
    model.bfloat16()
    return out, list(model.parameters())


def models_moved_after_their_optimizer(device: Device) -> Any:
    model = net(Device("cpu"))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.to(device)
    for _ in range(2):
        opt.zero_grad()
        model(batch(device)).sum().backward()
        opt.step()
    return list(model.parameters())


def meta_models_made_real(device: Device) -> Any:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model = model.to_empty(device=device)
    torch.manual_seed(0)
    model.reset_parameters()
    return list(model.parameters())


def vectors_of_parameters(device: Device) -> Any:
    model = net(device)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return vector, list(model.parameters()), [p.requires_grad for p in model.parameters()]


def pruned_layers(device: Device) -> Any:
    from torch.nn.utils import prune

    layer = nn.Linear(4, 3).to(device)
    prune.l1_unstructured(layer, "weight", 0.5)
    layer(batch(device)).sum().backward()
    prune.remove(layer, "weight")
    return layer.weight, (layer.weight == 0).sum().item()


def two_networks_against_each_other(device: Device) -> Any:
    g, d = net(device), nn.Sequential(nn.Linear(2, 3), nn.LeakyReLU(), nn.Linear(3, 1)).to(device)
    opt_g, opt_d = (
        torch.optim.Adam(g.parameters(), lr=0.01),
        torch.optim.Adam(d.parameters(), lr=0.01),
    )
    for k in range(2):
        fake = g(batch(device, k))
        opt_d.zero_grad()
        (d(fake.detach()).mean() - d(batch(device, k)[:, :2]).mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        (-d(fake).mean()).backward()
        opt_g.step()
    return list(g.parameters()), list(d.parameters())


def metrics_over_an_epoch(device: Device) -> Any:
    right, seen, total = (
        torch.zeros((), dtype=torch.int64, device=device),
        0,
        torch.zeros((), device=device),
    )
    model = net(device)
    for k in range(4):
        x = batch(device, k)[: 3 - k % 2]
        out = model(x)
        right += (out.argmax(1) == 0).sum()
        total += out.detach().sum()
        seen += len(x)
    return right.item() / seen, (total / seen).item()
