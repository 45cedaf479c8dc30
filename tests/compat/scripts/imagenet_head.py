"""A script in the style of test_train_mp_imagenet.py of today: profiler, printed updates, fake data, DDP by a flag."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.debug.profiler as xp
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend
import torch_xla.test.test_utils as test_utils
import torch_xla.utils.utils as xu
from samples import batches, net, tell
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_xla import runtime as xr

LOG_STEPS = 2


def _train_update(device, step, loss, tracker, epoch, writer, losses):
    losses.append(loss.item())
    if step % LOG_STEPS == 0:
        rates = tracker.rate(), tracker.global_rate()
        test_utils.print_training_update(
            device, step, losses[-1], *rates, epoch, summary_writer=writer
        )


def train_imagenet(flags):
    if flags.ddp:
        dist.init_process_group("xla", init_method="xla://")
    device = torch_xla.device()
    if flags.fake_data:
        x, y = batches(xr.global_ordinal(), xr.world_size())[0]
        train_loader = xu.SampleGenerator(data=(x, y), sample_count=64 // 16)
    else:
        train_loader = batches(xr.global_ordinal(), xr.world_size())
    model = net().to(device)
    if xr.using_pjrt():
        xm.broadcast_master_param(model)
    if flags.ddp:
        model = DDP(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    writer = test_utils.get_summary_writer(None) if xm.is_master_ordinal() else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = torch.nn.CrossEntropyLoss()
    server = xp.start_server(9012)
    losses = []

    def train_loop_fn(loader, epoch):
        tracker = xm.RateTracker()
        model.train()
        for step, (data, target) in enumerate(loader):
            with xp.StepTrace("train_imagenet"):
                with xp.Trace("build_graph"):
                    optimizer.zero_grad()
                    output = model(data)
                    loss = loss_fn(output, target)
                    loss.backward()
                    if flags.ddp:
                        optimizer.step()
                    else:
                        xm.optimizer_step(optimizer)
                    tracker.add(16)
                xm.add_step_closure(
                    _train_update, args=(device, step, loss, tracker, epoch, writer, losses)
                )

    def test_loop_fn(loader, epoch):
        total_samples, correct = 0, 0
        model.eval()
        for step, (data, target) in enumerate(loader):
            with torch.no_grad():
                pred = model(data).max(1, keepdim=True)[1]
            correct += pred.eq(target.view_as(pred)).sum()
            total_samples += data.size()[0]
            xm.add_step_closure(test_utils.print_test_update, args=(device, None, epoch, step))
        return xm.mesh_reduce("test_accuracy", 100.0 * correct.item() / total_samples, np.mean)

    sizes = {"loader_prefetch_size": 8, "device_prefetch_size": 4}
    loader = pl.MpDeviceLoader(train_loader, device, host_to_device_transfer_threads=1, **sizes)
    for epoch in range(1, 3):
        xm.master_print(f"Epoch {epoch} train begin {test_utils.now()}")
        train_loop_fn(loader, epoch)
        accuracy = test_loop_fn(loader, epoch)
        test_utils.write_to_summary(
            writer, epoch, dict_to_write={"Accuracy/test": accuracy}, write_xla_metrics=True
        )
        xm.master_print(met.short_metrics_report())
    test_utils.close_summary_writer(writer)
    mean = xm.mesh_reduce("losses", np.array(losses), lambda found: np.mean(found, axis=0))
    if xm.is_master_ordinal():
        assert server is not None
        tell(losses=mean.tolist(), accuracy=accuracy, world_size=xr.world_size())
    if flags.ddp:
        dist.destroy_process_group()
    return accuracy


def _mp_fn(index, flags):
    torch.set_default_dtype(torch.float32)
    assert 0 <= train_imagenet(flags) <= 100


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--fake_data", action="store_true")
    flags = parser.parse_args()
    if dist.is_torchelastic_launched():
        _mp_fn(xu.getenv_as(xenv.LOCAL_RANK, int), flags)
    else:
        torch_xla.launch(_mp_fn, args=(flags,))
