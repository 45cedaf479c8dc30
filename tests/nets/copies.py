"""Programs that copy and write, beside eager: `python -m tests.nets.copies --count 2000` (make test-copies).

A program is a list of lines: views, ops that may copy or alias, writes, masks, gradients, optimizers, state kept by the
user. What all its tensors hold at the end must be what they hold on the CPU: a copy that is not one shows itself by a
later write. Programs run in lockstep, a hundred in a process: their steps are cut together, so the compiler is asked
once for all.
"""

import argparse
import contextlib
import copy
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ltc_core as ltc
from tests.core.beside_eager import Raised, difference, on_cpu
from tests.nets.tiers import TIERS, tier
from tests.seed import seed

__all__ = ["failures", "generate", "main"]

NUM_LINES = 12
BATCH = 100
HANG_S = 1500
_MAX_SHRUNK = 3  # of one batch: each line that is left out is compiled again
_CUT = "cut"
_MOST = 1e6  # a program's values stay below, where arithmetic on whole numbers is exact

Lines = list[str]
Names = dict[str, Any]

_VIEWS = (
    "{x}", "{x}", "{x}.t()", "{x}.view(-1)", "{x}[:2]", "{x}[1:]", "{x}[1:3]", "{x}[0]", "{x}[:, 1:]", "{x}[None]",
    "{x}.unsqueeze(0).squeeze(0)", "{x}.transpose(0, -1)", "{x}.expand(2, *{x}.shape)", "{x}.detach()", "{x}[::2]",
    "{x}.reshape(-1)", "{x}.chunk(2)[1]", "{x}.unbind()[0]", "{x}.view({x}.dtype)", "torch.unsafe_chunk({x}, 2)[0]",
)  # fmt: skip
_COPIES = (
    "{v}.clone()", "F.pad({v}, (0, 0))", "torch.cat([{v}])", "{v}.repeat(*[1] * {v}.dim())",
    "{v}.to({v}.dtype, copy=True)", "{v}.contiguous()", "{v}.contiguous().clone()", "torch.stack([{v}])[0]",
    "torch.empty_like({v}).copy_({v})", "torch.zeros_like({v}).copy_({v})", "{v} + 0", "{v} * 1", "{v}.abs()",
    "{v}.clone().t().clone()", "copy.deepcopy({x})", "torch.where({v} == {v}, {v}, {v})",
    "{v}.masked_fill({v} != {v}, 5)", "{v}.flip(0).flip(0)", "{v}.narrow_copy(0, 0, 1)", "{v}.expand_as({v}).clone()",
    "{v}.index_select(0, torch.arange({v}.shape[0]).to({v}.device))", "-(-{v})",
    "{v}.clone(memory_format=torch.contiguous_format)", "torch.cat([{v}, {v}])[: {v}.shape[0]]", "{v}.roll(0)",
    "{v}.clamp(-99999, 99999)", "{v}.to(torch.float64).to({v}.dtype)", "torch.broadcast_tensors({v}, {v})[0].clone()",
    "torch.nn.Parameter({v}.double(), requires_grad=False).data", "{v}.diagonal().clone()",
    "{v}.view(-1).clone().view({v}.shape)",
)  # fmt: skip
_WRITES = (
    "{v}.add_(100)", "{v}.mul_(2)", "{v}.zero_()", "{v}.fill_(7)", "{v}.copy_({w})", "{v}.neg_()", "{v}.ceil_()",
    "{v}.sub_({w})", "{v}[0] = 3", "{v}[1:].add_(1)", "{v}.t_().t_()", "{v}.masked_fill_({v} > 3, 0)",
    "{v}.lerp_({w}, 0.5)", "{v}.clamp_(max=5)", "{v}.copy_({v}.flip(0))", "{v}.copy_({v}.clone())",
    "{v}[:].copy_({v}.clone())", "{v}.index_fill_(0, torch.tensor([0]).to({v}.device), 4)",
    "torch._foreach_add_([{x}, {y}], 1)", "torch._foreach_copy_([{x}], [{y}])",
    "torch._foreach_mul_([{x}, {y}], [2, 3])", "{x}.data = {y}.clone()", "{x}.set_({y}.clone())",
    "torch.add({v}, 1, out={y})", "{v}[{v} > 2] = 0", "{x}.swapaxes_(0, -1)",
    "{v}.scatter_(0, torch.zeros_like({v}, dtype=torch.int64), 2)", "{v}.bernoulli_(1.0)",
)  # fmt: skip
_MASKS = (
    "({v} > 2)", "({v} == 0)", "({v} != {w})", "({v} > {w}).clone()", "{v}.bool()", "~({v} > 0)",
    "({v} % 2 == 1).flip(0)", "({v} > {v}.amax() - 2)",
)  # fmt: skip
# Writes at indices and where a mask says, and reads at them.
_INDEXED = (
    "{v}[{m}] = 5", "{v}[{m}] = {v}.new_tensor(5)", "{v}.masked_fill_({m}, 4)", "{v}[{i}] = {w}", "{v}[{i}] += 1",
    "{v}.index_add_(0, {i}, {v}[{i}])", "{v}.index_copy_(0, {i}, {v}[{i}] * 2)", "{v}.index_fill_(0, {i}, 6)",
    "{v}[{i}] = {v}[{i}].flip(0)", "{v}.copy_(torch.where({m}, {v} * 2, {w}))", "{v}.mul_({m})",
    "{v}.scatter_(0, {v}.argsort(0, stable=True), {w})", "{v}.index_put_(({i},), {v}[:1].clone(), accumulate=True)",
    "{v}.scatter_reduce_(0, torch.zeros_like({v}, dtype=torch.int64), {v}.clone(), 'amax')", "{v}[{m}] *= 2",
    "{v}[..., -1] = {v}[..., 0]", "{v}[{i}, 0] = 9", "{v}.put_({i}, {v}.view(-1)[:2].clone())",
    "{v}.diagonal().fill_(8)", "{t} = torch.where({m}, {v}, 3)", "{t} = {v}[{i}]",
    "{t} = {v}.gather(0, {v}.argsort(0, stable=True))", "{t} = {v}.masked_fill({m}, 2)",
    "{t} = {v}.index_put(({i},), {v}[:1])", "{t} = {v}.cumsum(0)",
    "{t} = {v}.index_add(0, {i}, {v}[{i}])", "{t} = {v}.scatter(0, torch.zeros_like({v}, dtype=torch.int64), 3)",
    "{t} = {v}.slice_scatter({v}[:1] * 2, 0, 0, 1)", "{t} = {v}.select_scatter({v}[-1], 0, 0)",
    "{t} = {v}.sort(0, stable=True)[0]", "{t} = {v}.amax(-1, keepdim=True) - {v}", "{t} = {v}.sum(0) + {v}",
)  # fmt: skip
_GRADIENTS = (
    "q = ({x}).detach().double().clone().requires_grad_(); z = q * 1", "z = z * 2", "z = z.clone()", "z.add_(1)",
    "z[z > 2] = 0", "z[{i}] = q[:1] * 3", "z.masked_fill_(z < 0, 1)", "z = z.relu()", "z[0] = z[-1] * 2",
    "z.index_add_(0, {i}, z[{i}].clone())", "z = torch.where(z > 1, z * 2, q)", "z = z.index_select(0, {i})",
    "z = z.cummax(0)[0]", "z = z.masked_fill(z == 0, 3)", "z[{i}] *= 2", "z = z[z > -99].view(z.shape)",
    "z = torch.cat([z, z[:1]])[1:]", "z = z.amax(0, keepdim=True) + z", "z = z.abs().clamp(max=9)", "z.mul_(z > 1)",
    "z = F.pad(z, (1, 1))[..., 1:-1]", "z.copy_(z.detach().flip(0))", "z.data.clamp_(max=3)", "z.fill_diagonal_(1)",
    "z.sum().backward(retain_graph=True)", "kept.append(z.detach()); z = z + 0", "z.index_put_(({i},), q[:1] * 2)",
    "(z * z).sum().backward(retain_graph=True); kept.append(q.grad.clone()); q.grad = None",
    "kept.append(torch.autograd.grad((z * z).sum(), q, retain_graph=True)[0])", "z = z.unfold(0, 2, 1).amax(-1)",
)  # fmt: skip
_INDICES = ("[0, 2]", "[1, 0]", "[-1, 0]", "[1]")
_TRAINING = (
    "p = torch.nn.Parameter(({x}).detach().double().clone()); o = torch.optim.SGD([p], 0.5, momentum=0.5, fused=True)",
    "p = torch.nn.Parameter(({x}).detach().double().clone()); o = torch.optim.Adam([p], 0.5, fused=True)",
    "p = torch.nn.Parameter(({x}).detach().double().clone()); o = torch.optim.AdamW([p], 0.5)",
    "p = torch.nn.Parameter(({x}).detach().double().clone()); o = torch.optim.Adagrad([p], 0.5, fused=True)",
    "p = torch.nn.Parameter(({x}).detach().double().clone()); o = torch.optim.Adagrad([p], 0.5, foreach=True)",
    "(p * p).sum().backward(); kept.append(p.grad.clone()); o.step()", "o.zero_grad(set_to_none=False)",
    "(p * p).sum().backward()", "o.step()", "kept.append(p.detach().clone())",
    "kept.extend(t for s in copy.deepcopy(o.state_dict())['state'].values() for t in s.values() if torch.is_tensor(t))",
    "slow = p.detach().clone(); kept.append(slow)", "slow.lerp_(p.detach(), 0.5); p.data.copy_(slow)",
    "torch._foreach_copy_([p.data], [slow])", "best = copy.deepcopy(p.data); kept.append(best)",
    "p.grad.sub_(p.grad.mean())",
)  # fmt: skip

