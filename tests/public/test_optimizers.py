"""PyTorch's own database of optimizers on the device beside eager: every configuration, one by one, foreach and fused.

Parameters and the optimizer's state are compared after several steps, a state that goes through `state_dict` between
them; the last steps are followed without Python.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db

import ltc_core as ltc
from tests.core.beside_eager import attempt, difference, on_cpu
from tests.public.sampling import SEED, chosen

CONFIGS, STEPS = 3, 6
INFOS = {info.optim_cls.__name__: info for info in optim_db}


def parameters(device: Any) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((3, 4), (5, 2), (2, 3))
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]


def run(info: OptimizerInfo, given: OptimizerInput, kwargs: dict[str, Any], device: Any) -> Any:
    params = parameters(device)
    # A tensor among the arguments, such as a learning rate, is on the CPU: PyTorch wants it so.
    kwargs = {name: copy.deepcopy(value) for name, value in kwargs.items()}
    optimizer = info.optim_cls(params, **kwargs)
    generator = torch.Generator().manual_seed(4)
    losses = []
    for number in range(STEPS):
        targets = [torch.randn(p.shape, generator=generator).to(device) for p in params]

        def closure(optimizer: Any = optimizer, targets: Any = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((p - t).square().sum() for p, t in zip(params, targets, strict=True))
            loss.backward()
            return loss

        if info.step_requires_closure:
            losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            if number == 2:  # a parameter without a gradient
                params[1].grad = None
            optimizer.step()
        if device != "cpu":
            ltc.mark_step()
        if number == 3:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = info.optim_cls(params, **kwargs)
            optimizer.load_state_dict(state)
    return on_cpu((losses, params, optimizer.state_dict()["state"]))


def configurations(info: OptimizerInfo) -> list[tuple[OptimizerInput, dict[str, Any]]]:
    found = []
    for given in info.optim_inputs_func(device="cpu"):
        for kind in ("", *info.supported_impls):
            found.append(
                (given, {**given.kwargs, **({kind: True} if kind in ("foreach", "fused") else {})})
            )
            if kind == "forloop":
                found[-1][1]["foreach"] = False
    return found


def differences(name: str) -> Iterator[str]:
    info = INFOS[name]
    for given, kwargs in chosen(configurations(info), CONFIGS):
        which = f"{name} {kwargs} {given.desc}"
        expected = attempt(run, info, given, kwargs, "cpu")
        got = attempt(run, info, given, kwargs, ltc.lazy_device())
        what = difference(got, expected, rtol=1e-5, atol=1e-6, errors="class")
        if what:
            yield f"{which}: {what}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INFOS, ids=lambda n: f"{n}-{SEED}")
def test_optimizers_do_what_they_do_in_eager(name: str) -> None:
    assert not list(differences(name))
