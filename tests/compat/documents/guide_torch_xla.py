"""Document 003, the later guide of torch_xla. With `dtypes` as an argument: the loop, and what numbers become."""

import sys

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.utils.serialization as xser
from digits import LR, MNIST, MOMENTUM, excesses, is_as_printed, loader, plain_losses, tell
from torch import nn, optim


def tensors_are_tensors():
    torch.manual_seed(3)
    t0 = torch.randn(2, 2, device=xm.xla_device())
    torch.manual_seed(3)
    assert str(t0.device) == "xla:0" and is_as_printed(str(t0), torch.randn(2, 2), "xla:0")
    t1 = torch.randn(2, 2, device=xm.xla_device())
    assert is_as_printed(str(t0 + t1), t0.cpu() + t1.cpu(), "xla:0")
    assert is_as_printed(str(t0.mm(t1)), t0.cpu().mm(t1.cpu()), "xla:0")
    l_in = torch.randn(10, device=xm.xla_device())
    l_out = torch.nn.Linear(10, 20).to(xm.xla_device())(l_in)
    assert "device='xla:0'" in str(l_out) and l_out.grad_fn
    try:
        torch.nn.Linear(10, 20)(l_in)
    except RuntimeError as error:
        assert "tensor: torch.FloatTensor" in str(error)
    else:
        raise AssertionError("devices were mixed")


def one_device():
    device = xm.xla_device()
    torch.manual_seed(0)
    model = MNIST().train().to(device)
    loss_fn = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    for data, target in loader():
        optimizer.zero_grad()
        data = data.to(device)
        target = target.to(device)
        output = model(data)
        loss = loss_fn(output, target)
        loss.backward()

        optimizer.step()
        xm.mark_step()
        losses.append(loss)
    return model, [loss.item() for loss in losses]


def _mp_fn(index):
    device = xm.xla_device()
    mp_device_loader = pl.MpDeviceLoader(loader(), device)
    torch.manual_seed(0)
    model = MNIST().train().to(device)
    loss_fn = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    for data, target in mp_device_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = loss_fn(output, target)
        loss.backward()
        xm.optimizer_step(optimizer)
        losses.append(loss)
    found = [loss.item() for loss in losses]
    columns = xm.mesh_reduce("losses", found, lambda all: list(zip(*all, strict=True)))
    # All call it; the master writes, and by then its file is there for all.
    path = "model.pt"
    xm.save(model.state_dict(), path)
    xm.rendezvous("saved")
    saved = torch.load(path)
    assert all(torch.equal(v.cpu(), saved[k]) for k, v in model.state_dict().items())
    if xm.is_master_ordinal():
        losses = [sum(column) / len(column) for column in columns]
        tell(losses=losses, plain=plain_losses(), size=len(columns[0]), device=str(device))


def moving():
    whole = torch.arange(6.0, device=xm.xla_device()).view(2, 3)
    assert whole.t().is_contiguous() and whole[:, ::2].is_contiguous()
    part, all_of_it = whole[0].cpu(), whole.cpu()
    part.zero_()
    assert all_of_it.tolist() == whole.tolist() == [[0, 1, 2], [3, 4, 5]]


def saving(model):
    device = xm.xla_device()
    t0 = torch.randn(2, 2, device=device)
    t1 = torch.randn(2, 2, device=device)
    torch.save((t0.cpu(), t1.cpu()), "tensors.pt")
    tensors = torch.load("tensors.pt")
    assert torch.equal(tensors[0].to(device), t0) and torch.equal(tensors[1].to(device), t1)

    xm.save(model.state_dict(), "model.pt")
    state = torch.load("model.pt")
    assert all(v.device.type == "cpu" for v in state.values())
    MNIST().load_state_dict(state)

    xser.save(model.state_dict(), "model.xser")
    streamed = xser.load("model.xser")
    again = MNIST().to(device)
    again.load_state_dict(streamed)
    assert torch.equal(again.fc.weight, model.fc.weight)

    torch.save(t0, "direct.pt")
    assert torch.load("direct.pt").device == device


if __name__ == "__main__":
    model, losses = one_device()
    tell(losses=losses, plain=plain_losses(), **excesses(xm.xla_device()))
    half = torch.ones(1, dtype=torch.bfloat16, device=xm.xla_device()) + 1 / 256
    assert half.dtype == half.cpu().dtype == torch.bfloat16 and half.item() == 1
    if sys.argv[1:] != ["dtypes"]:
        tensors_are_tensors()
        moving()
        saving(model)
        xmp.spawn(_mp_fn, args=())
