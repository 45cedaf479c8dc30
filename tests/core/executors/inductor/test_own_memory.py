"""Outputs of compiled code have memory of their own: a copy stays a copy, whatever is overwritten later.

Each program is a generator that yields where a step ends. All programs run in lockstep in one process, so a step of all
of them is one graph and one compile; each gives what it gives on the CPU.
"""

from pathlib import Path

import pytest
import torch

from ltc_core.executors.inductor.lowering.own_memory_lowering import AliasingError, check_outputs
from ltc_core.graph.ir import TensorMeta
from tests.compiled_cache import empty_cache
from tests.core import child

SCRIPT = """
import copy
import torch.nn.functional as F


def base(device):
    return torch.arange(12.0).view(3, 4).to(device)


def pair(copied):
    def program(device):
        p = base(device)
        yield
        w = (p * 2).t()
        a, b = copied(w), copied(w)
        del w
        yield
        b.add_(100)
        yield a, b

    return program


def overwritten(copied):
    def program(device):
        p = base(device)
        yield
        first = copied(p)
        p.mul_(2)
        yield
        yield first, p

    return program


def row(p):
    h = p[:2].clone()
    return h[0].clone()


def lists(device):
    sources, fresh = [base(device), base(device) + 1], [base(device) * 0, base(device) * 0]
    yield
    kept = [torch.zeros(3, 4, device=device) for _ in sources]
    torch._foreach_copy_(fresh, sources)
    torch._foreach_copy_(kept, sources)
    yield
    torch._foreach_mul_(sources, 3.0)
    yield *sources, *fresh, *kept


def whole_numbers(device):
    b, c = torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([0, 100]).to(device)
    yield
    b.copy_(c)
    c.add_(1)
    b.ceil_()
    yield
    yield b, c


def flipped(device):
    b, c = torch.zeros(12, device=device), torch.arange(12.0).to(device)
    yield
    b.copy_(c)
    c.copy_(c.flip(0))
    b.view(3, 4)[:].copy_(b.view(3, 4).clone())
    yield
    yield b, c


def swapped(device):
    b, c = torch.arange(9.0).view(3, 3).to(device), torch.arange(9.0, 18).view(3, 3).to(device)
    yield
    t = b.clone()
    b.copy_(c.t())
    c.copy_(t.t())
    yield
    yield b, c


def moved(device):
    # elements that change their places in one tensor, through views of it
    tensors = [torch.arange(16.0).view(4, 4).to(device) for _ in range(5)]
    a, b, c, d, e = tensors
    yield
    a.view(-1).copy_(a.view(-1).flip(0))
    b.t().copy_(b.t().flip(0))
    c.reshape(-1).copy_(c.reshape(-1).roll(1))
    d.view(-1)[1:].copy_(d.view(-1)[:-1] + 1)
    e[None].copy_((e[None] * 2).flip(1).transpose(1, 2))
    yield
    yield tensors


def written_twice(device):
    # memory that is written, read at other places, and written again
    tensors = [torch.arange(16.0).view(4, 4).to(device) for _ in range(5)]
    a, b, c, d, e = tensors
    first = torch.tensor([0]).to(device)
    yield
    a.index_fill_(0, first, 4)
    a.view(-1).copy_(a.view(-1).flip(0))
    b[first] = 4
    b.copy_(b.flip(0))
    c.index_add_(0, first, c[1:2] * 2)
    c.copy_(c.flip(1))
    d[1:3] = d[0] * 2
    d[0:3] = d.flip(0)[0:3].clone()
    e[first] = 4
    f = e.flip(0)
    e.copy_(e.roll(1, 0))
    yield
    yield *tensors, f


def written_by_masks(device):
    # memory that is written at indices, and then where a mask of it says
    x, first = torch.arange(16.0).view(4, 4).to(device), torch.tensor([0, 2]).to(device)
    yield
    a, b, c = x * 1, x * 2, x * 3
    a[first] = x[:2] * 3
    large = a > 9
    a[large] = 0
    b[1:3].index_add_(0, first // 2, x[:2])
    odd = b % 2 == 1
    b[odd] = -1
    c.index_copy_(0, first, x[1:3])
    many = c > 9
    c.masked_fill_(many, 0)
    c[first] += 1
    yield
    yield a, (a * 2).masked_fill(large, 7), b, b.masked_fill(odd, 7), c, many


def sums_at_indices_of_a_part(device):
    x, i = torch.arange(16.0).view(4, 4).to(device), torch.tensor([1]).to(device)
    yield
    part = x[1:, 1:]
    sums = part.index_add(0, i, part[i])
    yield
    yield x, sums, x[:, 1:3].index_copy(0, i, x[i, 2:4]), x


def trained(make, **options):
    def program(device):
        p = torch.nn.Parameter(base(device))
        optimizer = make([p], fused=True, **options)
        seen = []
        for _ in range(3):
            (p**2).sum().backward()
            saved, state = p.grad.clone(), copy.deepcopy(optimizer.state_dict())
            optimizer.step()
            yield
            optimizer.zero_grad(set_to_none=False)
            yield
            seen += [saved, *(t for s in state["state"].values() for t in s.values() if torch.is_tensor(t))]
        yield *seen, p.detach()

    return program


def between_parts(device):
    p = base(device)
    yield
    w = (p * 2).t()
    a, b = w.clone(), w.clone()
    del w
    a.bernoulli_(1.0)  # draws run op by op, between compiled parts
    c = b + 1
    yield
    yield a, b, c


def complexes(device):
    p = torch.view_as_complex(torch.arange(12.0).view(3, 2, 2)).to(device)
    yield
    w = p * 2
    a, b, c = w.clone(), w.t().clone(), w.clone()
    del w
    yield
    b.add_(1)
    c.mul_(3)
    yield a, b, c


PROGRAMS = {
    **{
        name: pair(copied)
        for name, copied in {
            "clone": lambda w: w.clone(),
            "pad": lambda w: F.pad(w, (0, 0)),
            "cat": lambda w: torch.cat([w]),
            "repeat": lambda w: w.repeat(1, 1),
            "to": lambda w: w.to(torch.float32, copy=True),
            "channels last": lambda w: w[None, None].clone(memory_format=torch.channels_last),
            "head": lambda w: w[:2].clone(),
            "tail": lambda w: w[2:].clone(),
            "middle": lambda w: w[1:3].clone(),
            "average": lambda w: w.lerp(w, 0.5),
        }.items()
    },
    **{
        name: overwritten(copied)
        for name, copied in {
            "row": row,
            "turned": lambda p: p.t().clone().t().clone(),
            "viewed": lambda p: p.view(12).clone().view(3, 4).clone(),
            "squeezed": lambda p: p.unsqueeze(0).clone().squeeze(0).clone(),
        }.items()
    },
    "lists": lists,
    "whole numbers": whole_numbers,
    "flipped": flipped,
    "swapped": swapped,
    "moved": moved,
    "written twice": written_twice,
    "written by masks": written_by_masks,
    "sums at indices of a part": sums_at_indices_of_a_part,
    "sgd": trained(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": trained(torch.optim.Adam),
    "adamw": trained(torch.optim.AdamW),
    "adagrad": trained(torch.optim.Adagrad),
    "between parts": between_parts,
    "complexes": complexes,
}


def outcomes(device):
    running = {name: program(device) for name, program in PROGRAMS.items()}
    found = {}
    while running:
        for name, program in list(running.items()):
            result = next(program)
            if result is not None:
                found[name] = result
                del running[name]
        ltc.mark_step(wait=True)
    return {name: [t.detach().cpu() for t in result] for name, result in found.items()}


expected = outcomes("cpu")
found = outcomes(ltc.lazy_device())
for name, wanted in expected.items():
    for k, (got, right) in enumerate(zip(found[name], wanted, strict=True)):
        if not torch.allclose(got, right, 1e-5):
            print(f"{name}: tensor {k} is {got.tolist()}, eager's {right.tolist()}")
print(len(found), "programs,", ltc.metrics.counter_value("CompiledProgram"), "compiled")
"""


