"""Foreach ops on tensors that are, or share, one another; and `out=`."""

from typing import Any

import torch

import ltc_core as ltc
from tests.core.beside_eager import attempt

Device = torch.device


def ones(device: Device, *shape: int) -> torch.Tensor:
    return torch.ones(shape).to(device)


def cut(on: Device) -> None:
    if on.type != "cpu":
        ltc.mark_step()


def the_same_tensor_twice_and_then_not(device: Device) -> Any:
    found = []
    for k in range(2):
        x = ones(device, 3)
        y = x if k else x.clone()
        torch._foreach_add_([x, y], 1.0)
        found += [x, y]
        cut(device)
    return found


def not_the_same_tensor_and_then_twice(device: Device) -> Any:
    found = []
    for k in range(2):
        x = ones(device, 3)
        y = x.clone() if k else x
        torch._foreach_add_([x, y], 1.0)
        found += [x, y]
        cut(device)
    return found


def each_way_of_two_in_three(device: Device) -> Any:
    found = []
    for pattern in ("aab", "aba", "abb", "abc", "aaa"):
        made = {letter: ones(device, 2) * (ord(letter) - 96) for letter in "abc"}
        torch._foreach_mul_([made[letter] for letter in pattern], 2.0)
        torch._foreach_add_([made[letter] for letter in pattern], [made["a"], made["b"], made["c"]])
        found.append([made[letter] for letter in "abc"])
        cut(device)
    return found


def written_operands_that_are_read(device: Device) -> Any:
    x, y = ones(device, 3), ones(device, 3)
    torch._foreach_add_([x, y], [x, x])
    z, w = ones(device, 3), ones(device, 3) * 2
    torch._foreach_mul_([z, w], [w, z])
    torch._foreach_addcmul_([x, z], [z, x], [z, x], 0.5)
    return x, y, z, w


def a_list_rotated(device: Device) -> Any:
    xs = [ones(device, 2) * k for k in range(4)]
    torch._foreach_copy_(xs, [*xs[1:], xs[0]])
    torch._foreach_sub_(xs[1:], xs[:-1])
    return xs


def overlapping_views(device: Device) -> Any:
    x = torch.arange(6.0).to(device)
    answers = [
        attempt(lambda: torch._foreach_add_([x[:4], x[2:]], 1.0)),
        attempt(lambda: torch._foreach_mul_([x, x[1:3]], 2.0)),
        attempt(lambda: torch._foreach_add_([x[1:]], [x[:-1]])),
        attempt(lambda: torch._foreach_copy_([x[1:]], [x[:-1]])),
    ]
    return x, answers


def views_of_one_flat_vector(device: Device) -> Any:
    flat = torch.arange(8.0).to(device)
    parts = [flat[:3], flat[3:5], flat[5:]]
    torch._foreach_mul_(parts, 2.0)
    torch._foreach_add_(parts, [p.flip(0) for p in parts])
    norms = torch._foreach_norm(parts)
    torch._foreach_div_(parts, norms)
    return flat, norms


def mixed_dtypes_and_shapes(device: Device) -> Any:
    xs = [
        ones(device, 2),
        ones(device, 3).double(),
        ones(device, 2, 2).bfloat16(),
        ones(device, 1).int(),
    ]
    return (
        torch._foreach_add(xs, 2), torch._foreach_mul(xs, [1, 2, 3, 4]), torch._foreach_sqrt(xs[:3]),
        attempt(lambda: torch._foreach_mul_([x * 1 for x in xs], 0.5)), xs,
    )  # fmt: skip


def wrong_lists(device: Device) -> Any:
    x = ones(device, 2)
    return [
        attempt(lambda: torch._foreach_add([x], [x, x])),
        attempt(lambda: torch._foreach_add_([x, x], [1.0])),
        attempt(lambda: torch._foreach_add([], 1.0)),
        attempt(lambda: torch._foreach_copy_([x], [ones(x.device, 3)])),
    ]


