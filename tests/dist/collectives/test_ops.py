"""Collectives: what they give, in two processes and in one, and what is said when they do not fit together."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ltc_core as ltc
import ltc_dist as ltd
from ltc_core.errors import CollectiveError
from ltc_dist.collectives import functions, process_group
from tests.compiled_cache import empty_cache
from tests.dist import spawned

X = torch.arange(6.0).reshape(2, 3)
BOTH = [X, X + 10]


@pytest.mark.dist
@pytest.mark.timeout(180)  # the compiler runs
@pytest.mark.parametrize("compile", ["off", "sync"])
def test_two_processes(tmp_path: Path, compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTC_COMPILE", compile)
    monkeypatch.setenv("LTC_COMPILED_CACHE_DIR", empty_cache(tmp_path / "compiled"))
    ltd.spawn(spawned.collect, (str(tmp_path),), nprocs=2)
    found = [torch.load(tmp_path / f"{k}.pt") for k in range(2)]
    for rank, got in enumerate(found):
        expected: dict[str, Any] = {
            "sum": BOTH[0] + BOTH[1],
            "scaled": (BOTH[0] + BOTH[1]) / 2,
            "max": BOTH[1],
            "or": torch.tensor([3, 7]),
            "listed": [(BOTH[0] + BOTH[1]) / 2, torch.full((2,), 0.5, dtype=torch.float64)],
            "own": BOTH[rank],
            "gathered": torch.cat(BOTH, 1),
            "into": torch.cat(BOTH, 1),
            "number": torch.stack([b.sum() for b in BOTH]),
            "scattered": (BOTH[0] + BOTH[1])[rank : rank + 1],
            "exchanged": torch.cat([b[rank : rank + 1] for b in BOTH], 1),
            "scattered_max": torch.tensor([[6], [21]][rank]),
            "swapped": torch.tensor([2 >> rank, 7]),
            "kept": torch.zeros(3, 2) if rank == 0 else BOTH[1].t(),
            "dealt": BOTH[1].sum(),
            "permuted": BOTH[0] if rank == 1 else torch.zeros(2, 3),
            "broadcast": [BOTH[1], torch.tensor([2, 7])],
            "x": BOTH[rank],
        }
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.dist
@pytest.mark.timeout(180)  # the compiler runs
@pytest.mark.parametrize("compile", ["off", "sync"])
def test_a_mean_of_halves_is_not_infinite(
    tmp_path: Path, compile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DistributedDataParallel, which divides before it adds."""
    monkeypatch.setenv("LTC_COMPILE", compile)
    monkeypatch.setenv("LTC_COMPILED_CACHE_DIR", empty_cache(tmp_path / "compiled"))
    ltd.spawn(spawned.average_halves, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        halves, floats, scattered = torch.load(tmp_path / f"{rank}.pt")
        assert halves.tolist() == [40000.0] * 3 and floats.tolist() == [1.5] * 2
        assert scattered.tolist() == [60000.0] * 2


@pytest.mark.dist
@pytest.mark.timeout(180)
@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "gradients",
            "parameters 0 of 2(?s:.*)parameters 1 of 2|parameters 1 of 2(?s:.*)parameters 0 of 2",
        ),
        ("reductions", "all_reduce max"),
        ("moves", "all_gather along dim 1"),
        ("roots", "broadcast from 1"),
        ("kinds", "all_gather"),
        ("sizes", r"float32\[40\]"),  # gloo would end the process that gets more than it expects
    ],
)
def test_collectives_that_were_known_and_do_not_fit(
    nprocs: int, how: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CollectiveError, match="are at different collectives") as raised:
        ltd.spawn(spawned.differ_once_known, (how,), nprocs=nprocs, start_method="forkserver")
    text = str(raised.value)
    assert re.search(words, text) and text.count("spawned.py:") >= 2  # the lines of both
    assert "went on" not in capfd.readouterr().out


COMBINED = {
    "sum": torch.add, "mul": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "and": torch.bitwise_and, "or": torch.bitwise_or,
}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("nprocs", [2, 3])
def test_each_kind_of_reduction(nprocs: int, tmp_path: Path) -> None:
    """Two processes exchange their vectors, more of them leave it to gloo."""
    ltd.spawn(spawned.reduce_each_kind, (str(tmp_path),), nprocs=nprocs, start_method="forkserver")
    found = [torch.load(tmp_path / f"{k}.pt") for k in range(nprocs)]
    for kind, combine in COMBINED.items():
        for dtype in (*spawned.INTS, *(() if kind in ("and", "or") else spawned.FLOATS)):
            inputs = [spawned.numbers(k, dtype) for k in range(nprocs)]
            for got in found:
                torch.testing.assert_close(
                    got[f"{kind} {dtype}"], functools.reduce(combine, inputs), equal_nan=True
                )