@pytest.mark.timeout(300)
def test_copies_stay_copies(tmp_path: Path) -> None:
    settings = {"LTC_COMPILE": "sync", "LTC_COMPILED_CACHE_DIR": empty_cache(tmp_path / "compiled")}
    out, err = child.run(SCRIPT, timeout_s=280, **settings)
    assert err == ""
    *wrong, last = out.splitlines()
    assert not wrong, "\n".join(wrong)
    count, _, compiled, _ = last.split()
    assert int(count) == 28 and int(compiled) >= 5


class _Output:
    """An output of the compiler's graph."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, size: int = 3) -> None:
        self.get_name = lambda: name
        self.get_dtype = lambda: dtype
        self.get_size = lambda: [size]


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ([_Output("buf0"), _Output("buf1")], ""),
        ([_Output("buf0"), _Output("arg0")], "output 1 is the memory of input arg0"),
        ([_Output("buf0"), _Output("buf0")], "output 1 is the memory of output 0"),
        ([_Output("buf0"), _Output("buf1", torch.float64)], "output 1 is torch.float64"),
        ([_Output("buf0"), _Output("buf1", size=4)], "not float32"),
    ],
)
def test_shared_memory_is_refused_when_it_is_built(outputs: list[_Output], problem: str) -> None:
    metas = [TensorMeta.packed((3,), torch.float32)] * 2
    if not problem:
        check_outputs(outputs, {"arg0"}, metas)
        return
    with pytest.raises(AliasingError, match=problem):
        check_outputs(outputs, {"arg0"}, metas)
