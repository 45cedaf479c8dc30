"""Scripts on XLA through JAX: eager's numbers, one program, and what a user is told.

Random numbers are made on the host here (LTC_RANDOM=host), so that they are eager's.
"""

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltc_core as ltc
from ltc_core.executors import device_program
from ltc_core.executors.jax.cache import ProgramsOnDisk
from ltc_core.executors.jax.lowering import LOWERING
from ltc_core.executors.jax.table import RULES
from ltc_core.program.lowering.functional_nodes import FunctionalNodes
from ltc_core.program.lowering.random_draws import DRAWS
from ltc_core.program.lowering.threefry import next_key
from ltc_core.settings import settings
from tests.core.beside_eager import assert_same
from tests.core.counting import Counting

aten = torch.ops.aten


@pytest.fixture
def device() -> torch.device:
    return ltc.lazy_device()


class Training:
    """A classifier with an optimizer that keeps state, on any device."""

    def __init__(self, device: Any, width: int = 24) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 5)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def step(self, seed: int, labels: Tensor | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 8, generator=generator).to(self.device)
        y = torch.randint(5, (16,), generator=generator) if labels is None else labels
        loss = F.cross_entropy(self.net(x), y.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.device != "cpu":
            ltc.mark_step()
        return loss.detach()


# -- programs ------------------------------------------------------------------------------------


def test_a_schedule_of_the_learning_rate_compiles_nothing(device: torch.device) -> None:
    eager, lazy = Training("cpu"), Training(device)
    for seed in range(3):
        torch.testing.assert_close(lazy.step(seed).cpu(), eager.step(seed))
    with Counting() as counted:
        for seed in range(3, 8):
            for training in (eager, lazy):
                training.optimizer.param_groups[0]["lr"] *= 0.7
            torch.testing.assert_close(lazy.step(seed).cpu(), eager.step(seed))
    assert counted.compiles == 0
    assert counted.fallbacks == {}


def test_parameters_and_optimizer_state_are_updated_in_their_memory(device: torch.device) -> None:
    training = Training(device, width=40)
    for seed in range(3):
        training.step(seed)
    ltc.mark_step(wait=True)
    state = [*training.net.parameters()]
    for of_parameter in training.optimizer.state.values():
        state += [of_parameter["exp_avg"], of_parameter["exp_avg_sq"]]
    wanted = sum(t.numel() * t.element_size() for t in state)
    aliased = [
        launch._program.memory_analysis().alias_size_in_bytes
        for launch in device_program.launches()
    ]
    assert max(aliased) >= wanted
    # What was looked at is released: it does not keep the next step from using its memory.
    before = [p.detach().cpu() for p in training.net.parameters()]
    training.step(3)
    assert all((p.cpu() != b).any() for p, b in zip(training.net.parameters(), before, strict=True))


def test_a_later_process_compiles_nothing(tmp_path: Path) -> None:
    program = """
        import json
        import torch
        import ltc_core as ltc
        from tests.jax.test_jax_executor import Training

        training = Training(ltc.lazy_device(), width=33)
        losses = [training.step(seed).item() for seed in range(4)]
        names = ("PersistentCacheHit", "PersistentCacheMiss")
        print(json.dumps([losses, [ltc.metrics.counter_value(n) or 0 for n in names]]))
    """
    environment = {"LTC_COMPILED_CACHE_DIR": str(tmp_path / "programs")}
    first, found = _run(program, environment)
    assert found == [0, 1]
    again, found = _run(program, environment)
    assert again == first
    assert found == [1, 0]


def _run(program: str, environment: dict[str, str], limit_s: float = 100) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


# -- ops without a rule --------------------------------------------------------------------------


@pytest.fixture
def without_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The products of matrices have no rule. Programs on disk were made with one."""
    rules, nodes = dict(RULES), LOWERING.nodes
    LOWERING.nodes = FunctionalNodes(rules.__contains__)
    for op in (aten.addmm.default, aten.mm.default):
        del RULES[op]
    monkeypatch.setattr(ProgramsOnDisk, "load", lambda *args: None)
    monkeypatch.setattr(ProgramsOnDisk, "store", lambda *args: None)
    yield
    RULES.update(rules)
    LOWERING.nodes = nodes


@pytest.mark.usefixtures("without_rules")
def test_an_op_without_a_rule_runs_on_the_host_and_is_counted(device: torch.device) -> None:
    eager, lazy = Training("cpu", width=17), Training(device, width=17)
    with Counting() as counted:
        for seed in range(4):
            torch.testing.assert_close(lazy.step(seed).cpu(), eager.step(seed))
    assert counted.fallbacks["addmm"] == 8
    assert counted.fallbacks["mm"] == 12


def test_the_summary_says_what_runs_on_the_host_and_how_long_compiling_took() -> None:
    program = """
        import json
        import torch
        import ltc_core as ltc

        x = torch.eye(7, device=ltc.lazy_device()) * 2
        assert torch.linalg.cholesky(x).sum().item() > 0
        print(json.dumps(ltc.metrics.summary()))
    """
    summary = _run(program, {})
    assert "aten.linalg_cholesky_ex.default at <string>:7: no rule for" in summary
    assert "it runs on the host between two programs" in summary
    assert "waiting for the compiler" in summary


def test_what_torch_cannot_trace_runs_on_the_host(device: torch.device) -> None:
    x = torch.randn(6, 6)
    matrix = x @ x.T + 6 * torch.eye(6)
    assert_same(torch.linalg.cholesky(matrix.to(device)), torch.linalg.cholesky(matrix))
    found = torch.linalg.eigvalsh(matrix.to(device)).cpu()
    torch.testing.assert_close(found, torch.linalg.eigvalsh(matrix))


@pytest.mark.parametrize(
    ("layers", "options"), [(1, {}), (2, {"bidirectional": True}), (1, {"bias": False})]
)
def test_recurrent_layers_are_loops_with_eagers_numbers(
    layers: int, options: dict[str, Any], device: torch.device
) -> None:
    found = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        net = nn.LSTM(6, 8, layers, **options).to(where)
        x = torch.randn(5, 3, 6).to(where).requires_grad_()
        with Counting() as counted:
            y, (h, c) = net(x)
            (y.square().sum() + h.sum() + (c * 2).sum()).backward()
            results = [y, h, c, x.grad, *(p.grad for p in net.parameters())]
            found.append([t.detach().cpu() for t in results])
        assert counted.fallbacks == {}
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def _encoders_in_inference(device: Any, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 6, 16, dtype=dtype).to(device)
    padding = (torch.arange(6) >= torch.tensor([[6], [4], [2]])).to(device)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1).to(device)
    found = []
    for activation, norm_first in itertools.product(("relu", "gelu"), (False, True)):
        options = {"activation": activation, "norm_first": norm_first, "batch_first": True}
        layer = nn.TransformerEncoderLayer(16, 4, 24, **options, dtype=dtype).to(device).eval()
        found += [layer(x), layer(x, causal), layer(x, None, padding), layer(x, causal, padding)]
    attention = nn.MultiheadAttention(16, 4, batch_first=True, dtype=dtype).to(device).eval()
    masks = {"attn_mask": causal, "key_padding_mask": padding}
    everything = torch.ones_like(padding)
    for options in (
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        masks,
        {"key_padding_mask": everything},
    ):
        found += [t for t in attention(x, x, x, **options) if t is not None]
    return [*found, *attention(x, x * 2, x - 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_encoders_in_inference_have_no_op_on_the_host(
    dtype: torch.dtype, device: torch.device
) -> None:
    """PyTorch calls kernels of whole layers there."""
    with torch.no_grad(), Counting() as counted:
        found = [t.cpu() for t in _encoders_in_inference(device, dtype)]
        wanted = _encoders_in_inference("cpu", dtype)
    assert counted.fallbacks == {}
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5, equal_nan=True)


# -- indices -------------------------------------------------------------------------------------


def test_a_label_out_of_range_raises_as_in_eager_and_loses_nothing(device: torch.device) -> None:
    eager, lazy = Training("cpu"), Training(device)
    for seed in range(3):
        torch.testing.assert_close(lazy.step(seed).cpu(), eager.step(seed))
    wrong = torch.tensor([0, 1, 2, 3, 4, 5, *[0] * 10])
    with pytest.raises(IndexError) as expected:
        eager.step(3, wrong)
    eager.optimizer.zero_grad()
    with pytest.raises(IndexError, match="Target 5 is out of bounds") as caught:
        lazy.step(3, wrong).item()
    assert str(expected.value) in str(caught.value)
    assert "test_jax_executor.py" in str(caught.value)
    for own, other in zip(lazy.net.parameters(), eager.net.parameters(), strict=True):
        torch.testing.assert_close(own.detach().cpu(), other.detach())


def test_an_index_that_is_computed_out_of_range_raises(device: torch.device) -> None:
    table, index = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 2])
    assert_same(table.to(device)[index.to(device) + 1], table[index + 1])
    with pytest.raises(IndexError):
        _ = table.to(device)[index.to(device) + 2].cpu()


# -- numbers -------------------------------------------------------------------------------------


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_goes_there_and_back(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([[0, 1, 3], [2, 100, 7]]).to(dtype)
    assert_same(x.to(device), x)
    assert_same(x.to(device).t().contiguous(), x.t().contiguous())
    assert_same(torch.stack([x.to(device), x.to(device)]).sum(0), torch.stack([x, x]).sum(0))


def test_64_bits_are_kept_and_the_users_jax_is_as_it_was(device: torch.device) -> None:
    x = torch.tensor([2**40 + 1, -(2**62)])
    assert_same(x.to(device) * 2 + 1, x * 2 + 1)
    assert_same(
        torch.tensor([1.0], dtype=torch.float64).to(device) / 3, torch.tensor([1.0]).double() / 3
    )
    assert not jax.config.jax_enable_x64
    assert jax.numpy.arange(3).dtype == "int32"


def test_nan_is_kept_in_minima_and_maxima(device: torch.device) -> None:
    x = torch.tensor([float("nan"), 0.5, -1.0, float("inf"), -0.0])
    for call in (torch.relu, lambda t: t.clamp(-0.5, 2), torch.amax, lambda t: t.minimum(-t)):
        assert_same(call(x.to(device)), call(x))


def test_the_caller_may_write_what_it_has_uploaded(device: torch.device) -> None:
    x = torch.ones(1000)
    there = x.to(device)
    x.zero_()
    shown = there.cpu()
    there.add_(1)
    ltc.mark_step(wait=True)
    assert_same(shown, torch.ones(1000))
    assert_same(there, torch.full((1000,), 2.0))


def test_equal_values_have_memory_of_their_own(device: torch.device) -> None:
    x = torch.ones(5, device=device) * 2
    ltc.mark_step()
    y, z, w = x.clone(), x.clone(), x + 1
    v, u = w.clone(), w.view(5, 1).clone()
    ltc.mark_step()
    for _ in range(2):  # each step writes in the memory of the one before
        x.add_(1)
        w.mul_(3)
        y.sub_(1)
        ltc.mark_step()
    found = [t.cpu()[0].item() for t in (x, y, z, w, v, u)]
    assert found == [4, 0, 2, 27, 3, 3]


def test_random_numbers_of_the_device_are_those_of_the_rules(device: torch.device) -> None:
    calls = [
        (aten.bernoulli_.float, torch.zeros(50), (0.3,)),
        (aten.uniform_.default, torch.zeros(7, 9), (-1.0, 1.0)),
        (getattr(aten.random_, "from"), torch.zeros(50, dtype=torch.int64), (5, 1000)),
    ]
    with settings.override(random="device"):
        for op, target, args in calls:
            torch.manual_seed(3)
            drawn = op(target.to(device), *args).cpu()
            key, _ = next_key(torch.Generator().manual_seed(3).get_state())
            assert_same(drawn, DRAWS[op](key, target, *args))


def test_what_is_drawn_may_index(device: torch.device) -> None:
    """As actions that a policy samples do: the draw is a part of the program."""
    table = torch.arange(12.0).view(4, 3)
    with settings.override(random="device"):
        x = torch.zeros(4, 3).to(device)
        policy = torch.distributions.Categorical(logits=x)
        actions = policy.sample()
        chosen = table.to(device).gather(1, actions[:, None])
        assert_same(chosen[:, 0].cpu(), table[torch.arange(4), actions.cpu()])
        with pytest.raises(IndexError):
            _ = table.to(device)[torch.randint(4, 9, (3,), device=device)].cpu()


# -- processes and devices -----------------------------------------------------------------------


def test_two_processes_train_as_one_on_the_joined_batch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import sys
            import torch
            import ltc_dist as ltd
            from torch import nn

            def train(rank, path):
                torch.manual_seed(0)
                device = ltd.lazy_device()
                net = nn.Linear(6, 3).to(device)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
                batches = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1))
                size = 8 // ltd.world_size()
                for batch in batches:
                    own = batch[rank * size : (rank + 1) * size].to(device)
                    optimizer.zero_grad()
                    net(own).square().mean().backward()
                    ltd.optimizer_step(optimizer, barrier=True)
                if rank == 0:
                    torch.save({k: v.cpu() for k, v in net.state_dict().items()}, path)

            if __name__ == "__main__":
                ltd.spawn(train, args=(sys.argv[2],), nprocs=int(sys.argv[1]))
        """)
    )
    found = []
    for count in ("1", "2"):
        path = tmp_path / f"{count}.pt"
        done = subprocess.run(
            [sys.executable, "train.py", count, str(path)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(torch.load(path))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def test_a_process_may_have_several_devices() -> None:
    program = """
        import json
        import torch
        import ltc_core as ltc

        devices = ltc.get_lazy_supported_devices()
        here = [torch.full((3,), k + 1.0).to(d) * 2 for k, d in enumerate(devices)]
        ltc.mark_step()
        print(json.dumps([[str(d) for d in devices], [t.tolist() for t in here]]))
    """
    names, values = _run(program, {"LTC_NUM_DEVICES": "3"})
    assert len(names) == 3
    assert values == [[2.0] * 3, [4.0] * 3, [6.0] * 3]


def test_a_dataloaders_workers_are_forked_without_a_warning() -> None:
    program = """
        import json
        import torch
        import ltc_core as ltc
        from torch.utils.data import DataLoader, TensorDataset

        device = ltc.lazy_device()
        data = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2)
        print(json.dumps([(x.to(device) * 2).sum().item() for (x,) in data]))
    """
    assert _run(program, {}) == [12.0, 44.0]


def test_without_jax_one_is_told_what_to_install() -> None:
    program = """
        import importlib.util, json
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "jax" else found(name, *rest)
        import ltc_core as ltc
        try:
            ltc.lazy_device()
            import torch
            torch.ones(2, device=ltc.lazy_device()).cpu()
        except ltc.errors.DeviceError as error:
            print(json.dumps(str(error)))
    """
    assert "pip install '.[jax]'" in _run(program, {})


def test_random_numbers_are_drawn_after_a_draw_that_did_not_fit() -> None:
    code = """
    import torch
    import ltc_core as ltc
    device = ltc.lazy_device()
    torch.rand(2, device=device).tolist()
    rows = torch.rand(2**20, 2**30, device=device)
    large = rows.sum()
    try:
        large.item()
    except RuntimeError as error:
        assert "memory" in str(error), error
    first, second = (torch.rand(2, device=device).tolist() for _ in range(2))
    assert first != second
    torch.manual_seed(1)
    third = torch.rand(2, device=device).tolist()
    torch.manual_seed(1)
    assert torch.rand(2, device=device).tolist() == third
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LTC_EXECUTOR": "jax", "LTC_RANDOM": "device"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