@pytest.mark.dist
@pytest.mark.parametrize("nprocs", [2, 3])
def test_each_dtype(nprocs: int, tmp_path: Path) -> None:
    ltd.spawn(spawned.move_and_add_each_dtype, (str(tmp_path),), nprocs=nprocs)
    for rank in range(nprocs):
        for dtype, got in torch.load(tmp_path / f"{rank}.pt").items():
            numbers = [torch.arange(2 * nprocs).add(10 * k) for k in range(nprocs)]
            inputs = [n.to(dtype).reshape(nprocs, 2) for n in numbers]
            expected = {
                "gathered": torch.cat(inputs, 1),
                "exchanged": torch.cat([x[rank : rank + 1] for x in inputs], 1),
                "permuted": inputs[rank - 1],
                "broadcast": inputs[1],
            }
            if dtype in spawned.ADDED_DTYPES:
                total = torch.stack(inputs).sum(0, dtype=dtype)
                half = (total * 0.5).to(dtype)
                expected |= {"sum": total, "listed": half, "scattered": total[rank : rank + 1]}
            assert got.keys() == expected.keys()
            for name, value in expected.items():
                assert got[name].dtype is dtype
                assert got[name].tolist() == value.tolist(), (dtype, name)


@pytest.mark.dist
def test_processes_tell_each_other_which_replica_they_are(tmp_path: Path) -> None:
    ltd.spawn(spawned.replicate, (str(tmp_path),), nprocs=2, start_method="forkserver")
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == [[[1, 0], [1, 0]], None]


@pytest.mark.dist
def test_gradients_flow_and_many_tensors_go_in_few_vectors(tmp_path: Path) -> None:
    ltd.spawn(spawned.differentiate, (str(tmp_path),), nprocs=2, start_method="forkserver")
    found = [torch.load(tmp_path / f"{k}.pt") for k in range(2)]
    # What the processes do together, as one program that PyTorch differentiates.
    xs = [(torch.arange(8.0).reshape(2, 4) + 10 * k).requires_grad_() for k in range(2)]
    weights = [torch.linspace(1, 2, 16).reshape(4, 4) * (k + 1) for k in range(2)]
    together = {
        "all_reduce": [(xs[0] + xs[1]) * 0.5] * 2,
        "all_gather": [torch.cat(xs)] * 2,
        "all_gather_1": [torch.cat(xs, 1)] * 2,
        "reduce_scatter": list(((xs[0] + xs[1]) * 2.0).chunk(2, 1)),
        "all_to_all": [torch.cat([x.chunk(2, 1)[k] for x in xs]) for k in range(2)],
    }
    for name, ys in together.items():
        used = [w.flatten()[: y.numel()].view(y.shape) for y, w in zip(ys, weights, strict=True)]
        whole = sum((y * w).sum() for y, w in zip(ys, used, strict=True))
        grads = torch.autograd.grad(whole, xs, retain_graph=True)
        for rank in range(2):
            torch.testing.assert_close(found[rank][name], (ys[rank].detach(), grads[rank]))
    for rank, got in enumerate(found):
        expected = {
            "gathered": [
                torch.cat([torch.ones(2, 3), torch.full((2, 3), 2.0)]),
                torch.tensor([0, 1, 2, 3, 1, 2, 3, 4]),
                torch.tensor([5.0, 6.0]),
            ],
            "into": torch.cat([torch.ones(2, 3), torch.full((2, 3), 2.0)], 1),
            "scattered": [torch.full((1, 3), 3.0), torch.tensor([[1, 3], [5, 7]][rank])],
            "reduced": [torch.full((2, 3), 1.5), torch.tensor(5.5)],
        }
        torch.testing.assert_close({name: got[name] for name in expected}, expected)


