"""Faults of data and of collectives: told in the training loop, where they belong, by the process that knows."""

import re
import sys
from pathlib import Path

import pytest

from tests.launching import Job, launcher

pytestmark = pytest.mark.dist
TRAINING = str(Path(__file__).with_name("training.py"))
TWO = launcher("--nprocs", "2")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_row_9_the_dataset_raises(workers: str, tmp_path: Path) -> None:
    command = [*TWO, TRAINING, "--bad", "raise@40", "--num-workers", workers]
    # SIGTERM may end the other process before it fails itself: it removes no temporary directory then.
    code, out, err = Job(command, tmp_path).end(is_killed=workers != "0")
    assert code == 1 and "final" not in out
    assert err.count("LookupError: no such word") <= 2  # as raised there, and as raised here
    assert re.search(r'training.py", line \d+, in __getitem__', err)
    assert re.search(r'training.py", line \d+, in train', err)
    assert err.splitlines()[-1].startswith("ltc-launch: rank 1 (pid ")


def test_row_10_a_process_of_the_dataloader_is_killed(tmp_path: Path) -> None:
    command = [*TWO, TRAINING, "--bad", "kill9@40", "--num-workers", "1"]
    code, _, err = Job(command, tmp_path).end(is_killed=True)
    assert code == 1
    assert re.search(r"DataLoader worker \(pid.* \d+\) is killed by signal: Killed", err)
    assert "rank 1 (pid " in err.splitlines()[-1]


def test_row_11_the_dataset_hangs(tmp_path: Path) -> None:
    limits = {"LTC_DATA_WARNING_S": "1", "LTC_DATA_TIMEOUT_S": "3"}
    command = [*TWO, TRAINING, "--bad", "sleep@40"]
    code, out, err = Job(command, tmp_path, **limits).end()
    assert code == 1
    assert re.search(r"\[1\] \[ltc\] the training loop has waited 1 s for batch \d+", err + out)
    assert re.search(r"LoaderError: the training loop has waited 3 s for batch \d+", err)
    assert "in __getitem__" in err  # where it hangs


@pytest.mark.parametrize("leaves", ["break", "raise LookupError('no such word')"])
def test_row_12_the_loop_is_left(leaves: str, tmp_path: Path) -> None:
    script = f"""
import threading, torch, ltc_dist as ltd
from torch.utils.data import DataLoader, TensorDataset
loader = ltd.MpDeviceLoader(
    DataLoader(TensorDataset(torch.rand(4000, 10)), 4, num_workers=1), ltd.lazy_device()
)
try:
    for k, (x,) in enumerate(loader):
        if k == 3:
            {leaves}
except LookupError:
    pass
del x
loader.close()
names = [t.name for t in threading.enumerate() if t.name.startswith("prefetch")]
print("left", names, ltd.get_memory_info(ltd.lazy_device())["bytes_used"])
"""
    (tmp_path / "train.py").write_text(script)
    code, out, err = Job([sys.executable, str(tmp_path / "train.py")], tmp_path).end()
    assert code == 0 and out == "left [] 0\n", err


def test_row_13_one_process_has_fewer_batches(tmp_path: Path) -> None:
    code, _, err = Job([*TWO, TRAINING, "--fault", "leave@1:9"], tmp_path).end()
    assert code == 1
    assert "rank 1 has ended while rank 0 waits for it" in err
    assert "drop_last=True" in err and err.count("Traceback") == 1


MISMATCH = """
import torch, ltc_dist as ltd
rank = ltd.get_ordinal()
x = torch.ones(4 - 2 * rank, device=ltd.lazy_device())
ltd.{op}
ltd.wait_device_ops()
print("wrong", flush=True)
"""


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("all_reduce('sum', x)", r"float32\[4\](.|\n)*float32\[2\]"),
        ("all_reduce('sum' if rank else 'max', x[:2])", r"all_reduce max(.|\n)*all_reduce sum"),
        ("all_gather(x.int() if rank else x)", r"float32\[4\](.|\n)*int32\[2\]"),
        (
            "collective_broadcast([x, x] if rank else [x])",
            r"float32\[4\](.|\n)*float32\[2\], float32",
        ),
    ],
)
def test_row_14_collectives_do_not_match(op: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISMATCH.format(op=op))
    code, out, err = Job([*TWO, str(tmp_path / "train.py")], tmp_path).end()
    assert code == 1 and "wrong" not in out
    assert re.search(r"rank [01] and rank [01] are at different collectives", err)
    there = re.search(r"got: rank \d: (.|\n)*Next", err)
    assert there and (
        re.search(words, there[0]) or re.search(words, "\n".join(there[0].splitlines()[::-1]))
    )


GRADIENTS = """
import torch, ltc_dist as ltd
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(ltd.lazy_device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
part = model if ltd.get_ordinal() else model[0]
part(torch.ones(1, 2, device=ltd.lazy_device())).sum().backward()
ltd.optimizer_step(optimizer, barrier=True)
ltd.wait_device_ops()
"""


def test_row_14_some_gradients_are_missing_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GRADIENTS)
    code, _, err = Job([*TWO, str(tmp_path / "train.py")], tmp_path).end()
    assert code == 1
    assert (
        "the gradients of parameters 0-1 of 4" in err
        and "the gradients of parameters 0-3 of 4" in err
    )
