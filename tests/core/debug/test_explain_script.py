"""LTC_EXPLAIN=1 from the user's side: a training script, what it writes to stderr, and its metrics' summary."""

import textwrap
from pathlib import Path

from tests.core import child

TRAIN = """
import torch
import torch.nn.functional as F
from torch import nn

import ltc_core as ltc

device = ltc.lazy_device()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 26 * 26, 10)

    def forward(self, x):
        x = F.relu(self.conv(x))  # first read
        return self.out(x.flatten(1))


net = Net().to(device)
optimizer = torch.optim.Adam(net.parameters())


def step(size):
    images = torch.randn(size, 1, 28, 28).to(device)
    labels = torch.zeros(size, dtype=torch.long).to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()  # state
    ltc.mark_step()  # cut
    return loss


for epoch in range(2):
    for size in (8, 8, 8, 3):
        loss = step(size)
print(loss.item())  # look
print(ltc.metrics.summary())
"""


def run(tmp_path: Path, text: str, **environment: str) -> tuple[str, list[str]]:
    """Run `train.py` where it is, as a user does; give stdout and the lines of stderr."""
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    code = f"import os, runpy\nos.chdir({str(tmp_path)!r})\nrunpy.run_path('train.py')\n"
    out, err = child.run(code, prelude="", LTC_EXECUTOR="reference", **environment)
    return out, err.splitlines()


def line(mark: str, text: str = TRAIN) -> str:
    (number,) = [k for k, row in enumerate(text.splitlines(), 1) if row.endswith(f"  # {mark}")]
    return f"train.py:{number}"


def test_a_training_script(tmp_path: Path) -> None:
    out, err = run(tmp_path, TRAIN, LTC_EXPLAIN="1")
    assert err == [
        f"[ltc] program 1: first graph: nothing was recorded before (MarkStep at {line('cut')} in step)",
        "[ltc] program 2: new optimizer state: 8 values that program 1 made are read from now on (first "
        f"aten::_foreach_lerp_ at {line('state')} in step), as after any first step",
        "[ltc] program 3: shapes of the batch: input 0: float32[8, 1, 28, 28] -> [3, 1, 28, 28], first read "
        f"at {line('first read')} in forward (and 1 more input)",
    ]
    assert (
        "3 new programs in 8 steps, because of: first graph, 1; new optimizer state, 1; shapes of the batch, 1."
        in out.splitlines()
    )


def test_nothing_is_printed_unless_asked(tmp_path: Path) -> None:
    out, err = run(tmp_path, TRAIN)
    assert err == [] and "3 new programs in 8 steps" in out


def test_beside_the_reports(tmp_path: Path) -> None:
    """The cause stands in the report, and before it where LTC_EXPLAIN asks for it."""
    _, err = run(tmp_path, TRAIN, LTC_EXPLAIN="1", LTC_DEBUG="1")
    causes = [row.partition(": ")[2] for row in err if row.startswith("[ltc] program ")]
    told = [
        err[k + 2] for k, row in enumerate(err) if row == "Compilation Analysis: Compilation Cause"
    ]
    assert len(causes) == 3 and told == [f"Compilation Analysis:   {cause}" for cause in causes]


def test_a_loop_that_looks_and_branches(tmp_path: Path) -> None:
    text = """
    import torch
    import ltc_core as ltc

    x = torch.arange(6.0).to(ltc.lazy_device())
    for k in (2, 2, 3):
        best = x.topk(k).values  # topk
        ltc.mark_step()
    for step in range(3):
        y = ((x + 1) * 2).exp().log()
        if step == 1:
            y = y.cos()  # branch
        elif step == 2:
            y = y.sin().tanh()  # other branch
        y[0].item()  # look
        ltc.mark_step()
    """
    _, err = run(tmp_path, text, LTC_EXPLAIN="1")
    assert err[:2] == [
        "[ltc] program 1: first graph: nothing was recorded before (MarkStep at train.py:8)",
        f"[ltc] program 2: argument: aten::topk at {line('topk', text)}: k 2 -> 3",
    ]
    assert err[2].startswith(
        "[ltc] program 3: new code: nothing like its 4 ops was recorded before"
    )
    assert err[3:] == [
        "[ltc] program 4: other ops: 1 op that program 3 had not, first aten::cos at "
        f"{line('branch', text)}",
        f"[ltc] program 5: other ops: aten::sin at {line('other branch', text)} where program 4 had "
        f"aten::cos at {line('branch', text)}",
    ]


def test_eager(tmp_path: Path) -> None:
    text = """
    import torch
    import ltc_core as ltc
    y = (torch.ones(3).to(ltc.lazy_device()) * 2 + 1).cpu()
    """
    _, err = run(tmp_path, text, LTC_EXPLAIN="1", LTC_EAGER="1")
    assert err == [
        f"[ltc] program {k}: eager: LTC_EAGER=1 runs each op by itself, here aten::{op} at train.py:4"
        for k, op in ((1, "mul"), (2, "add"))
    ]


def test_each_device_compares_with_its_own(tmp_path: Path) -> None:
    text = """
    import torch
    import ltc_core as ltc
    for index in (0, 1, 0, 1):
        y = torch.ones(3).to(ltc.lazy_device(index)) * 2
        ltc.mark_step()
    """
    _, err = run(tmp_path, text, LTC_EXPLAIN="1", LTC_NUM_DEVICES="2")
    assert err == [
        f"[ltc] program {k}: first graph: nothing was recorded before (MarkStep at train.py:6)"
        for k in (1, 2)
    ]
