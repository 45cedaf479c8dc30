"""A LightningModule with a schedule, clipping, accumulation, validation, a checkpoint that is resumed, and metrics."""

import logging
import os
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if "--standalone" in sys.argv:
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
directory = sys.argv[1]
choice = {"accelerator": "cpu"} if "--cpu" in sys.argv else {}
devices = int(os.environ.get("DEVICES", os.environ.get("LOCAL_WORLD_SIZE", "1")))
losses: list[float] = []


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        )

    def training_step(self, batch, number):  # type: ignore[no-untyped-def]
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):  # type: ignore[no-untyped-def]
        x, y = batch
        logits = self.layers(x)
        found = {"right": (logits.argmax(1) == y).float().mean()}
        found["val_loss"] = nn.functional.cross_entropy(logits, y)
        self.log_dict(found, sync_dist=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics  # the validation has run
        losses.extend(round(found[key].item(), 4) for key in ("loss", "val_loss"))

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)]


def data(count: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=count > 40)


def trainer(epochs: int) -> pl.Trainer:
    return pl.Trainer(
        devices=devices,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **choice,  # type: ignore[arg-type]
    )


pl.seed_everything(0)
model = Classifier()
first = trainer(2)
first.fit(model, data(64), data(40))
path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]  # saved while it trained
resumed = Classifier()
second = trainer(3)
second.fit(resumed, data(64), data(40), ckpt_path=path)
right = round(second.validate(resumed, data(40), verbose=False)[0]["right"], 4)
if second.is_global_zero:
    there = str(second.strategy.root_device.type)
    print("result", there, second.world_size, losses, right, second.global_step)
if "--cpu" in sys.argv and torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # else a thread of gloo may abort the process at exit
