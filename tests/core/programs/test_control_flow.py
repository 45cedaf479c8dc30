"""Control flow on values: loops, branches and shapes that depend on what was computed.

Reading a value cuts the step and is counted; tracing goes on.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


class TestControlFlow:
    def test_programs_that_look_at_values(self) -> None:
        def collatz(device: torch.device) -> Any:
            n, steps = torch.tensor(27, device=device), 0
            while n != 1:
                n = n // 2 if n % 2 == 0 else 3 * n + 1
                steps += 1
            return n, steps

        def newton(device: torch.device) -> Any:
            x = torch.tensor(1.0, device=device)
            for _ in range(50):
                new = x - (x * x - 2) / (2 * x)
                if (new - x).abs().item() < 1e-6:
                    break
                x = new
            return x

        def filtering(device: torch.device) -> Any:
            x = torch.arange(20.0, device=device)
            while len(x) > 3:
                x = x[x > x.mean()]
            rows = [torch.arange(i, device=device).sum() for i in x.long()]
            return x, rows, x.nonzero(), torch.where(x > 18)

        for program in (collatz, newton, filtering):
            beside_eager(program)

    def test_results_whose_shape_depends_on_values(self) -> None:
        def program(device: torch.device) -> Any:
            x = torch.tensor([3, 1, 0, 3, 0], device=device)
            return (
                x.nonzero(),
                x.nonzero(as_tuple=True),
                x.unique(),
                x.unique(return_inverse=True, return_counts=True),
                torch.unique_consecutive(x.sort().values),
                x.masked_select(x > 0),
                x[x > 0] * 2,
                x.bincount(),
                torch.argwhere(x),
                x.repeat_interleave(x),
                torch.combinations(x[:3]),
                torch.isin(x, x[:1]),
                F.one_hot(x),
            )

        beside_eager(program)

    def test_reads_are_counted_and_tracing_goes_on(self, device: torch.device) -> None:
        x = torch.arange(4.0, device=device)
        ltc.mark_step(wait=True)
        with Counting() as counted:
            y = x * 2
            assert y.sum().item() == 12  # cuts
            assert bool((y > 1).any())  # cuts
            assert len(y.nonzero()) == 3  # y has run by now: no cut
            z = y + 1
            assert y.max().item() == 6  # cuts; z is recorded before it
            assert z.tolist() == [1.0, 3.0, 5.0, 7.0]  # no cut
        assert sum(counted.syncs.values()) == 3
        assert counted.fallbacks == {"_local_scalar_dense": 3, "nonzero": 1}
        assert counted.ops["mul"] == 1 and counted.ops["add"] == 1

    def test_a_value_that_is_there_is_read_without_a_cut(self, device: torch.device) -> None:
        x = torch.arange(4.0, device=device)
        total = x.sum()
        ltc.mark_step()
        with Counting() as counted:
            y = x + 1
            assert [total.item() for _ in range(3)] == [6.0] * 3
            assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not counted.syncs
        assert y.sum().item() == 10

    def test_a_loop_that_reads_its_loss_compiles_nothing_new(self, device: torch.device) -> None:
        model = nn.Linear(3, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(6):
            with Counting() as counted:
                loss = model(torch.ones(4, 3, device=device)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if losses[-1] < 1e-9:
                    break
                ltc.mark_step()
            assert sum(counted.syncs.values()) == 1
            assert step < 3 or not counted.compiles
        assert losses == sorted(losses, reverse=True)

    def test_branches_reuse_their_programs(self, device: torch.device) -> None:
        """Each way through the loop is compiled once, in whatever order they are taken."""

        def step(x: Tensor, double: bool) -> Tensor:
            x = x * 2 if double else x + 1
            ltc.mark_step()
            return x

        x = torch.zeros(2, device=device)
        ltc.mark_step()
        for double in (True, False):
            x = step(x, double)
        with Counting() as counted:
            for double in (False, True, True, False, True):
                x = step(x, double)
        assert counted.compiles == 0
        assert x.tolist() == [18.0, 18.0]
