"""A training run whose step is compiled by the real compiler, in processes of its own.

The first process compiles (about twenty seconds of both cores); the second finds what the first one left.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import prepared
from tests.compiled_cache import empty_cache, put_extensions
from tests.core import child

ROOT = Path(__file__).parents[4]

SCRIPT = """
import json, sys, warnings
import torch
import torch.nn.functional as F
from torch import nn
import ltc_core as ltc
from ltc_core import metrics
from ltc_core.executors.inductor.compiler.service import service


def data(step, size=8):
    g = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (size, 5), generator=g), torch.randint(0, 10, (size,), generator=g)


def train(device, steps, wait_at=None, bad_at=None):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(20, 16), nn.Flatten(), nn.Linear(80, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1),
        nn.Linear(32, 10),
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    torch.manual_seed(1)
    losses, errors, compiled_at = [], [], None
    for step in range(steps):
        torch.set_num_threads({10: 3, 12: 1}.get(step, 2))  # compiled for 2
        x, y = data(step)
        if step == bad_at:
            x[0, 0] = 20
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        try:  # a failure is raised where it is known first: by mark_step, or where the loss is looked at
            if device != "cpu":
                ltc.mark_step()
                if step == wait_at:
                    service().wait_idle(200)
                if compiled_at is None and step != bad_at:
                    ltc.wait_device_ops()
                    compiled_at = step if metrics.counter_value("CompiledProgram") else None
            losses.append(loss.item())
        except IndexError as error:
            errors.append(str(error).splitlines()[0])
    return losses, errors, compiled_at


losses, errors, compiled_at = train(ltc.lazy_device(), 14, wait_at=5)
_, errors, _ = train(ltc.lazy_device(), 8, wait_at=5, bad_at=7)
print(json.dumps({
    "losses": losses, "eager": train("cpu", 14)[0], "errors": errors, "compiled_at": compiled_at,
    "counters": {name: metrics.counter_value(name) for name in metrics.counter_names()},
}))
"""


def run_script(cache: Path) -> dict[str, Any]:
    environ = {
        **os.environ,
        "LTC_COMPILE": "async",
        "LTC_COMPILE_AFTER": "2",
        "LTC_COMPILE_PRIORITY": "normal",
        "LTC_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    done = prepared.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    result["stderr"] = done.stderr
    return result  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache: Path = tmp_path_factory.mktemp("cache")
    empty_cache(cache / "compiled")
    put_extensions(cache)
    return cache


@pytest.fixture(scope="module")
def cold(cache: Path) -> dict[str, Any]:
    return run_script(cache)


@pytest.fixture(scope="module")
def warm(cold: dict[str, Any], cache: Path) -> dict[str, Any]:
    return run_script(cache)


pytestmark = pytest.mark.timeout(300)


def test_the_step_is_compiled_and_the_losses_are_eagers(cold: dict[str, Any]) -> None:
    assert cold["stderr"] == ""
    assert cold["compiled_at"] is not None
    assert cold["losses"] == pytest.approx(cold["eager"], rel=2e-5)


def test_no_learning_rate_compiled_anything_anew(cold: dict[str, Any]) -> None:
    # The steps of both runs are two graphs: the first step of a run makes the optimizer's state.
    assert cold["counters"]["UncachedCompile"] == 2
    assert cold["counters"]["PersistentCacheMiss"] == cold["counters"]["CompiledProgram"] == 2
    assert cold["counters"].get("CompileRefused") is None


def test_an_index_out_of_range_is_an_index_error(cold: dict[str, Any]) -> None:
    (error,) = cold["errors"]
    assert "aten.embedding.default failed while its graph ran" in error
    assert "index out of range" in error


def test_the_next_process_finds_the_compiled_programs(warm: dict[str, Any]) -> None:
    assert warm["stderr"] == ""
    assert warm["counters"].get("PersistentCacheMiss") is None
    assert warm["compiled_at"] <= 10  # it is looked for at the second run of a graph
    assert warm["losses"] == pytest.approx(warm["eager"], rel=2e-5)


def test_ops_that_compiled_code_only_calls(tmp_path: Path) -> None:
    """A scaler's check and a Cholesky factor have no C++ of their own: they are called by name."""
    out, err = child.run(
        """
        def step(device):
            x = torch.arange(16.0).reshape(4, 4).to(device) / 16
            grads = [torch.linalg.cholesky_ex(x @ x.T + torch.eye(4).to(device)).L, x + 1]
            found = torch.zeros(1).to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((1,), 0.5).to(device))
            return torch.stack([*grads, found.expand(4, 4)]).cpu()

        torch.testing.assert_close(step(device), step("cpu"))
        assert ltc.metrics.counter_value("CompiledProgram") == 1
        """,
        LTC_COMPILE="sync",
        LTC_COMPILED_CACHE_DIR=empty_cache(tmp_path / "compiled"),
    )
    assert out == err == ""


def test_code_that_was_made_for_one_thread_is_right_with_more(tmp_path: Path) -> None:
    """Each thread of a parallel region would run the loops in it that are not parallel: a mean is divided twice."""
    out, err = child.run(
        """
        torch.manual_seed(0)
        tokens, y = torch.randint(0, 20, (8, 5)), torch.randint(0, 10, (8,))
        table, weight = torch.randn(20, 16), torch.randn(80, 10)

        def losses(device, *counts):
            found = []
            for count in counts:
                torch.set_num_threads(count)
                t, w = (x.clone().to(device).requires_grad_() for x in (table, weight))
                hidden = torch.nn.functional.layer_norm(t[tokens.to(device)].flatten(1) * 2, (80,))
                loss = torch.nn.functional.cross_entropy(torch.nn.functional.gelu(hidden) @ w, y.to(device))
                loss.backward()
                found += [loss.detach().cpu(), t.grad.cpu(), w.grad.cpu()]
            return found

        torch.testing.assert_close(losses(device, 1, 2, 3, 1), losses("cpu", 1, 2, 3, 1))
        assert ltc.metrics.counter_value("CompiledProgram") == 1
        """,
        LTC_COMPILE="sync",
        LTC_COMPILED_CACHE_DIR=empty_cache(tmp_path / "compiled"),
    )
    assert out == err == ""
