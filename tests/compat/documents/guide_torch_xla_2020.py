"""Document 001, the guide of torch_xla in 2020: one device, processes, threads."""

import copy

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.data_parallel as dp
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from digits import LR, MNIST, MOMENTUM, excesses, is_as_printed, loader, plain_losses, tell
from torch import nn, optim


def creating():
    torch.manual_seed(3)
    t = torch.randn(2, 2, device=xm.xla_device())
    torch.manual_seed(3)
    assert str(t.device) == "xla:0"
    assert is_as_printed(str(t), torch.randn(2, 2), "xla:0")


def working_with():
    t0 = torch.randn(2, 2, device=xm.xla_device())
    t1 = torch.randn(2, 2, device=xm.xla_device())
    assert is_as_printed(str(t0 + t1), t0.cpu() + t1.cpu(), "xla:0")
    assert is_as_printed(str(t0.mm(t1)), t0.cpu().mm(t1.cpu()), "xla:0")
    l_in = torch.randn(10, device=xm.xla_device())
    linear = torch.nn.Linear(10, 20).to(xm.xla_device())
    l_out = linear(l_in)
    assert "device='xla:0'" in str(l_out) and l_out.grad_fn
    linear = torch.nn.Linear(10, 20).cpu()
    try:
        linear(l_in)
    except RuntimeError as error:
        assert "tensor: torch.FloatTensor" in str(error)
    else:
        raise AssertionError("devices were mixed")


def one_device():
    device = xm.xla_device()
    torch.manual_seed(0)
    model = MNIST().to(device)
    loss_fn = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    model.train()
    for data, target in loader():
        optimizer.zero_grad()
        data = data.to(device)
        target = target.to(device)
        output = model(data)
        loss = loss_fn(output, target)
        loss.backward()
        xm.optimizer_step(optimizer, barrier=True)
        losses.append(loss.detach())
    assert "Counter: MarkStep\n  Value: 4\n" in torch_xla._XLAC._xla_metrics_report()
    return [loss.item() for loss in losses]


def _mp_fn(index):
    device = xm.xla_device()
    para_loader = pl.ParallelLoader(loader(), [device])
    torch.manual_seed(0)
    model = MNIST().to(device)
    loss_fn = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    model.train()
    for data, target in para_loader.per_device_loader(device):
        optimizer.zero_grad()
        output = model(data)
        loss = loss_fn(output, target)
        loss.backward()
        xm.optimizer_step(optimizer)
        losses.append(loss.detach())
    sums = xm.all_reduce("sum", torch.stack(losses + [torch.ones((), device=device)]))
    *sums, size = sums.tolist()
    if index == 0:
        losses = [s / size for s in sums]
        tell(losses=losses, plain=plain_losses(), size=size, device=str(device))


def threads():
    devices = xm.get_xla_supported_devices()
    torch.manual_seed(0)
    model_parallel = dp.DataParallel(MNIST, device_ids=devices)

    def train_loop_fn(model, loader, device, context):
        loss_fn = nn.NLLLoss()
        optimizer = optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        losses = []
        model.train()
        for _, (data, target) in loader:
            optimizer.zero_grad()
            output = model(data)
            loss = loss_fn(output, target)
            loss.backward()
            xm.optimizer_step(optimizer)
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    found = model_parallel(train_loop_fn, loader(batch_size=8 // len(devices)))
    losses = [sum(column) / len(column) for column in zip(*found, strict=True)]
    tell(losses=losses, plain=plain_losses(), size=len(devices), device=devices[-1])


def saving():
    t0 = torch.randn(2, 2, device=xm.xla_device())
    t1 = torch.randn(2, 2, device=xm.xla_device())
    torch.save((t0, t1), "tensors.pt")
    tensors = torch.load("tensors.pt")
    assert all(t.device == xm.xla_device() for t in tensors)
    assert torch.equal(tensors[0], t0) and torch.equal(tensors[1], t1)
    assert str(tensors) == str((t0, t1))

    t_view = t0[0:2]
    try:
        torch.save((t0, t_view), "tensors.pt")
    except RuntimeError as error:
        assert "Tensor ID 2 is sharing a view with tensor ID 1" in str(error)
    else:
        raise AssertionError("a tensor and its view were saved")
    torch.save((t0.cpu(), t_view.cpu()), "tensors.pt")
    assert [t.device.type for t in torch.load("tensors.pt")] == ["cpu", "cpu"]


def copying():
    t = torch.zeros(2, device=xm.xla_device())
    deep, shallow = copy.copy(t), t.view(2)
    t += 1
    assert deep.tolist() == [0, 0] and shallow.tolist() == [1, 1]
    assert t.view(2, 1).expand(2, 3).is_contiguous()


if __name__ == "__main__":
    creating()
    working_with()
    tell(losses=one_device(), plain=plain_losses(), **excesses(xm.xla_device()))
    saving()
    copying()
    threads()
    xmp.spawn(_mp_fn, args=())
