"""A training process with worker processes, to which SIGTERM is sent with its whole group. Run by `test_workers`.

Arguments: the directory of checkpoints, the start method, "ours" or "plain", "persistent" or "once", and when the
signal is sent: "begun" as soon as the workers are started, "read" when the first batch has come.
"""

import os
import signal
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import ltc_dist as ltd


def main(directory: str, method: str, kind: str, lifetime: str, moment: str) -> None:
    model = torch.nn.Linear(1, 1)
    loader: Any = DataLoader(
        TensorDataset(torch.arange(16.0)),
        2,
        num_workers=1,
        multiprocessing_context=method,
        persistent_workers=lifetime == "persistent",
    )
    plain = loader
    if kind == "ours":
        loader = ltd.MpDeviceLoader(loader, ltd.lazy_device())
    checkpointer = ltd.Checkpointer(directory, model=model)
    batches = iter(loader)
    if moment == "read":
        next(batches)
    os.killpg(0, signal.SIGTERM)
    print("after", len(list(batches)), flush=True)
    if lifetime == "persistent":
        print("again", len(list(loader)), flush=True)
        print("alive", plain._iterator._workers[0].is_alive(), flush=True)
    checkpointer.step(1)  # raises Stopped


if __name__ == "__main__":
    os.setpgid(0, 0)
    main(*sys.argv[1:])
