"""The report of a job: its ranks beside each other, who comes last, and what an earlier job has left behind."""

import sys
from pathlib import Path

import pytest

from ltc_core.report.build import data_of, read_ranks
from tests.launching import Job, launcher
from tests.report.browser import Page

pytestmark = pytest.mark.dist

TRAIN = """
import time
import torch
import ltc_dist as ltd

def train(rank):
    device = ltd.lazy_device()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(48, 4))
    for (x,) in ltd.MpDeviceLoader(torch.utils.data.DataLoader(data, 4), device):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if rank == 1:
            time.sleep(0.1)  # the straggler
        ltd.optimizer_step(optimizer)
        ltd.wait_device_ops()  # else rank 1 runs ahead wherever rank 0 stands still, and is never last again

if __name__ == "__main__":
    train(ltd.get_ordinal())
"""


def test_the_straggler_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run = tmp_path / "run"
    job = Job([*launcher("--nprocs", "2"), "train.py"], tmp_path, LTC_REPORT=str(run))
    code, out, err = job.end()
    assert code == 0, out + err
    assert f"ltc: the report of this run is {run}/report.html" in err
    found = data_of(read_ranks(run))
    assert [rank["num_steps"] for rank in found["ranks"]] == [12, 12]
    late = found["lateness"]["ranks"]
    assert late[1]["last"] > 0.7 and late[1]["late_ms"] > 10 > 0 == late[0]["rank"]
    waits = [rank["mean"]["parts"]["waiting for other processes"] for rank in found["ranks"]]
    assert waits[0] > 50 > waits[1]
    texts = [row["text"] for row in found["summary"]]
    assert any(text.startswith("Rank 1 comes last to ") for text in texts)
    assert any(text.startswith("Rank 0 waits most for the others") for text in texts)
    assert found["ranks"][0]["loader"]["batches"] >= 12
    with Page(run / "report.html") as page:
        assert "Collectives of rank 0" in page.text("#job")
        page.ask(
            "((box) => { box.value = '1'; box.dispatchEvent(new Event('change')); })(document.querySelector('#rank'))"
        )
        assert "Collectives of rank 1" in page.text("#job")
        assert page.problems == []
    # A job of one process in the same directory: what the two have left is not its own.
    code, out, err = Job([sys.executable, "train.py"], tmp_path, LTC_REPORT=str(run)).end()
    assert code == 0, out + err
    assert [rank["number"] for rank in data_of(read_ranks(run))["ranks"]] == [0]
