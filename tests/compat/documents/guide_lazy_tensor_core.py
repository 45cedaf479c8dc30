"""Document 000, the guide of lazy_tensor_core. With `dtypes` as an argument: the loop, and what numbers become."""

import sys

import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm
import lazy_tensor_core.utils.serialization as xser
import torch
from digits import LR, MNIST, MOMENTUM, excesses, is_as_printed, loader, plain_losses, tell
from torch import nn, optim


def creating():
    torch.manual_seed(3)
    t = torch.randn(2, 2, device=ltm.lazy_device())
    torch.manual_seed(3)
    assert str(t.device) == "lazy:0" and ltm.is_lazy_tensor(t)
    assert is_as_printed(str(t), torch.randn(2, 2), "lazy:0")


def like_other_tensors():
    t0 = torch.randn(2, 2, device=ltm.lazy_device())
    t1 = torch.randn(2, 2, device=ltm.lazy_device())
    assert is_as_printed(str(t0 + t1), t0.cpu() + t1.cpu(), "lazy:0")
    assert is_as_printed(str(t0.mm(t1)), t0.cpu().mm(t1.cpu()), "lazy:0")
    l_in = torch.randn(10, device=ltm.lazy_device())
    linear = torch.nn.Linear(10, 20).to(ltm.lazy_device())
    l_out = linear(l_in)
    assert "device='lazy:0'" in str(l_out) and l_out.grad_fn
    torch.testing.assert_close(l_out.cpu(), linear.cpu()(l_in.cpu()))
    linear = torch.nn.Linear(10, 20)
    try:
        linear(l_in)
    except RuntimeError as error:
        assert "Input tensor is not a lazy tensor: torch.FloatTensor" in str(error)
    else:
        raise AssertionError("devices were mixed")


def training():
    device = ltm.lazy_device()
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
        ltm.mark_step()
        losses.append(loss)
    return model, [loss.item() for loss in losses]


def layout_and_moving():
    whole = torch.zeros(2, 3, device=ltm.lazy_device())
    assert whole.t().is_contiguous() and whole[:, 1:].is_contiguous()
    row = whole[0].cpu()
    row += 1
    assert whole.sum().item() == 0
    back = row.to(ltm.lazy_device())
    row += 1
    assert back.tolist() == [1.0, 1.0, 1.0]


def saving(model):
    device = ltm.lazy_device()
    t0 = torch.randn(2, 2, device=device)
    t1 = torch.randn(2, 2, device=device)
    tensors = (t0.cpu(), t1.cpu())
    torch.save(tensors, "tensors.pt")
    tensors = torch.load("tensors.pt")
    assert [t.device.type for t in tensors] == ["cpu", "cpu"]
    assert torch.equal(tensors[0].to(device), t0) and torch.equal(tensors[1].to(device), t1)

    ltm.save(model.state_dict(), "model.pt")
    xser.save(model.state_dict(), "model.xser")
    plain, streamed = torch.load("model.pt"), xser.load("model.xser")
    for name, value in model.state_dict().items():
        assert plain[name].device.type == streamed[name].device.type == "cpu"
        assert torch.equal(plain[name], value.cpu()) and torch.equal(streamed[name], value.cpu())
    again = MNIST().to(device)
    again.load_state_dict(streamed)
    assert torch.equal(again.fc.weight, model.fc.weight) and again.fc.weight.device == device

    torch.save(t0, "direct.pt")
    direct = torch.load("direct.pt")
    assert direct.device == device and torch.equal(direct, t0)


if __name__ == "__main__":
    trained, losses = training()
    if sys.argv[1:] != ["dtypes"]:
        creating()
        like_other_tensors()
        layout_and_moving()
        saving(trained)
        assert lazy_tensor_core.__version__
    tell(losses=losses, plain=plain_losses(), **excesses(ltm.lazy_device()))
