"""A script of an ignite user: device, model, optimizer, loader of idist; an evaluator; a checkpoint to resume from."""

import os
import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

IS_CPU = "--cpu" in sys.argv


def adapted(model: nn.Module) -> nn.Module:
    if not IS_CPU:
        return idist.auto_model(model)
    return DistributedDataParallel(model) if idist.get_world_size() > 1 else model


def train(_: int, directory: str) -> None:
    device = torch.device("cpu") if IS_CPU else idist.device()
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = idist.auto_dataloader(
        TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16, shuffle=False
    )
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
    model = adapted(nn.Sequential(*layers))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    criterion = nn.CrossEntropyLoss()
    losses = []

    trainer = create_supervised_trainer(model, optimizer, criterion, device=device)
    metrics = {"accuracy": Accuracy(device=device), "loss": Loss(criterion, device=device)}
    evaluator = create_supervised_evaluator(model, metrics=metrics, device=device)
    saved = {"model": model, "optimizer": optimizer, "trainer": trainer}
    keeper = Checkpoint(saved, DiskSaver(directory, require_empty=False), n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, keeper)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        losses.append(idist.all_reduce(engine.state.output) / idist.get_world_size())

    trainer.run(data, max_epochs=2)
    idist.barrier()
    at = torch.load(keeper.last_checkpoint, map_location="cpu")
    Checkpoint.load_objects(to_load=saved, checkpoint=at)
    trainer.run(data, max_epochs=3)
    evaluator.run(data)

    figures = [f"{value:.4f}" for value in (*losses, *evaluator.state.metrics.values())]
    ranks = idist.all_gather(f"rank {idist.get_rank()}")
    if idist.get_rank() == 0:
        print("result", device.type, idist.get_world_size(), *figures, ranks, flush=True)


def main() -> None:
    backend = "gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    nproc = int(os.environ.get("NPROC", "0")) or None
    with idist.Parallel(backend="gloo" if nproc else backend, nproc_per_node=nproc) as parallel:
        parallel.run(train, sys.argv[1])


if __name__ == "__main__":
    main()
