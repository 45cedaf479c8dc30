"""Reading and writing by indices and masks."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.core.beside_eager import attempt

Device = torch.device


def table(on: Device) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4).to(on)


def masks_of_no_dims(device: Device) -> Any:
    x, y = torch.ones((), device=device), torch.ones(3, device=device)
    x[x == 1] = 5.0
    y[torch.tensor(True, device=device)] = 2.0
    z = torch.arange(3, device=device)
    z[torch.tensor(False, device=device)] = 7
    return x, y, z, x[x > 3], y[y[0] > 1]


def masked_writes(device: Device) -> Any:
    x = table(device)
    x[x > 5] = -1
    x[x == -1] += 2
    x[x[:, 0] == 4] = torch.tensor([1.0, 2, 3, 4], device=device)
    x[torch.tensor([True, False, True], device=device), 1] = 9
    return x, x[x < 3]


def masks_written_where_they_say(device: Device) -> Any:
    x, y = table(device) > 5, table(device) % 2 == 0
    x[x] = False
    y[1:][y[1:]] = False
    y.index_put_((y,), torch.tensor(False, device=device))
    z = x == y
    z[z] &= y[z]
    return x, y, z


def masks_on_the_cpu(device: Device) -> Any:
    x = table(device)
    x[torch.tensor([True, False, True])] *= 2
    return x, x[torch.tensor([0, 2])], x[[True, False, True]]


def index_with_tensors(device: Device) -> Any:
    x, i = table(device), torch.tensor([2, 0, -1], device=device)
    x[i, i] = 5
    x[i] += 1
    x[:, i] *= 2
    x[1, i] = x[i, 1]
    return x, x[i[:, None], i], x[..., i, None], x[i.tolist()]


def index_put_with_duplicates(device: Device) -> Any:
    x, i = torch.zeros(4, device=device), torch.tensor([1, 1, 3], device=device)
    x.index_put_((i,), torch.ones(3, device=device), accumulate=True)
    x.index_add_(0, i, torch.ones(3, device=device), alpha=2)
    return x, x.scatter_add(0, i, x[:3]), x.scatter_reduce(0, i, x[:3], "amax")


def out_of_range(device: Device) -> Any:
    x = table(device)
    return [
        attempt(lambda: x[3]),
        attempt(lambda: x[torch.tensor([7], device=device)]),
        attempt(lambda: x.gather(1, torch.full((3, 1), 9, device=device))),
        attempt(lambda: F.embedding(torch.tensor([5], device=device), x)),
        attempt(lambda: x.index_select(0, torch.tensor([-1], device=device))),
        attempt(lambda: x[:, torch.tensor([-5], device=device)]),
        attempt(lambda: x.select(2, 0)),
    ]


def one_hot(device: Device) -> Any:
    i = torch.tensor([0, 2, 1], device=device)
    return (
        F.one_hot(i), F.one_hot(i, 4), attempt(lambda: F.one_hot(i, 2)), attempt(lambda: F.one_hot(i - 1, 4)),
        attempt(lambda: F.one_hot(i.float(), 4)), F.one_hot(i[:0], 3),
    )  # fmt: skip


def gradients_of_indexing(device: Device) -> Any:
    x = table(device).requires_grad_()
    i = torch.tensor([0, 0, 2], device=device)
    y = x[i] * 2 + x[:, [1, 1, 3]][:, 0].sum() + x[x > 3].sum()
    y.sum().backward()
    return y, x.grad


def gradients_of_indexed_writes(device: Device) -> Any:
    x, v = table(device).requires_grad_(), torch.ones(2, 4, device=device, requires_grad=True)
    y = x * 1
    y[torch.tensor([0, 2], device=device)] = v * 3
    y[y > 8] = 0
    y[1, 1:3] = v[0, :2]
    (y * y).sum().backward()
    return y, x.grad, v.grad


def scatter_and_gather(device: Device) -> Any:
    x = table(device).requires_grad_()
    order = x.argsort(1, descending=True)
    y = torch.zeros(3, 4, device=device).scatter(1, order, x.gather(1, order) * 2)
    y.square().sum().backward()
    return (
        y,
        x.grad,
        x.take_along_dim(order, 1),
        torch.zeros(3, 4, device=device).scatter_(0, order[:2] % 3, 1.0),
    )


def shapes_that_depend_on_values(device: Device) -> Any:
    x = table(device) % 5
    return (
        x.nonzero(), torch.where(x > 2), x.unique(return_inverse=True, return_counts=True), x.masked_select(x > 1),
        x.long().flatten().bincount(), torch.unique_consecutive(x), torch.repeat_interleave(x[0], x[0].long()),
        x.count_nonzero(0), torch.argwhere(x == 0),
    )  # fmt: skip


def histograms(device: Device) -> Any:
    x = table(device)
    return (
        x.histc(4), x.histc(3, 0, 6), torch.bucketize(x, x[1]),
        torch.searchsorted(x, x[:, :2] + 0.5), torch.histogram(x, 3)[0] if device.type == "cpu" else x.histc(3),
    )  # fmt: skip


def slices_of_all_kinds(device: Device) -> Any:
    x = table(device)
    x[...] = x[:] * 2
    x[None, 1:, ::2][0] += 1
    x[-1, -2:] = 0
    x[1:1] = 5
    return (
        x,
        x[2:0],
        x[..., None, -1],
        x[1:, [0]],
        x[:, :, None].shape,
        attempt(lambda: x[:, :, 0]),
        attempt(lambda: x[::-1]),
    )


def assigned_from_numbers_and_lists(device: Device) -> Any:
    x = torch.zeros(3, 2, device=device)
    x[0] = 1
    x[1] = torch.tensor([2, 3])
    x[2, 0] = True
    x[:, 1] += torch.tensor(0.5)
    i = torch.zeros(2, dtype=torch.int64, device=device)
    i[0] = 2.7
    return x, i, attempt(lambda: x.__setitem__(0, torch.ones(3, device=x.device)))


def index_fill_copy_and_put(device: Device) -> Any:
    x, i = table(device), torch.tensor([0, 2], device=device)
    x.index_fill_(1, i, -1)
    x.index_copy_(0, i, torch.ones(2, 4, device=device))
    x.put_(i, torch.tensor([7.0, 8.0], device=device))
    x.masked_scatter_(x == -1, torch.arange(12.0, device=device))
    return x, x.take(i)


def embedding_bags(device: Device) -> Any:
    w = table(device).requires_grad_()
    i, offsets = torch.tensor([0, 2, 1, 1], device=device), torch.tensor([0, 3], device=device)
    out = F.embedding_bag(i, w, offsets, mode="mean") + F.embedding(i, w, padding_idx=1)[:2]
    out.sum().backward()
    return out, w.grad


def sorts_with_ties(device: Device) -> Any:
    x = torch.tensor([3.0, 1, 3, 2, 1], device=device)
    return (
        x.sort(stable=True),
        x.argsort(stable=True, descending=True),
        x.topk(2)[0],
        x.max(0),
        x.min(0),
        x.argmax(),
    )
