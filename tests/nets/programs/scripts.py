"""What scripts do between ops: control flow, threads, exceptions and collections in mid-step."""

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ltc_core as ltc
from tests.core.beside_eager import attempt

Device = torch.device


def numbers(device: Device, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(device)


def cut(on: Device) -> None:
    if on.type != "cpu":
        ltc.mark_step()


def control_flow_that_changes(device: Device) -> Any:
    x, found = numbers(device, 4), []
    for k in range(9):
        y = x.exp() if k % 3 == 0 else x.clone() if k % 3 == 1 else x
        y.clamp_(max=5).add_(k)
        if k % 4 == 3:
            y = y.view(2, 2).t()
        found.append(y.sum())
        cut(device)
    return found, x


def one_tensor_or_two(device: Device) -> Any:
    found = []
    for k in range(6):
        a = numbers(device, 3)
        b = a if k % 2 else a.clone()
        c = a[:] if k % 3 else a.clone()
        b.add_(1)
        c.mul_(2)
        torch.add(a, b, out=c)
        found.append((a, b, c))
        cut(device)
    return found


def a_view_or_a_copy(device: Device) -> Any:
    found = []
    for k in range(6):
        x = numbers(device, 4)
        v = x[:2] if k % 2 else x[:2].clone()
        w = x[1:3] if k % 3 else x[1:3].clone()
        v.add_(w.clone())
        w.mul_(v.clone())
        found.append((x, v, w))
        cut(device)
    return found


def branches_on_values(device: Device) -> Any:
    x, steps = numbers(device, 3) + 1, 0
    while float(x.sum()) < 100 and steps < 20:
        x = x * 1.5 if bool(x[0] > 2) else x + 1
        steps += 1
    return x, steps


def loops_of_changing_sizes(device: Device) -> Any:
    h, found = torch.zeros(2, 3, device=device), []
    for n in (3, 1, 4, 1, 5):
        x = numbers(device, n, 3)
        h = torch.tanh(h + x.mean(0))
        found.append(torch.cat([h, x]))
        cut(device)
    return found


def cuts_in_the_middle_of_a_step(device: Device) -> Any:
    w = nn.Parameter(numbers(device, 3))
    opt = torch.optim.Adam([w], lr=0.1)
    for k in range(3):
        opt.zero_grad()
        y = w * (k + 1)
        cut(device)
        loss = y.square().sum()
        loss.backward()
        cut(device)
        opt.step()
        y.detach().add_(1)
    return w, y, loss


def an_op_of_the_script(device: Device) -> Any:
    doubled = _doubled()
    w = nn.Parameter(numbers(device, 3, 3))
    opt, found = torch.optim.SGD([w], lr=0.1), []
    for k in range(4):
        opt.zero_grad()
        loss = doubled((w * (k + 1)).tanh()).cos().sum()
        loss.backward()
        opt.step()
        found.append(loss.detach())
        cut(device)
    return w, found


@functools.cache
def _doubled() -> Any:
    @torch.library.custom_op("ltc_scripts::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, grad: grad * 2)
    return doubled


def views_over_cuts(device: Device) -> Any:
    x = numbers(device, 4, 4)
    v, w = x[1], x.t()[2:]
    cut(device)
    v.add_(10)
    cut(device)
    w.mul_(2)
    x[0] = v
    cut(device)
    return x, v, w


def views_made_before_and_written_after(device: Device) -> Any:
    x = numbers(device, 6)
    parts = list(x.split(2))
    kept = x.clone()
    cut(device)
    for k, part in enumerate(parts):
        part += k
        cut(device)
    del x
    return parts, kept


def values_that_die_and_live(device: Device) -> Any:
    kept = []
    for k in range(6):
        x = numbers(device, 3) + k
        y = x.exp()
        if k % 2:
            kept.append(x)
        else:
            kept.append(y[1:])
        del x, y
        cut(device)
    return kept


def collections_in_mid_step(device: Device) -> Any:
    class Holder:
        def __init__(self) -> None:
            self.me, self.t = self, numbers(device, 3) * 2

    x = numbers(device, 3)
    for _ in range(3):
        holder = Holder()
        x = x + holder.t
        ref = weakref.ref(holder)
        del holder
        gc.collect()
        assert ref() is None
    return x


def an_exception_in_mid_step(device: Device) -> Any:
    w, found = nn.Parameter(numbers(device, 3)), []
    opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for k in range(4):
        opt.zero_grad()
        with contextlib.suppress(ZeroDivisionError):
            loss = (w * (k + 1)).square().sum()
            if k == 2:
                raise ZeroDivisionError
            loss.backward()
            opt.step()
        found.append(w.detach().clone())
        cut(device)
    return found


def a_wrong_call_in_mid_step(device: Device) -> Any:
    x, found = numbers(device, 3), []
    for _ in range(3):
        x = x + 1
        x.mul_(2)
        found.append(attempt(lambda: x @ torch.ones(4, 4, device=x.device)))  # noqa: B023
        found.append(attempt(lambda: x.add_(torch.ones(2, 3, device=x.device))))  # noqa: B023
        x.sub_(1)
        cut(device)
    return x, found


def an_interrupted_generator(device: Device) -> Any:
    def parts() -> Iterator[torch.Tensor]:
        x = numbers(device, 4)
        for k in range(4):
            x += 1
            yield x[k:]

    it = parts()
    first, second = next(it), next(it)
    it.close()
    return first, second


def threads_on_one_device(device: Device) -> Any:
    answers: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        x = torch.full((3,), float(k)).to(device)
        for step in range(20):
            x = x * 0.5 + k
            if step % 7 == k:
                cut(device)
        answers[k] = x.cpu()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[k] for k in range(3)]


def backward_in_another_thread(device: Device) -> Any:
    w = nn.Parameter(numbers(device, 3))
    loss = (w * w).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return w.grad


def threads_that_share_a_model(device: Device) -> Any:
    model, found = nn.Linear(3, 2).to(device).eval(), {}

    def work(k: int) -> None:
        with torch.no_grad():
            found[k] = model(numbers(device, 2, 3) + k).cpu()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[k] for k in range(3)]


