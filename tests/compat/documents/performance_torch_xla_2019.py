"""Document 004, the performance guideline of 2019: torch_xla_py, threads, clipping without item(), metrics."""

import torch
import torch_xla
import torch_xla_py.data_parallel as dp
import torch_xla_py.xla_model as xm
from digits import LR, MNIST, MOMENTUM, is_as_printed, loader, plain_losses, tell
from torch import nn, optim


def creating():
    torch.manual_seed(3)
    x = torch.randn(4, 2, device=xm.xla_device())
    torch.manual_seed(3)
    assert str(x.device) == "xla:0" and is_as_printed(str(x), torch.randn(4, 2), "xla:0")


def running(devices):
    torch.manual_seed(0)
    model_parallel = dp.DataParallel(MNIST, device_ids=devices)

    def train_loop_fn(model, loader, device, context):
        loss_fn = nn.NLLLoss()
        optimizer = context.getattr_or(
            "optimizer", lambda: optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        )
        losses = []
        model.train()
        for _, (data, target) in loader:
            optimizer.zero_grad()
            output = model(data)
            loss = loss_fn(output, target)
            loss.backward()
            if device.type == "cpu":
                optimizer.step()
            else:
                xm.optimizer_step(optimizer)
            losses.append(loss.item())
        return losses

    losses = []
    for _ in range(2):
        found = model_parallel(train_loop_fn, loader(batch_size=8 // max(len(devices), 1)))
        losses += [sum(column) / len(column) for column in zip(*found, strict=True)]
    return losses


def clip_grad_norm(parameters, max_norm, norm_type=2.0):
    """The document's way to clip: no value is looked at."""
    device = parameters[0].device
    total_norm = torch.zeros([], device=device if parameters else None)
    for p in parameters:
        param_norm = p.grad.data.norm(norm_type) ** norm_type
        total_norm.add_(param_norm)
    total_norm = total_norm ** (1.0 / norm_type)
    clip_coef = torch.tensor(max_norm, device=device) / (total_norm + 1e-6)
    for p in parameters:
        p.grad.data.mul_(torch.where(clip_coef < 1, clip_coef, torch.tensor(1.0, device=device)))


def clipped(device):
    torch.manual_seed(0)
    model = MNIST().to(device)
    data, target = next(iter(loader()))
    nn.NLLLoss()(model(data.to(device)), target.to(device)).backward()
    if device == "cpu":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        before = runs()
        clip_grad_norm(list(model.parameters()), 0.5)
        assert runs() == before
    return [p.grad.cpu() for p in model.parameters()]


def runs():
    """Graphs run so far, as the report says."""
    lines = torch_xla._XLAC._xla_metrics_report().splitlines()
    return lines[lines.index("Counter: ExecuteComputation") + 1]


if __name__ == "__main__":
    creating()
    for devices in (xm.get_xla_supported_devices(), []):
        tell(
            losses=running(devices),
            plain=plain_losses(num_epochs=2),
            size=len(devices),
            device=devices,
        )
    torch.testing.assert_close(clipped(xm.xla_device()), clipped("cpu"))
    numbers = torch.arange(4.0, device=xm.xla_device())
    assert numbers[numbers > 1].tolist() == [2.0, 3.0]
    xm.mark_step()
    report = torch_xla._XLAC._xla_metrics_report()
    assert (
        "Metric: CompileTime\n  TotalSamples: " in report and "Counter: UncachedCompile" in report
    )
    assert "Counter: aten::_local_scalar_dense\n" in report
