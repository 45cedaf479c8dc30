"""The null executor: nothing is computed, all else happens; what it counts is what others count."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from ltc_core.executors import EXECUTORS, Executor
from ltc_core.executors.null import NullExecutor
from ltc_core.graph.ir import Graph, Node, Ref, TensorMeta
from ltc_core.program.program import Program

aten = torch.ops.aten
META = TensorMeta.packed((2, 3), torch.float32)

TRAINING = """
import json
import torch
import ltc_core as ltc
from ltc_core import metrics

torch.manual_seed(0)
device = ltc.lazy_device()
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
optimizer = torch.optim.AdamW(net.parameters())
losses = []
for step in range(5):
    optimizer.zero_grad()
    out = net(torch.randn(6, 4).to(device))
    loss = torch.nn.functional.cross_entropy(out, torch.zeros(6, dtype=torch.int64).to(device))
    loss.backward()
    optimizer.step()
    ltc.mark_step()
    losses.append(loss.detach())
ltc.wait_device_ops()
answer = {
    "losses": [float(v) for v in ltc.to_cpu(losses)],
    "loss_shape": list(losses[0].shape),
    "device_ops": {n: metrics.counter_value(n) for n in metrics.counter_names() if n.startswith("ltc::")},
    "compiles": metrics.counter_value("UncachedCompile"),
    "syncs": metrics.counter_value("Sync.MarkStep"),
    "fallbacks": metrics.executed_fallback_ops(),
    "peak": ltc.get_memory_info()["peak_bytes_used"] > 0,
}
x = torch.ones(3, device=device)
answer["branch"] = bool((x.sum() > 0).item())
answer["where"] = [list(t.shape) for t in torch.where(x > 5)]
total = (x * 2).sum()
ltc.mark_step(wait=True)
answer["scalar"] = total.item()
print(json.dumps(answer))
"""


@functools.cache
def _run_on(executor: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LTC_EXECUTOR": executor}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", TRAINING],
        env=environ, capture_output=True, text=True, timeout=50,
    )  # fmt: skip


def train_on(executor: str) -> dict:
    done = _run_on(executor)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_it_is_in_the_table_and_an_executor() -> None:
    assert type(EXECUTORS["null"](0)) is NullExecutor
    assert isinstance(NullExecutor(), Executor)
    assert NullExecutor.name == "null"


@pytest.mark.parametrize(
    "meta",
    [
        META,
        TensorMeta.packed((), torch.float32),
        TensorMeta.packed((0, 3), torch.int64),
        TensorMeta.of((3, 2), (1, 3), 0, torch.bfloat16),
    ],
    ids=str,
)
def test_outputs_are_zeros_of_the_right_kind(meta: TensorMeta) -> None:
    node = Node(aten.relu.default, (Ref(0),), {}, 1, (meta,), result=0)
    executor = NullExecutor()
    program = executor.compile(Graph((node,), {0: META}, (1,)))
    assert isinstance(program, Program)
    (out,) = program.run([executor.upload(torch.ones(2, 3))], ())
    seen = executor.view(out, meta)
    assert (seen.shape, seen.dtype) == (meta.size, meta.dtype)
    assert not seen.any()


def test_nothing_is_run() -> None:
    def never(*args: object) -> None:
        raise AssertionError("it was run")

    node = Node(never, (Ref(0),), {}, 1, (META,), result=0)
    program = NullExecutor().compile(Graph((node,), {0: META}, (1,)))
    assert len(program.run([torch.ones(2, 3)], ())) == 1
    assert program.reuses == {}


def test_what_was_placed_is_what_is_fetched() -> None:
    executor = NullExecutor()
    data = torch.arange(6.0).view(2, 3)
    assert torch.equal(executor.view(executor.upload(data), META), data)


def test_a_training_loop_runs_without_maths() -> None:
    found = train_on("null")
    assert found["losses"] == [0.0] * 5
    assert found["loss_shape"] == []
    assert found["scalar"] == 0.0
    assert found["branch"] is False
    assert found["where"] == [[0]]


def test_it_counts_what_the_reference_executor_counts() -> None:
    null, reference = train_on("null"), train_on("reference")
    for name in ("device_ops", "compiles", "syncs", "fallbacks"):
        assert null[name] == reference[name]
    assert null["compiles"] == 2
    assert null["syncs"] == 5
    assert null["fallbacks"] == []
    assert min(reference["losses"]) > 0
