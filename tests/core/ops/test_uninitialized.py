"""Modules that learn their shapes from the first batch (`nn.LazyLinear`), on the device beside eager."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.child import run

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def net(**options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.LazyLinear(4, **options),
        nn.LazyBatchNorm1d(**options),
        nn.ReLU(),
        nn.LazyLinear(2, **options),
    )


def train(model: nn.Module, device: torch.device) -> Any:
    x = torch.arange(18.0).view(3, 6).to(device) / 18
    torch.manual_seed(0)
    model(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if device.type != "cpu":
            ltc.mark_step()
    return (
        losses,
        dict(model.state_dict()),
        [isinstance(p, nn.Parameter) for p in model.parameters()],
    )


def test_training() -> None:
    """Moved before the first batch, after it, made on the device, moved to and fro, or made within `torch.device`."""

    def program(device: torch.device) -> Any:
        after = net()
        torch.manual_seed(0)
        after(torch.ones(2, 6))
        with device:
            within = net()
        to_and_fro = net().to(device).half().double().cpu().to(device).float()
        made = (net().to(device), after.to(device), net(device=device), to_and_fro, within)
        return [train(model, device) for model in made]

    beside_eager(program, rtol=1e-4, atol=1e-5)


def test_before_the_first_batch() -> None:
    def program(device: torch.device) -> Any:
        model = net().to(device)
        weight, mean = model[0].weight, model[1].running_mean
        found: list[Any] = [repr(model), repr(weight), repr(mean), weight.requires_grad]
        found += [isinstance(weight, kind) for kind in (nn.Parameter, nn.UninitializedParameter)]
        found += [isinstance(mean, nn.UninitializedBuffer), weight.dtype, weight.is_leaf]
        assert weight.device == mean.device == device
        for call in (lambda: weight.shape, lambda: weight + 1):
            with pytest.raises((RuntimeError, ValueError)) as error:
                call()
            found.append((error.type, str(error.value)))
        copied = copy.deepcopy(model[0])
        assert copied.weight.device == device
        pickled = pickle.loads(pickle.dumps(model))
        found += [type(pickled[0].weight), type(pickled[1].running_mean)]
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        found += [{name: repr(value) for name, value in loaded.items() if "num" not in name}]
        model.cpu()
        assert type(model[0].weight) is nn.UninitializedParameter
        return found

    beside_eager(program)


def test_state_of_one_with_shapes_is_loaded_and_that_of_one_without_refused() -> None:
    def program(device: torch.device) -> Any:
        known = nn.Linear(6, 4).to(device)
        model = nn.LazyLinear(4).to(device)
        other = nn.LazyLinear(4).to(device)
        other.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError) as error:
            known.load_state_dict(model.state_dict())
        model.load_state_dict(known.state_dict())
        return str(error.value), model(torch.ones(1, 6, device=device)), model.weight, repr(other)

    beside_eager(program)


def test_a_shape_given_by_hand() -> None:
    def program(device: torch.device) -> Any:
        made = []
        for parameter in (
            nn.UninitializedParameter(False, device, torch.float64),
            nn.UninitializedParameter(),
        ):
            parameter.materialize((2, 3), device=device)
            assert parameter.device == device
            made.append(parameter.fill_(2) if not parameter.requires_grad else parameter.shape)
            made.append(isinstance(parameter, nn.Parameter))
        for buffer in (nn.UninitializedBuffer(device=device), nn.UninitializedBuffer().to(device)):
            buffer.materialize((2,))
            made.append(buffer.fill_(3) + 1)
        with pytest.raises(RuntimeError) as error:
            nn.UninitializedParameter(True, device, torch.int64)
        return made, str(error.value)

    beside_eager(program)


def test_in_inference_mode() -> None:
    def program(device: torch.device) -> Any:
        with torch.inference_mode():
            model = nn.LazyLinear(3, device=device)
            out = model(torch.ones(2, 3, device=device))
        return out.is_inference(), model.weight.is_inference(), out.clone()

    beside_eager(program)


def test_without_a_compiler_they_are_refused(tmp_path: Path) -> None:
    run(
        """
        import warnings
        warnings.simplefilter("ignore")
        import torch
        if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
            raise SystemExit
        import ltc_core as ltc
        device = ltc.lazy_device()
        linear = torch.nn.Linear(2, 2)
        weight = linear.weight
        linear(torch.ones(1, 2)).sum().backward()
        assert linear.to(device).weight is weight and weight.grad.device == device
        assert linear.cpu().weight is weight and weight.grad.device.type == "cpu"
        for call in (lambda: torch.nn.LazyLinear(3).to(device), lambda: torch.nn.LazyLinear(3, device=device)):
            try:
                call()
            except ltc.errors.UnsupportedOpError as error:
                text = str(error)
                assert "a parameter without a shape cannot be on the device" in text, text
                assert "there is no C++ compiler" in text and "Next: run one batch" in text, text
            else:
                raise AssertionError("not refused")
        """,
        prelude="",
        CXX="/nonexistent/g++",
        LTC_CACHE_DIR=str(tmp_path),
        LTC_COMPILE="off",
    )