# Kinds of lines: up to which number below one they are drawn, and how their lines begin.
_KINDS = (
    (0.3, _COPIES, "{t} = "), (0.5, _WRITES, ""), (0.55, _MASKS, "{t} = "), (0.7, _INDEXED, ""),
    (0.82, _GRADIENTS, ""), (0.91, _TRAINING, ""),
)  # fmt: skip


def _start(number: int, device: Any) -> Names:
    generator = torch.Generator().manual_seed(number)
    floats = torch.randint(-4, 5, (3, 4), generator=generator).float()
    square = torch.randint(-4, 5, (4, 4), generator=generator).float()
    whole = torch.randint(-4, 5, (3, 4), generator=generator)
    here = [t.to(device) for t in (floats, square, whole)]
    names = {f"t{k}": t for k, t in enumerate(here)}
    return {**names, "kept": [], "torch": torch, "F": F, "copy": copy}


def _held(names: Names) -> list[torch.Tensor]:
    held = [v for k, v in sorted(names.items()) if isinstance(v, torch.Tensor) and k != "_"]
    return [*held, *names["kept"]]


def _line(draw: random.Random, names: Names, count: int) -> str:
    tensors = [k for k in names if k[0] == "t" and k[1:].isdigit()]
    x, y = draw.choice(tensors), draw.choice(tensors)
    view = draw.choice(_VIEWS).format(x=x)
    if draw.random() < 0.3:
        view = draw.choice(_VIEWS).format(x=f"({view})")
    other = draw.choice(_VIEWS).format(x=y)
    found = {"v": f"({view})", "w": f"({other})", "x": x, "y": y, "t": f"t{count}"}
    found["i"] = f"torch.tensor({draw.choice(_INDICES)}).to(t0.device)"
    masks = [k for k in tensors if names[k].dtype is torch.bool]
    is_kept = masks and draw.random() < 0.6
    found["m"] = draw.choice(masks) if is_kept else draw.choice(_MASKS).format(**found)
    kind = draw.random()
    for most, templates, begin in _KINDS:
        if kind < most:
            return (begin + draw.choice(templates)).format(**found)
    if kind < 0.95:
        return f"del {draw.choice(tensors)}" if len(tensors) > 2 else _CUT
    return _CUT


