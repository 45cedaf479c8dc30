"""PyTorch's own database of modules on the device beside eager: outputs, gradients, state, errors; each run four times.

The fourth time, what was recorded is followed without Python.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves

import ltc_core as ltc
from tests.core.beside_eager import attempt, difference, on_cpu
from tests.public.sampling import SEED, chosen, moved_to

INPUTS, TIMES = 2, 4
INFOS = {info.name: info for info in module_db}


def run(info: ModuleInfo, given: ModuleInput, device: Any, is_training: bool) -> Any:
    """All that a module gives: outputs and gradients of each call, and its state at the end."""
    torch.manual_seed(0)
    args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
    module = info.module_cls(*args, **kwargs).to(torch.float32).to(device).train(is_training)
    args, kwargs = moved_to(device)((given.forward_input.args, given.forward_input.kwargs))
    found = []
    for number in range(TIMES):
        torch.manual_seed(number)
        result = module(*args, **kwargs)
        outs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        ins = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        ins = [t for t in [*ins, *module.parameters()] if t.requires_grad]
        gradients = None
        if outs and ins:
            total = sum((t.double() + t.double().square()).sum() for t in outs)
            gradients = torch.autograd.grad(total, ins, allow_unused=True)
        if device != "cpu":
            ltc.mark_step()
        found.append(on_cpu((result, gradients)))
    return found, on_cpu(dict(module.state_dict()))


def differences(name: str) -> Iterator[str]:
    info = INFOS[name]
    for is_training in (True, False):
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=is_training
        )
        inputs = [given for given in inputs if given.forward_input is not None]
        for given in chosen(inputs, INPUTS):
            which = f"{name}{given.constructor_input} {given.desc} training={is_training}"
            expected = attempt(run, info, given, "cpu", is_training)
            got = attempt(run, info, given, ltc.lazy_device(), is_training)
            what = difference(got, expected, rtol=1e-4, atol=2e-5, errors="class")
            if what:
                yield f"{which}: {what}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INFOS, ids=lambda n: f"{n}-{SEED}")
def test_modules_do_what_they_do_in_eager(name: str) -> None:
    assert not list(differences(name))