def lerp_and_ema(device: Device) -> Any:
    ema, now = [ones(device, 2), ones(device, 3)], [ones(device, 2) * 5, ones(device, 3) * 7]
    for _ in range(4):
        torch._foreach_lerp_(ema, now, 0.1)
        torch._foreach_mul_(now, 0.9)
    return ema, now


def tensor_scalars(device: Device) -> Any:
    xs, scale = [ones(device, 2), ones(device, 3)], torch.tensor(2.0).to(device)
    torch._foreach_mul_(xs, scale)
    torch._foreach_mul_(xs, xs[0][0].clone())
    return xs, torch._foreach_div(xs, scale)


def clip_by_norm(device: Device) -> Any:
    ps = [torch.nn.Parameter(ones(device, 3) * k) for k in (1, 2)]
    sum((p**2).sum() for p in ps).backward()
    norm = torch.nn.utils.clip_grad_norm_(ps, 0.5)
    torch.nn.utils.clip_grad_value_(ps, 0.2)
    return norm, [p.grad for p in ps]


def one_parameter_in_a_list_twice(device: Device) -> Any:
    p = torch.nn.Parameter(ones(device, 3))
    (p * p).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([p, p], 1.0)
    torch._foreach_mul_([p.grad, p.grad], 0.5)
    return norm, p.grad


def out_of_its_own_operand(device: Device) -> Any:
    x = torch.arange(4.0).to(device)
    torch.add(x, 1, out=x)
    torch.cumsum(x, 0, out=x)
    y = x.view(2, 2)
    torch.mul(y, y, out=y)
    torch.add(x[:2], 1, out=x[2:])
    return x


def out_that_is_resized(device: Device) -> Any:
    x, empty = torch.arange(4.0).to(device), torch.empty(0, device=device)
    torch.add(x, 1, out=empty)
    slot = torch.empty(0, dtype=torch.int64, device=device)
    torch.sort(x, descending=True, out=(empty, slot))
    return empty, slot


def out_of_other_dtypes(device: Device) -> Any:
    x = torch.arange(4.0).to(device) + 0.6
    wide, narrow = (
        torch.zeros(4, dtype=torch.float64, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
    )
    torch.add(x, 1, out=wide)
    torch.eq(x, x, out=wide)
    return (
        wide,
        attempt(lambda: torch.add(x, 1, out=narrow)),
        attempt(lambda: torch.sum(x, 0, out=narrow[0])),
        attempt(lambda: torch.prod(x, 0, out=narrow[0])),
        attempt(lambda: torch.cumsum(x, 0, out=narrow.clone())),
        attempt(lambda: torch.mean(x, 0, out=wide[0])),
    )


def out_in_a_view(device: Device) -> Any:
    table = torch.zeros(3, 4, device=device)
    torch.add(torch.ones(4, device=device), 1, out=table[1])
    torch.exp(table[1], out=table[:, 0].view(3)[:1].expand(1))
    torch.matmul(torch.ones(3, 3, device=device), table.clone(), out=table)
    return table


def out_with_gradients_is_refused(device: Device) -> Any:
    x = torch.ones(3, device=device, requires_grad=True)
    return attempt(lambda: torch.add(x, 1, out=torch.zeros(3, device=device))), x


def out_joined_with_itself(device: Device) -> Any:
    x = torch.ones(2, 2).to(device)
    y = torch.zeros(4, 2, device=device)
    torch.cat([x, x * 2], out=y)
    torch.cat([y, y], out=torch.zeros(2, device=device))
    return y


def overlapping_scalars(device: Device) -> Any:
    xs = [ones(device, 2), ones(device, 3)]
    return attempt(lambda: torch._foreach_mul_(xs, xs[0][0]))


def out_of_ones_own_that_is_resized(device: Device) -> Any:
    x, y = ones(device, 2, 2), ones(device, 2, 3)
    torch.stack([x, x], out=x)
    return x.shape, attempt(lambda: torch.sub(y[0], y, out=y[0]))
