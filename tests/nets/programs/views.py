"""Views and in-place writes, alone and under autograd."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.core.beside_eager import attempt

Device = torch.device


def numbers(device: Device, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(device)


def write_through_a_chain_of_views(device: Device) -> Any:
    x = numbers(device, 4, 6)
    v = x[1:3].t()[::2].unsqueeze(1)
    v.mul_(10)
    x.add_(1)
    v[0] = -1
    return x, v


def two_overlapping_views(device: Device) -> Any:
    x = numbers(device, 8)
    a, b = x[:5], x[3:]
    a += 1
    b *= 2
    a[4] = 7
    return x, a, b


def a_view_written_under_autograd(device: Device) -> Any:
    x = numbers(device, 3, 4).requires_grad_()
    y = x * 2
    y[1].mul_(3)
    y[:, 0] = 5
    y.t()[2].add_(x[0, 0])
    y.square().sum().backward()
    return y, x.grad


def a_view_before_the_write_sees_its_gradient(device: Device) -> Any:
    x = numbers(device, 6).requires_grad_()
    y = x.exp().clamp(max=9)
    v = y.view(2, 3)
    y.mul_(2)
    v[0] += 1
    (v * v).sum().backward()
    return v, x.grad


def a_leaf_written_under_no_grad(device: Device) -> Any:
    w = numbers(device, 4).requires_grad_()
    for _ in range(3):
        (w * w).sum().backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
    return w


def a_leaf_that_needs_gradients_refuses_writes(device: Device) -> Any:
    w = numbers(device, 4).requires_grad_()
    return [
        attempt(lambda: w.add_(1)),
        attempt(lambda: w[0].zero_()),
        attempt(lambda: w.view(2, 2).mul_(2)),
    ]


def a_saved_value_that_was_written(device: Device) -> Any:
    x = numbers(device, 4).requires_grad_()
    y = x.exp()
    y.add_(1)
    return attempt(lambda: y.sum().backward()), y._version


def outputs_of_split_refuse_writes(device: Device) -> Any:
    x = numbers(device, 4, 2).requires_grad_() * 1
    a, b = x.split(2)
    return attempt(lambda: a.add_(1)), attempt(lambda: x.unbind()[0].mul_(2)), b


def data_shares_and_detach_shares(device: Device) -> Any:
    x = numbers(device, 4).requires_grad_()
    x.data.add_(1)
    d = x.detach()
    d[0] = 9
    with torch.no_grad():
        x[1] = 8
    return x, d, x._version


def data_is_replaced(device: Device) -> Any:
    x = torch.nn.Parameter(numbers(device, 4))
    y = x * 2
    x.data = numbers(device, 2, 3)
    z = (x * 3).sum()
    z.backward()
    return x, y, x.grad, x.shape


def set_makes_one_of_two(device: Device) -> Any:
    x, y = numbers(device, 4), numbers(device, 4) * 10
    with torch.no_grad():
        x.set_(y)
    x.add_(1)
    return x, y


def expanded_memory_refuses_writes(device: Device) -> Any:
    x = numbers(device, 3)
    e = x.expand(2, 3)
    return attempt(lambda: e.add_(1)), attempt(lambda: e.copy_(torch.ones(2, 3, device=device))), x


def diagonal_and_strided_writes(device: Device) -> Any:
    x = numbers(device, 4, 4)
    x.diagonal().fill_(-1)
    x.as_strided((2, 2), (5, 2), 1).mul_(3)
    x.unfold(1, 2, 2)[..., 0] += 1
    return x


def transposed_in_place(device: Device) -> Any:
    x = numbers(device, 2, 3)
    v = x[0]
    x.t_()
    x[0] = 7
    x.unsqueeze_(0).squeeze_(0)
    return x, v


def dtype_views_share(device: Device) -> Any:
    x = numbers(device, 4)
    v = x.view(torch.int32)
    v[1] = 0
    x[0] = 1
    return x, v, x.view(torch.uint8)[:4]


def real_and_imaginary_parts_share(device: Device) -> Any:
    x = torch.view_as_complex(numbers(device, 3, 2).clone())
    x.real.mul_(2)
    x.imag[0] = 9
    return x, x.abs(), torch.view_as_real(x)


def a_view_that_outlives_its_base(device: Device) -> Any:
    def part() -> torch.Tensor:
        x = numbers(device, 4, 4)
        x += 1
        return x[2]

    v = part()
    v *= 2
    return v, v.storage_offset() >= 0


def a_view_made_in_no_grad_written_in_grad(device: Device) -> Any:
    x = numbers(device, 4).requires_grad_() * 1
    with torch.no_grad():
        v = x[1:]
    return attempt(
        lambda: v.mul_(torch.ones(3, device=device, requires_grad=True))
    ), v.requires_grad


def a_view_of_a_leaf_in_a_loop(device: Device) -> Any:
    table = torch.zeros(5, 3, device=device)
    for k in range(5):
        row = table[k]
        row += k
        row[k % 3] = -1
        if k:
            table[k - 1] += row
    return table


def swapped_rows(device: Device) -> Any:
    x = numbers(device, 3, 2)
    x[0], x[2] = x[2].clone(), x[0].clone()
    x[[0, 1]] = x[[1, 0]]
    return x


def relu_in_place_after_a_view(device: Device) -> Any:
    x = (numbers(device, 2, 3) - 3).requires_grad_()
    y = (x * 1).view(3, 2)
    F.relu(y, inplace=True)
    (y * y).sum().backward()
    return y, x.grad


def narrow_copies_into_a_cache(device: Device) -> Any:
    cache = torch.zeros(2, 8, 3, device=device)
    for k in range(3):
        cache.narrow(1, 2 * k, 2).copy_(numbers(device, 2, 2, 3) + k)
        cache[:, : 2 * k + 2].sum()
    return cache, cache[:, :6].mean(1)


def read_back_strides(device: Device) -> Any:
    x = numbers(device, 2, 3, 4)
    return (
        x.permute(2, 0, 1),
        x.permute(2, 0, 1) + 1,
        x[..., ::2],
        x[:, 1:].transpose(0, 2),
        x.mT.exp(),
    )


def strides_of_uploads(device: Device) -> Any:
    w = torch.zeros(4, 3, device=device)
    w.copy_(torch.arange(12.0).view(3, 4).t())
    c = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).to(device)
    turned = torch.arange(12.0).view(3, 4).t().to(device)
    return w, w * 2, c * 2, turned, turned + w, turned.sum(0)


def channels_last_checkpoint(device: Device) -> Any:
    conv = torch.nn.Conv2d(3, 4, 3).to(device)
    state = {k: v.cpu() for k, v in conv.state_dict().items()}
    state["weight"] = state["weight"].to(memory_format=torch.channels_last)
    conv.load_state_dict(state)
    out = conv(numbers(device, 1, 3, 5, 5))
    out.sum().backward()
    return out, conv.weight, conv.weight.grad


def a_parameter_of_transposed_data(device: Device) -> Any:
    w = torch.nn.Parameter(numbers(device, 3, 4).t())
    opt = torch.optim.Adam([w], lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        (w * w).sum().backward()
        opt.step()
    return w, w.grad


def strides_over_memory_seen_as_another_dtype(device: Device) -> Any:
    doubles = torch.tensor([[-3.0], [-4.0], [-2.0]], dtype=torch.float64).to(device)
    doubles.T.view(torch.int32).fill_diagonal_(2)
    floats = torch.arange(8.0, device=device)
    floats.view(torch.int16).as_strided((3,), (2,), 1).fill_(3)
    parts = torch.zeros(4, dtype=torch.complex64, device=device)
    torch.view_as_real(parts).as_strided((4,), (2,), 1).fill_(3.0)
    floats[4:].view(torch.int32).as_strided((2,), (1,)).add_(1)
    short = torch.arange(8, dtype=torch.int16, device=device)
    short[4:].view(torch.int32).resize_(1).fill_(7)
    return doubles, floats, parts, short


def strides_that_views_say(device: Device) -> Any:
    x = numbers(device, 4, 6).requires_grad_() * 1
    for v in (x[1:], x.t(), x[:, 1::2], x[1:, 2:].t()):
        (down, right), first = v.stride(), v.storage_offset()
        v.as_strided(v.size(), v.stride(), first).mul_(2)
        v.as_strided((2, 2), (right, down), first + right).add_(1)
        x = x + torch.as_strided(v, (2, 2, 2), (down, down, right)).sum()
    return x, torch.as_strided_copy(x.t(), (6, 4), x.t().stride())