def generate(number: int) -> Lines:
    """The program with a number: lines that run on the CPU, about a third of them after a cut."""
    draw = random.Random(number)
    names = _start(number, "cpu")
    lines: Lines = []
    count = len(names)
    with _refusing(), _Defined():  # type: ignore[no-untyped-call]
        while len(lines) < NUM_LINES:
            line = _line(draw, names, count)
            count += 1
            try:
                _run(line, names)
                if any(_is_large(t) for t in _held(names)):
                    raise ArithmeticError
            except Exception:  # eager refuses the line
                names = _start(number, "cpu")
                for earlier in lines:
                    _run(earlier, names)
                continue
            lines.append(line)
            if draw.random() < 0.2:
                lines.append(_CUT)
    return lines


class _Defined(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse an op that reads a part of what it writes: eager does not define whether it reads old or new values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        by_name.update(kwargs or {})
        written: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [
                t for t in tree_leaves(by_name.get(argument.name)) if isinstance(t, torch.Tensor)
            ]
            (written if is_written else read).extend(tensors)
        if any(_is_part(w, other) for w in written for other in [*read, *written]):
            raise ArithmeticError
        return func(*args, **(kwargs or {}))


def _is_part(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share some of their elements, and not each at the same place."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not a.numel() or not b.numel():
        return False
    elements = torch.arange(a.untyped_storage().nbytes() // a.element_size())
    of_a, of_b = (elements.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    return not torch.equal(of_a, of_b) and bool(torch.isin(of_a, of_b).any())


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise what PyTorch warns of: out= that resizes, a deprecated use whose layout in memory is eager's own."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "An output with one or more elements was resized")
            warnings.filterwarnings("error", "Use of .* on expanded tensors is deprecated")
            yield
    finally:
        torch.set_warn_always(always)


def _is_large(t: torch.Tensor) -> bool:
    return t.numel() > 0 and t.dtype is not torch.bool and not bool((t.abs() <= _MOST).all())


def _run(line: str, names: Names) -> None:
    if line != _CUT:
        exec(line, names)


def _steps(number: int, lines: Lines, device: Any) -> Iterator[list[torch.Tensor] | None]:
    names = _start(number, device)
    yield None
    for line in lines:
        if line == _CUT:
            yield None
        _run(line, names)
    yield None
    yield _held(names)


def _outcomes(programs: dict[int, Lines], device: Any) -> dict[int, Any]:
    running = {number: _steps(number, lines, device) for number, lines in programs.items()}
    found: dict[int, Any] = {}
    while running:
        for number, steps in list(running.items()):
            try:
                result = next(steps)
            except Exception as error:
                result = Raised(error)  # type: ignore[assignment]
            if result is not None:
                found[number] = result
                del running[number]
        ltc.mark_step(wait=True)
    return found


def failures(numbers: Sequence[int], name: str) -> dict[int, str]:
    """What differs from eager in a tier: number of the program -> what, in words."""
    return _compare({number: generate(number) for number in numbers}, name)


def _compare(programs: dict[int, Lines], name: str) -> dict[int, str]:
    expected = _outcomes(programs, "cpu")
    with tier(name):
        got = _outcomes(programs, ltc.lazy_device())
        return {n: what for n in programs if (what := _difference(got[n], expected[n]))}


def _difference(got: Any, expected: Any) -> str:
    # The values of a program are finite: it was drawn so.
    given = on_cpu(got), on_cpu(expected)
    return difference(*given, rtol=1e-5, atol=1e-6, errors="class", equal_nan=False)


def _shrunk(number: int, name: str) -> Lines:
    """The program without the lines that it differs without; unchanged if it does not differ by itself."""
    kept = generate(number)

    def differs(lines: Lines) -> bool:
        try:
            return bool(_compare({number: lines}, name))
        except Exception:  # the CPU refuses it
            return False

    for line in reversed(range(len(kept))):
        rest = kept[:line] + kept[line + 1 :]
        if differs(rest):
            kept = rest
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=seed())
    parser.add_argument("--tier", choices=TIERS, default="compiled")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument(
        "--first", type=int, help="run one batch in this process, from this program on"
    )
    options = parser.parse_args(argv)
    if options.first is not None:
        found = failures(range(options.first, options.first + options.count), options.tier)
        for k, (number, what) in enumerate(found.items()):
            lines = _shrunk(number, options.tier) if k < _MAX_SHRUNK else generate(number)
            print(f"program {number}: {what}", *lines, sep="\n  ", flush=True)
        return bool(found)
    start = options.seed * 1_000_000
    print(f"{options.count} programs, seed {options.seed}, {options.tier}", flush=True)
    failed = 0
    for first in range(start, start + options.count, options.batch):
        count = min(options.batch, start + options.count - first)
        command = [sys.executable, "-m", "tests.nets.copies", "--first", str(first)]
        command += ["--count", str(count), "--tier", options.tier]
        try:
            failed += subprocess.run(command, timeout=HANG_S).returncode != 0
        except subprocess.TimeoutExpired:
            failed += 1
            print(f"programs from {first} on hang", flush=True)
    print(f"{failed} batches with differences", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
