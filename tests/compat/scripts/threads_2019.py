"""Threads, in the style of torch_xla 1.5: DataParallel, an optimizer kept in the context, a RateTracker."""

import torch
import torch.nn.functional as F
import torch.optim as optim
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.data_parallel as dp
import torch_xla.utils.utils as xu
from samples import Samples, net, tell


def train():
    # Each device gets every second batch of 8: together they are the batches of 16, in another order.
    devices = xm.get_xla_supported_devices(max_devices=2)
    order = [k + i for k in range(0, 64, 16) for start in (0, 1) for i in range(start, 16, 2)]
    loader = torch.utils.data.DataLoader(Samples(), batch_size=16 // len(devices), sampler=order)
    model_parallel = dp.DataParallel(net, device_ids=devices)

    def train_loop_fn(model, loader, device, context):
        optimizer = context.getattr_or("optimizer", lambda: optim.SGD(model.parameters(), lr=0.1))
        tracker = xm.RateTracker()
        losses = []
        model.train()
        for step, (data, target) in enumerate(loader):  # noqa: B007
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(data.size(0))
            losses.append(loss.detach())
        assert tracker.rate() > 0
        return [float(v) for v in losses]

    losses = []
    for _ in range(2):
        results = model_parallel(train_loop_fn, loader)
        losses += [sum(column) / len(column) for column in zip(*results, strict=True)]
    assert xm.is_xla_tensor(next(model_parallel.models[0].parameters()))
    assert "TransferToDeviceTime" in met.metrics_report()
    assert xu.getenv_as("NO_SUCH_VARIABLE", int, 3) == 3
    tell(losses=losses, devices=devices, version=bool(torch_xla.__version__))


if __name__ == "__main__":
    train()
