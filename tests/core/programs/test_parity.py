"""Training on the device gives what eager PyTorch gives: five models, four optimizers, 20 steps.

Losses and trained parameters are compared, and what it took is pinned: one cut a step, two
programs (the first step makes the optimizer's state), nothing on the CPU, so many ops.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting
from tests.core.models import MLP, MODELS, OPTIMIZERS, Run, batch

NUM_STEPS = 20
PAIRS = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]

# Ops of a step from the second one on, with the torch that constraints.txt names.
FORWARD_AND_BACKWARD = {"cnn": 51, "mlp": 71, "gpt": 211, "lstm": 519, "resnet": 87}
OPTIMIZER = {"sgd": 1, "adam": 5, "adamw": 6, "adadelta": 9}


@functools.cache
def eager(model: str, optimizer: str) -> Run:
    return Run(model, optimizer).train(NUM_STEPS)


class CountedRun(Run):
    """A run on the lazy device: what each step did is in `steps`; all else ends on the CPU."""

    def train(self, num_steps: int) -> "CountedRun":
        self.steps: list[Counting] = []
        self.after_step = self._end_step
        self._begin_step()
        super().train(num_steps)
        self.losses = ltc.to_cpu(self.losses)
        self.net.cpu()
        return self

    def _begin_step(self) -> None:
        self._counting = Counting()
        self._counting.__enter__()

    def _end_step(self) -> None:
        ltc.mark_step()
        self._counting.__exit__(None, None, None)
        self.steps.append(self._counting)
        self._begin_step()


@functools.cache
def lazy(model: str, optimizer: str) -> CountedRun:
    return CountedRun(model, optimizer, ltc.lazy_device()).train(NUM_STEPS)


@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
def test_losses_and_parameters_are_those_of_eager(model: str, optimizer: str) -> None:
    expected, got = eager(model, optimizer), lazy(model, optimizer)
    losses, expected_losses = (torch.stack(run.losses) for run in (got, expected))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    assert losses[-4:].mean() < losses[:4].mean()  # four batches, seen five times: it learns
    state, expected_state = got.net.state_dict(), expected.net.state_dict()
    assert state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
def test_a_step_is_one_cut_of_known_size(model: str, optimizer: str) -> None:
    steps = lazy(model, optimizer).steps
    assert [step.compiles for step in steps] == [1, 1] + [0] * (NUM_STEPS - 2)
    assert [step.syncs for step in steps] == [{"MarkStep": 1}] * NUM_STEPS
    assert [step.fallbacks for step in steps] == [{}] * NUM_STEPS
    sizes = [sum(step.ops.values()) for step in steps]
    assert len(set(sizes[1:])) == 1, sizes
    if torch.__version__.startswith("2.13."):
        assert sizes[1] == FORWARD_AND_BACKWARD[model] + OPTIMIZER[optimizer]


def test_the_gradients_of_one_step_are_those_of_eager() -> None:
    """Parameters that are right at the end could hide a gradient that an optimizer normalises."""
    for model, (make, _) in MODELS.items():
        grads = []
        for device in ("cpu", ltc.lazy_device()):
            torch.manual_seed(0)
            net = make().to(device)
            torch.manual_seed(1)
            x, y = (t.to(device) for t in batch(model, 0))
            torch.nn.functional.nll_loss(net(x).flatten(0, -2), y.flatten()).backward()
            grads.append({name: p.grad.cpu() for name, p in net.named_parameters()})
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6, msg=model)


def test_a_step_that_repeats_holds_no_more_memory() -> None:
    held: list[int] = []

    def end_step() -> None:
        ltc.mark_step(wait=True)
        run.losses.clear()
        held.append(ltc.get_memory_info()["bytes_used"])

    run = Run("cnn", "adam", ltc.lazy_device(), end_step)
    run.train(6)
    assert held[1:] == held[1:2] * 5


def test_two_runs_in_one_process_share_their_programs() -> None:
    lazy("mlp", "sgd")
    with Counting() as counted:
        again = CountedRun("mlp", "sgd", ltc.lazy_device()).train(3)
    assert counted.compiles == 0
    assert torch.stack(again.losses).equal(torch.stack(lazy("mlp", "sgd").losses[:3]))


def test_a_learning_rate_is_no_reason_to_compile() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device=ltc.lazy_device()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    ltc.mark_step()
    with Counting() as counted:
        for step in range(10):
            optimizer.param_groups[0]["lr"] = 1.0 / (step + 1)
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            ltc.mark_step()
    assert counted.compiles == 1
    expected = 1.0 - sum(1.0 / (step + 1) for step in range(10))
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), expected))


@pytest.mark.usefixtures("exact_shapes")
class TestLoopsThatVary:
    """What differs from step to step is compiled once for each way it can be."""

    def counts(self, num_epochs: int, epoch: Callable[[nn.Module, Any], None]) -> list[int]:
        torch.manual_seed(0)
        model = MLP().to(ltc.lazy_device())
        optimizer = torch.optim.Adam(model.parameters())
        found = []
        for _ in range(num_epochs):
            with Counting() as counted:
                epoch(model, optimizer)
            found.append(counted.compiles)
        return found

    @staticmethod
    def step(model: nn.Module, optimizer: Any, batch_size: int = 8) -> torch.Tensor:
        x = torch.ones(batch_size, 32).to(ltc.lazy_device())
        optimizer.zero_grad()
        loss = -model(x).mean()
        loss.backward()
        optimizer.step()
        ltc.mark_step()
        return loss

    def test_a_smaller_last_batch(self) -> None:
        def epoch(model: nn.Module, optimizer: Any) -> None:
            for size in (8, 8, 8, 3):
                self.step(model, optimizer, size)

        assert self.counts(4, epoch)[1:] == [0, 0, 0]

    def test_evaluation_and_checkpoints_between_epochs(self) -> None:
        def epoch(model: nn.Module, optimizer: Any) -> None:
            for _ in range(3):
                self.step(model, optimizer)
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 32).to(ltc.lazy_device())).argmax(1).sum().item()
            model.train()
            ltc.to_cpu((model.state_dict(), optimizer.state_dict()))

        assert self.counts(4, epoch)[2:] == [0, 0]

    def test_logging_every_few_steps(self) -> None:
        def epoch(model: nn.Module, optimizer: Any) -> None:
            total = torch.zeros((), device=ltc.lazy_device())
            for number in range(6):
                total += self.step(model, optimizer).detach()
                if number % 2:
                    total.item()

        assert self.counts(4, epoch)[2:] == [0, 0]

    def test_accumulating_gradients(self) -> None:
        def epoch(model: nn.Module, optimizer: Any) -> None:
            for number in range(8):
                x = torch.ones(8, 32).to(ltc.lazy_device())
                (-model(x).mean() / 4).backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
                ltc.mark_step()

        assert self.counts(4, epoch)[1:] == [0, 0, 0]

    def test_layers_that_are_left_out_at_random(self) -> None:
        """Each combination once: 2 ** 3 of them, whatever the order."""
        choices = random.Random(0)

        def epoch(model: nn.Module, optimizer: Any) -> None:
            for _ in range(40):
                x = torch.ones(8, 32).to(ltc.lazy_device())
                for layer in list(model.children())[:3]:
                    if choices.random() < 0.5:
                        x = layer(x)
                ltc.mark_step()
                x.sum()

        assert sum(self.counts(4, epoch)[2:]) == 0


def test_a_snapshot_of_the_parameters_stays_what_it_was() -> None:
    """`clone` copies nothing until one of the two is written, in this step or a later one."""

    def program(device: torch.device) -> Any:
        torch.manual_seed(0)
        model = MLP().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kept = []
        for step in range(4):
            kept.append([p.detach().clone() for p in model.parameters()])
            x = torch.full((2, 32), float(step)).to(device)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if device.type != "cpu" and step % 2:
                ltc.mark_step()
        return kept, [p.detach() for p in model.parameters()]

    beside_eager(program, rtol=1e-5, atol=1e-6, rounds=1)