def a_dispatch_mode_around_reads(device: Device) -> Any:
    class Pass(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    x = numbers(device, 3)
    with Pass():
        y = x.exp()
        y.add_(1)
        total = y.sum().item()
        z = torch.zeros(2, device=device) + 1
    return y, total, z


def a_function_mode(device: Device) -> Any:
    with torch.device(device):
        x = torch.ones(3)
        y = torch.arange(3) * 2
    return x.device == torch.ones(1).to(device).device, x, y


def default_dtypes(device: Device) -> Any:
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            found += [
                torch.ones(2, device=device) * 1.5,
                torch.arange(3, device=device) / 2,
                torch.tensor(1.0, device=device),
            ]
        finally:
            torch.set_default_dtype(before)
    return found


def attributes_of_tensors(device: Device) -> Any:
    x = nn.Parameter(numbers(device, 3))
    x.tag = "mine"
    y = x[1:]
    found = (
        x.tag,
        hasattr(y, "tag"),
        x.is_leaf,
        y.is_leaf,
        y._base is x,
        x.grad_fn is None,
        y._is_view(),
        isinstance(x, nn.Parameter),
    )
    return (
        found,
        y.requires_grad,
        x.shape,
        x.numel(),
        x.element_size(),
        x.ndim,
        x.nbytes,
        x.is_floating_point(),
        y._version,
    )


def buffers_that_count(device: Device) -> Any:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.mean.lerp_(x.mean(0), 1 / self.count)
            return x - self.mean

    model = Counted().to(device)
    found = [model(numbers(device, 2, 3) * k) for k in range(3)]
    return found, model.count, model.mean, dict(model.state_dict())


def a_ring_buffer(device: Device) -> Any:
    ring, found = torch.zeros(4, 2, device=device), []
    for k in range(7):
        ring = ring.roll(-1, 0)
        ring[-1] = k
        found.append(ring.mean(0))
        if k % 3 == 0:
            cut(device)
    return ring, found


def a_queue_of_negatives(device: Device) -> Any:
    queue, at = F.normalize(numbers(device, 6, 2) + 1, dim=1), 0
    weight = nn.Parameter(torch.eye(2).to(device))
    for k in range(4):
        keys = F.normalize((numbers(device, 2, 2) + k) @ weight, dim=1)
        logits = keys @ queue.clone().detach().t()
        logits.logsumexp(1).sum().backward()
        with torch.no_grad():
            queue[at : at + 2] = keys
            at = (at + 2) % 6
    return queue, weight.grad


def generation_with_a_cache(device: Device) -> Any:
    table, cache, tokens = numbers(device, 5, 4).sin(), torch.zeros(8, 4, device=device), [1]
    for k in range(6):
        cache[k] = table[tokens[-1]]
        scores = (cache[: k + 1] @ cache[k]).softmax(0) @ cache[: k + 1]
        tokens.append(int((scores @ table.t()).argmax()))
    return tokens, cache


def a_policy_gradient(device: Device) -> Any:
    w = nn.Parameter(torch.zeros(2, 3).to(device))
    opt, actions = torch.optim.Adam([w], lr=0.1), []
    for k in range(4):
        d = torch.distributions.Categorical(logits=(torch.ones(2, device=device) * (k + 1)) @ w)
        action = d.sample()
        actions.append(action.item())
        loss = -d.log_prob(action) * (1.0 if actions[-1] == 1 else -0.5)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return actions, w


def wrong_devices(device: Device) -> Any:
    x = numbers(device, 3)
    return (
        attempt(lambda: x.to("meta").shape),
        x.cpu() + 1,
        attempt(lambda: torch.ones(2, device="nowhere")),
        x.to(device) is x,
    )


def arguments_of_wrong_types(device: Device) -> Any:
    x = numbers(device, 3)
    return [
        attempt(lambda: x + "a"), attempt(lambda: torch.add(x, None)), attempt(lambda: x.view(7)),
        attempt(lambda: x.sum(3)), attempt(lambda: torch.cat([])), attempt(lambda: torch.cat([x, 1])),
        attempt(lambda: x.reshape(2, -1)), attempt(lambda: torch.stack([x, x[:2]])), attempt(lambda: x.expand(2)),
        attempt(lambda: x.permute(1, 0)), attempt(lambda: x.to(torch.float99)), attempt(lambda: x.narrow(0, 2, 5)),
        attempt(lambda: F.linear(x, torch.ones(2, 2, device=x.device))), attempt(lambda: F.conv2d(x, x)),
        attempt(lambda: x.bool() - x.bool()),
    ]  # fmt: skip