def test_only_sums_have_gradients() -> None:
    x = torch.ones(2, device=ltc.lazy_device(), requires_grad=True)
    with pytest.raises(CollectiveError, match="all_reduce has no gradient for the reduction 'max'"):
        functions.all_reduce("max", x)
    with pytest.raises(CollectiveError, match="reduce_scatter has no gradient"):
        functions.reduce_scatter("min", x, 1.0, 0, 1)
    (functions.all_gather(x.sum()) * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_is_not_there(dim: int) -> None:
    x = torch.ones(2, 2, device=ltc.lazy_device())
    calls: list[Callable[[], Any]] = [
        lambda: ltd.all_gather(x, dim),
        lambda: ltd.reduce_scatter("sum", x, 1.0, dim, 1),
        lambda: ltd.all_to_all(x, dim, 0, 1),
        lambda: ltd.all_to_all(x, 0, dim, 1),
        lambda: ltd.all_gather_bucketized([x], dim),
        lambda: ltd.reduce_scatter_bucketized("sum", [x], 1.0, dim, 1),
    ]
    told = rf"no dimension {dim}\n  got: a tensor of 2 dimensions: \[2, 2\]\n.* from -2 to 1"
    for call in calls:
        with pytest.raises(CollectiveError, match=told):
            call()
    number = x.sum()
    with pytest.raises(
        CollectiveError, match=r"no dimension 0(?s:.*)0 dimensions: \[\](?s:.*)reshape\(1\)"
    ):
        ltd.reduce_scatter("sum", number, 1.0, 0, 1)


def test_many_tensors_that_cannot_be_dealt_out() -> None:
    with pytest.raises(
        CollectiveError, match=r"cannot be dealt out to the group\n  got: \[3\], 2 parts"
    ):
        ltd.reduce_scatter_bucketized("sum", [torch.ones(3, device=ltc.lazy_device())], 1.0, 0, 2)


def test_one_process() -> None:
    device = ltc.lazy_device()
    x = X.to(device)
    single = ltd.all_reduce("sum", x)
    assert single is not x and torch.equal(single.cpu(), X)
    assert torch.equal(ltd.all_reduce("max", x, 0.5).cpu(), X / 2)
    given = [x.clone()]
    assert ltd.all_reduce("sum", given, 2.0) is given and torch.equal(given[0].cpu(), 2 * X)
    assert torch.equal(ltd.all_gather(x).cpu(), X)
    assert torch.equal(ltd.all_gather(x.sum()).cpu(), X.sum().reshape(1))
    assert torch.equal(ltd.reduce_scatter("sum", x, 1.0, 0, 1).cpu(), X)
    assert torch.equal(ltd.all_to_all(x, 0, 1, 1).cpu(), X)
    assert torch.equal(ltd.collective_permute(x, [[0, 0]]).cpu(), X)
    assert torch.equal(ltd.collective_permute(x, []).cpu(), 0 * X)
    ltd.collective_broadcast([x])
    assert torch.equal(x.cpu(), X)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ltd.all_reduce("mean", x), "no reduction 'mean'(?s:.*)legal are sum, mul"),
        (lambda x: ltd.all_reduce("sum", X), "takes tensors of a lazy device(?s:.*)on cpu"),
        (lambda x: ltd.all_reduce("sum", [1]), "takes tensors of a lazy device(?s:.*)got: 1"),
        (lambda x: ltd.all_reduce("sum", x, groups=[[1]]), "every rank in exactly one group"),
        (lambda x: ltd.reduce_scatter("sum", x, 1.0, 1, 2), "dim 1 of the tensor(?s:.*)2 parts, 1"),
        (lambda x: ltd.collective_permute(x, [[0, 1]]), "pairs must be"),
        (lambda x: ltd.collective_broadcast([x], 1), "there is no process 1 in the group"),
    ],
)
def test_misuse_is_told_at_the_call(call: Any, text: str) -> None:
    with pytest.raises(CollectiveError, match=text):
        call(X.to(ltc.lazy_device()))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shapes", r"are at different collectives(?s:.*)float32\[4\](?s:.*)float32\[2\]"),
        ("kinds", "are at different collectives(?s:.*)all_gather"),
        ("known", "are at different collectives(?s:.*)all_reduce max"),
        ("gradients", r"gradients of parameters 0 of 2(?s:.*)gradients of parameters 1 of 2"),
        ("ended", "rank 1 has ended while rank 0 waits for it(?s:.*)drop_last"),
    ],
)
def test_collectives_that_do_not_fit(how: str, text: str) -> None:
    with pytest.raises(CollectiveError, match=text):
        ltd.spawn(spawned.differ, (how,), nprocs=2, start_method="forkserver")


class TestGpus:
    """What reduces between GPUs. The transport itself is the one that gloo runs under."""

    def test_without_nccl_one_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
        with pytest.raises(
            CollectiveError, match="GPUs reduce through NCCL, which this PyTorch lacks"
        ):
            process_group._nccl()

    def test_nccl_gives_up_when_the_time_is_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Fake:
            class Options:
                _timeout: Any = None

            def __init__(self, *args: Any) -> None:
                self.args = args

        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Fake, raising=False)
        with ltc.settings.override(collective_timeout_s=7.0):
            made = process_group._nccl()("store", 1, 4)
        *where, options = made.args
        assert where == ["store", 1, 4] and options._timeout.total_seconds() == 7

    def test_what_nccl_cannot_reduce_is_refused_when_it_is_recorded(self) -> None:
        with (
            ltc.settings.override(device="cuda"),
            pytest.raises(CollectiveError, match="GPUs have no reduction 'and'"),
        ):
            process_group.reduction("and")


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_learn_what_the_processor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned.learn(0, str(tmp_path), "adamw")
    expected = torch.load(tmp_path / "0.pt")
    monkeypatch.setenv("LTC_DEVICE", "cuda")
    ltd.spawn(spawned.learn, (str(tmp_path), "adamw"), nprocs=2)
    for k in range(2):
        found = torch.load(tmp_path / f"{k}.pt")
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("size", [(2, 3), (4, 3), (5, 2, 3)])
def test_an_output_takes_the_size_of_the_result(size: tuple[int, ...]) -> None:
    given = X.to("ltc")
    calls: list[Any] = [
        lambda output: ltd.all_gather(given, output=output),
        lambda output: ltd.reduce_scatter("sum", given, 1.0, 0, 1, output=output),
        lambda output: ltd.all_gather_bucketized([given], output=[output])[0],
        lambda output: ltd.reduce_scatter_bucketized("sum", [given], 1.0, 0, 1, output=[output])[0],
    ]
    for call in calls:
        output = torch.zeros(size, device="ltc")
        assert call(output) is output and torch.equal(output.cpu(), X)
