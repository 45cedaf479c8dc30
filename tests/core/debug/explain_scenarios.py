"""Programs that compile more than once, one for each kind of cause, and what must be said of their last compile.

They are written as users write them; `# marks` name the lines that sentences must point to (`line_of`).
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltc_core as ltc
from ltc_core.runtime.devices import context
from ltc_core.settings import settings

__all__ = ["SCENARIOS", "Training", "device", "line_of", "look"]


def line_of(mark: str, file: str = __file__) -> str:
    """Give the place in a file where a comment says `mark`, as a pattern."""
    lines = Path(file).read_text().splitlines()
    (number,) = [k for k, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    return re.escape(f"{Path(file).name}:{number}")


def device() -> torch.device:
    return ltc.lazy_device()


class Net(nn.Module):
    activation = staticmethod(F.gelu)

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, width)  # the first layer
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        x = self.activation(x)  # the activation
        return self.out(x)  # type: ignore[no-any-return]


class Training:
    """Steps of a small net."""

    def __init__(
        self, net: nn.Module | None = None, make: Callable[..., torch.optim.Optimizer] | None = None
    ) -> None:
        self.net = (net or Net()).to(device())
        self.optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.1)))(self.net.parameters())

    def forward(self, size: int = 5) -> Tensor:
        x = torch.ones(size, 8).to(device())
        y = torch.zeros(size, dtype=torch.long).to(device())
        return F.cross_entropy(self.net(x), y)  # the loss

    def step(self, size: int = 5, *, looks: bool = False, clips: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.forward(size)
        if looks:
            loss.item()  # the look
        loss.backward()  # the backward
        if clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)  # the clipping
        self.optimizer.step()  # the optimizer
        ltc.mark_step()  # the end


def first_graph() -> None:
    Training().step()


def new_state() -> None:
    training = Training(make=torch.optim.Adam)
    for _ in range(4):
        training.step()


def gradients() -> None:
    training = Training()
    for _ in range(3):
        training.forward().backward()  # the accumulation
        ltc.mark_step()


def initialisation() -> None:
    with device():
        net = Net()
    training = Training(net, torch.optim.Adam)
    for _ in range(3):
        training.step()


def batch() -> None:
    training = Training()
    for size in (5, 5, 3, 5):
        training.step(size)


def wider() -> None:
    for width in (16, 32):
        Training(Net(width)).step()


def dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        kept = torch.ones(3, dtype=dtype).to(device()) * 2  # the product
        ltc.mark_step()
    assert kept.dtype == torch.bfloat16


def memory_format() -> None:
    for kind in (torch.contiguous_format, torch.channels_last):
        kept = torch.ones(2, 3, 4, 4).to(memory_format=kind).to(device()) * 2
        ltc.mark_step()
    assert kept.shape == (2, 3, 4, 4)


def branch() -> None:
    training = Training()
    for function in (F.gelu, F.relu, F.gelu):
        training.net.activation = function
        training.step()


def structure() -> None:
    x = torch.arange(8.0).to(device())
    for k in (5, 6):
        kept = x.topk(k)  # the topk
        ltc.mark_step()
    assert len(kept.values) == 6


def number_type() -> None:
    x = torch.ones(3).to(device())
    for k in (2.0, 3):
        kept = x * k  # the number
        ltc.mark_step()
    assert kept.tolist() == [3.0] * 3


def operands() -> None:
    a, b = torch.ones(3).to(device()), torch.zeros(3).to(device())
    for k in range(2):
        kept = (a + b) * (a if k else b)  # the operand
        ltc.mark_step()
    assert kept.tolist() == [1.0] * 3


def alive() -> None:
    for keeps in (False, True):
        x = torch.ones(3).to(device())
        y = x * 2  # the kept one
        z = y + 1
        if not keeps:
            del y
        ltc.mark_step()  # the cut
    assert z.tolist() == [3.0] * 3 and y.tolist() == [2.0] * 3


def given_up() -> None:
    for keeps in (False, True):
        x = torch.ones(3).to(device())
        if keeps:
            old = x.clone()
        x.add_(1)  # the write
        ltc.mark_step()
    assert x.tolist() == [2.0] * 3 and old.tolist() == [1.0] * 3


def look() -> None:
    training = Training()
    for looks in (False, False, True, False):
        training.step(looks=looks)


def unused() -> None:
    x = torch.ones(3).to(device())
    for k in range(2):
        if k:
            x.exp()
        kept = x * 2
        ltc.mark_step()
    assert kept.tolist() == [2.0] * 3


def evicted() -> None:
    with settings.override(compilation_cache_size=1):
        for size in (3, 4, 3):
            kept = torch.ones(size).to(device()) * 2
            ltc.mark_step()
    assert kept.tolist() == [2.0] * 3


def other_code() -> None:
    Training().step()
    kept = torch.ones(3).to(device()).cos().sin()  # the other code
    ltc.mark_step()
    assert kept.shape == (3,)


def eager() -> None:
    x = torch.ones(3).to(device())
    y = x * 2  # by itself
    context(0).cut("Eager")  # as LTC_EAGER=1 does
    assert y.tolist() == [2.0] * 3


SCENARIOS: dict[str, tuple[Callable[[], None], int, str]] = {
    # kind: program, its compiles, what the sentence of the last one says
    "first graph": (first_graph, 1, r"nothing was recorded before \(MarkStep at .*{the end} in step\)"),
    "eager": (eager, 1, r"LTC_EAGER=1 runs each op by itself, here aten::mul at .*{by itself} in eager"),
    "new optimizer state": (
        new_state,
        2,
        r"8 values that program \d+ made are read from now on "
        r"\(first aten::_foreach_lerp_ at .*{the optimizer} in step\), as after any first step",
    ),
    "gradients kept": (
        gradients,
        2,
        r"4 values .* read from now on \(first aten::add_ at .*{the accumulation} in gradients, in backward\)",
    ),
    "initialisation": (
        initialisation,
        2,
        r"8 ops of program \d+, first aten::\w+ at .*{the first layer} in __init__, ran only once; "
        r"12 values that it made are read from now on",
    ),
    "shapes of the batch": (
        batch,
        2,
        r"input \d+: float32\[5, 8\] -> \[3, 8\], first read at .* in forward \(and 1 more input\)",
    ),
    "shapes of the model": (wider, 2, r"input \d+: float32\[16, 8\] -> \[32, 8\], first read at .*"),
    "dtypes": (dtypes, 2, r"input 0: float32\[3\] -> bfloat16\[3\], first read at .*{the product} in dtypes"),
    "memory format": (
        memory_format,
        2,
        r"input 0: float32\[2, 3, 4, 4\] with strides \[48, 16, 4, 1\] -> \[48, 1, 12, 3\], first read at .*",
    ),
    "other ops": (
        branch,
        2,
        r"aten::relu at .*{the activation} in forward where program \d+ had "
        r"aten::gelu at .*{the activation} in forward \(and 1 more place\)",
    ),
    "argument": (structure, 2, r"aten::topk at .*{the topk} in structure: k 5 -> 6"),
    "type of a number": (
        number_type,
        2,
        r"aten::mul at .*{the number} in number_type has a number of another type than in program \d+",
    ),
    "other operands": (
        operands,
        2,
        r"aten::mul at .*{the operand} in operands reads other values than in program \d+",
    ),
    "values alive": (
        alive,
        2,
        r"float32\[3\] of aten::mul at .*{the kept one} in alive outlives the cut "
        r"\(MarkStep at .*{the cut} in alive\), unlike in program \d+",
    ),
    "inputs still held": (
        given_up,
        2,
        r"the old input 0 \(float32\[3\], first read at .*{the write} in given_up\) is still held "
        r"at the cut \(MarkStep at .*\), unlike in program \d+",
    ),
    "cut elsewhere": (
        look,
        3,
        r"it is what was left to do after Item at .*{the look} in step: the last \d+ ops of program \d+, "
        r"from aten::ones_like at .*{the backward} in step on",
    ),
    "unused ops": (unused, 2, r"it does what program \d+ did; what differs is used by nothing \(.*\)"),
    "evicted": (evicted, 3, r"program \d+ built this graph and .* LTC_COMPILATION_CACHE_SIZE=1 allows no more"),
    "new code": (
        other_code,
        2,
        r"nothing like its 2 ops was recorded before, the first is aten::cos at .*{the other code} in other_code",
    ),
}  # fmt: skip
