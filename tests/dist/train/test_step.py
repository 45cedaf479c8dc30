"""Training in several processes is training in one: losses, parameters, for two optimizers."""

from pathlib import Path

import pytest
import torch

import ltc_core as ltc
import ltc_dist as ltd
from ltc_dist.train.step import _ranges
from tests.compiled_cache import empty_cache
from tests.dist import spawned


@pytest.mark.dist
@pytest.mark.timeout(180)
@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_several_processes_learn_what_one_does(tmp_path: Path, nprocs: int, optimizer: str) -> None:
    many, one = tmp_path / "many", tmp_path / "one"
    many.mkdir()
    one.mkdir()
    ltd.spawn(spawned.learn, (str(many), optimizer), nprocs=nprocs, start_method="forkserver")
    spawned.learn(0, str(one), optimizer)
    expected = torch.load(one / "0.pt")
    found = [torch.load(many / f"{k}.pt") for k in range(nprocs)]
    for got in found:
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=2e-4, atol=1e-5)
        for name, value in got["state"].items():
            assert torch.equal(value, found[0]["state"][name])
            torch.testing.assert_close(value, expected["state"][name], rtol=1e-3, atol=2e-4)
    assert expected["losses"][-1] < 0.8 * expected["losses"][0]


@pytest.mark.dist
@pytest.mark.timeout(300)  # the compiler runs
def test_what_is_sent_does_not_depend_on_how_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process runs op by op, the other compiled code that reduces while it computes; in several vectors."""
    unlike, one = tmp_path / "unlike", tmp_path / "one"
    unlike.mkdir()
    one.mkdir()
    with monkeypatch.context() as environment:
        environment.setenv("LTC_BUCKET_MB", "0.02")
        environment.setenv("LTC_COMPILED_CACHE_DIR", empty_cache(tmp_path / "compiled"))
        ltd.spawn(spawned.learn_unlike, (str(unlike), "adamw"), nprocs=2)
    spawned.learn(0, str(one), "adamw")
    expected = torch.load(one / "0.pt")
    found = [torch.load(unlike / f"{k}.pt") for k in range(2)]
    for got in found:
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=2e-4, atol=1e-5)
        torch.testing.assert_close(got["state"], expected["state"], rtol=1e-3, atol=2e-4)


def test_one_process_just_steps() -> None:
    w = torch.ones(3, device=ltc.lazy_device(), requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)
    w.sum().backward()
    norm = ltd.clip_grad_norm_([w], 1.0)
    args = {"closure": lambda: w.detach().sum()}
    result = ltd.optimizer_step(optimizer, barrier=True, optimizer_args=args)
    assert float(result) == 3 and float(norm) == pytest.approx(3**0.5)
    torch.testing.assert_close(w.detach().cpu(), torch.ones(3) - 0.5 / 3**0.5)


def test_ranges() -> None:
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and _ranges([]) == "(none)"
