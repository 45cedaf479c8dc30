"""Document 002, the tutorial of torch._lazy."""

import time

import torch
import torch._lazy
import torch._lazy.metrics
import torch._lazy.ts_backend
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from digits import dataset, tell
from torch.optim.lr_scheduler import StepLR

torch._lazy.ts_backend.init()


def add_two_maybe(t: torch.Tensor, maybe: torch.Tensor):
    if maybe:
        return t + 2
    return t


def control_flow():
    dev = "lazy"
    t = torch.ones(1)
    for value in (0, 1):
        maybe = torch.BoolTensor([value])
        lazy_result = add_two_maybe(t.to(dev), maybe.to(dev))
        assert lazy_result.cpu() == add_two_maybe(t, maybe)
        assert str(lazy_result) == f"tensor([{1 + 2 * value}.], device='lazy:0')"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(log_interval, model, device, train_loader, optimizer, epoch, logged):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad(set_to_none=True)
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if device == "lazy":
            torch._lazy.mark_step()
        if batch_idx % log_interval == 0:
            logged.append(loss.item())


def mnist(device):
    torch.manual_seed(0)
    logged = []
    kwargs = {"batch_size": 16, "generator": torch.Generator()}
    train_loader = torch.utils.data.DataLoader(dataset(64), **kwargs)
    model = Net().to(device)
    torch.manual_seed(1)  # each device draws its numbers for dropout from its own generator
    optimizer = optim.Adadelta(model.parameters(), lr=1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(2, model, device, train_loader, optimizer, epoch, logged)
        scheduler.step()
    return logged


def what_ran_elsewhere():
    names = torch._lazy.metrics.counter_names()
    assert {"lazy::convolution", "lazy::addmm", "lazy::nll_loss_forward", "MarkStep"} <= set(names)
    elsewhere = [name for name in names if name.startswith("aten::")]
    torch._lazy.wait_device_ops()  # a step that still runs would be counted later
    torch._lazy.metrics.reset()
    assert torch._lazy.metrics.counter_names() == []
    torch.tensor([0.0, 2.0]).to("lazy").nonzero()
    assert torch._lazy.metrics.counter_value("aten::nonzero") == 1
    return elsewhere


def timing():
    model, x = nn.Linear(50, 50).to("lazy"), torch.ones(10, 50).to("lazy")
    torch._lazy.wait_device_ops()
    start = time.perf_counter()
    model(x)
    torch._lazy.mark_step()
    torch._lazy.wait_device_ops()
    return time.perf_counter() - start


if __name__ == "__main__":
    control_flow()
    torch._lazy.metrics.reset()
    losses = mnist("lazy")
    elsewhere = what_ran_elsewhere()
    tell(losses=losses, plain=mnist("cpu"), elsewhere=elsewhere, seconds=timing())
