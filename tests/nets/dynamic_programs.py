"""Random programs of changing sizes beside eager: `python -m tests.nets.dynamic_programs --count 1000`.

The lines are those of `random_programs`, with the names of sizes in shapes, slices, factories and branches. A program
runs for a dozen assignments of its sizes, some of them again, on one device that starts without a trace; each run must
be as eager. The recorder and the replay setting go by the number of the program. What differs is shrunk.
"""

import argparse
import contextlib
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence

import ltc_core as ltc
from ltc_core.record import fast_path
from ltc_core.runtime import devices
from ltc_core.settings import settings
from tests.nets import random_programs
from tests.nets.random_programs import Lines, check, parser_of, shrunk, supervise
from tests.nets.statements import STATEMENTS, Draw, Shape

__all__ = ["assignments", "check_sizes", "generate", "main"]

NUM_LINES = 10
NUM_RUNS = 12
SIZES = ("a", "b", "c")
_BASE = "a, b, c, k = 3, 4, 2, 0"


class _Name(str):
    """A size by its name."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class SizedDraw(Draw):
    """Shapes with names of sizes in them."""

    def shape(self) -> Shape:
        items = (*map(_Name, SIZES), _Name("a"), _Name("b"), _Name("a + 1"), 1, 2, 3)
        return [self.rng.choice(items) for _ in range(self.rng.choice((0, 1, 1, 2, 2, 2, 3, 3)))]  # type: ignore[misc]


VIEWS = (
    "{t}[:{s}]", "{t}[{s}:]", "{t}[..., :{s}]", "{t}[..., -{s}:]", "{t}.view({s}, -1)", "{t}.reshape(-1, {s})",
    "{t}.narrow(0, 0, {s})", "{t}.expand({s}, *{t}.shape)", "{t}[{s} - 1]", "{t}[..., {s} - 1]", "{t}[:, {s}:]",
    "{t}.split({s})[-1]", "{t}.unbind()[-1]", "{t}[::{s}]", "{t}.unsqueeze(0).expand({s}, *{t}.shape)",
    "{t}.flatten()[{s}:]", "{t}.as_strided(({s},), (0,))",
    "{t}.as_strided({t}.shape, {t}.stride())", "{t}.chunk({s})[0]",
    "{t}.unfold(0, {s}, 1)", "{t}.view({t}.shape[::-1])", "{t}.tensor_split({s})[0]", "{t}.unflatten(0, ({s}, -1))",
    "{t}.diagonal({s} - 2)", "{t}.select(-1, -{s})",
)  # fmt: skip
VALUES = (
    "{t}.roll({s}, 0)", "F.pad({t}, (0, {s}))", "{t}.repeat({s}, *[1] * {t}.dim())", "{t} / {s}", "{t} * {s}",
    "{t}.new_zeros({s}, 2)", "{t}.new_ones({t}.shape)", "{t} + torch.arange({s}, device={t}.device)[:1]",
    "torch.cat([{t}, {t}[:{s}]])", "torch.stack([{t}] * {s})", "torch.cat([{t}] * {s})", "{t}.tril({s} - 2)",
    "{t}.repeat_interleave({s}, 0)", "torch.full(({s}, 2), {s}, device={t}.device)", "{t}.sum() / {s}",
    "torch.eye({s}, device={t}.device)", "torch.zeros({s}, {s}, device={t}.device).triu(1) + {t}.sum()",
    "torch.linspace(0, 1, {s}, device={t}.device)", "torch.empty({s}, 2, device={t}.device).fill_({n})",
    "{t}.new_empty({s}).copy_({t}.sum())", "torch.empty_like({t}).copy_({t})", "{t}.topk({s})[0]",
    "torch.arange({s}, device={t}.device)", "{t}[torch.arange({s}, device={t}.device)]",
    "{t}.flatten().unfold(0, 2, {s})",
    "torch.cat([{t}.flatten(), torch.ones({s}, device={t}.device)])", "{t}.pow({s})", "{t}.clamp(max={s})",
    "F.one_hot(torch.arange({s}, device={t}.device))", "{t}.sum(list(range({s}))[:{t}.dim()])",
    "{t}.mean(-1, keepdim=True)",
    "F.interpolate({t}[None, None].float().flatten(2), size={s} + 1)",
    "F.adaptive_avg_pool1d({t}.float().reshape(1, 1, -1), {s})",
    "{t}.reshape({t}.shape[0], -1).float() @ torch.ones({t}[0].numel(), {s}, device={t}.device)",
    "F.layer_norm({t}.float(), {t}.shape)", "{t}.index_select(0, torch.arange({s}, device={t}.device))",
    "{t} if {s} > 2 else {t} * 2", "{t}.sum(0) if {s} == 1 else {t}.t()", "{t}.kthvalue({s})[0]", "{t}.tile({s})",
    "{t}.mT @ {t}", "{t}.cumsum(-1)[..., -{s}:]", "{t}.view(-1).view({t}.shape)", "{t}.movedim(0, -1).contiguous()",
)  # fmt: skip
WRITES = (
    "{t}[:{s}].add_(1)", "{t}[{s}:] = {n}", "{t}[{s} - 1].mul_(2)", "{t}[..., :{s}] = {n}",
    "{t}.view(-1)[{s}:].fill_({n})",
    "{t}[:{s}] = {t}[-{s}:].clone()", "{t}.fill_({s})", "{t}.add_({s})", "{t}.narrow(0, 0, {s}).zero_()",
    "{t}.expand({s}, *{t}.shape)", "{t}.flatten()[:{s}].copy_({t}.flatten()[-{s}:])",
    "{t}.t_()", "{t}[torch.arange({s}, device={t}.device)] = {n}",
    "{t}.index_fill_(0, torch.arange({s}, device={t}.device), {n})", "{t}.unsqueeze_(0)", "{t}.squeeze_()",
    "{t}.scatter_(0, torch.zeros({t}.shape, dtype=torch.long, device={t}.device), {s})", "{t}.diagonal().add_({s})",
    "[u.add_({n}) for u in {t}.unbind()]", "[u.mul_({n}) for u in {t}.split({s})]",
    "{t}.masked_fill_({t} > {s}, {n})",
    "{t}.data = {t}.new_zeros({s}, 2)", "{t}[:, :{s}] += 1", "{t}[{s}:].copy_({t}[:{t}.shape[0] - {s}].clone())",
    "{t}.set_({t}.clone())", "{t}.resize_({t}.shape[::-1])", "torch._foreach_mul_([{t}, {t}.clone()], {s})",
    "torch.cat([{t}, {t}], out={t}.new_empty(0))", "torch.add({t}, {s}, out={t}[:])",
    "{t}.copy_({t}.new_ones({s}, 1))",
)  # fmt: skip
CONTROL = (
    "if {s} > 3: cut()", "if k % 3 == 1: cut()", "if k % 2: {w}", "if {s} == 1: {w}",
    "for _ in range({s}): {w}", "cut()",
    "if {s} > 2: {w}", "out.append(({t}.shape, {t}.dtype))",
    "out.append(({t}.numel(), {t}.requires_grad))",
)  # fmt: skip


def _filled(draw: Draw, templates: Sequence[str]) -> tuple[str, str] | None:
    name = draw.any()
    if not name:
        return None
    values = {"t": name, "s": draw.rng.choice(SIZES), "n": draw.number(), "w": f"{name}.add_(1)"}
    if draw.rng.random() < 0.5:
        values["w"] = draw.rng.choice(WRITES).format(**values)
    return draw.rng.choice(templates).format(**values), name


def _value(templates: Sequence[str]) -> Callable[[Draw], str | None]:
    def make(draw: Draw) -> str | None:
        found = _filled(draw, templates)
        return None if found is None else draw.to(found[1], found[0])

    return make


def _plain(templates: Sequence[str]) -> Callable[[Draw], str | None]:
    def make(draw: Draw) -> str | None:
        found = _filled(draw, templates)
        if found is None or (
            draw.rng.random() < 0.2 and not found[0].startswith(("if", "for", "out"))
        ):
            return found and f"with torch.no_grad(): {found[0]}"
        return found[0]

    return make


SIZED = ((_value(VIEWS), 8.0), (_value(VALUES), 8.0), (_plain(WRITES), 5.0), (_plain(CONTROL), 3.0))


def generate(number: int, num_lines: int = NUM_LINES) -> Lines:
    """The program of a number: lines that run for the first assignment of sizes, and may fail for others."""
    statements = (STATEMENTS[0], *SIZED, *((maker, weight / 2) for maker, weight in STATEMENTS[1:]))
    draw = SizedDraw(random.Random(number), 1)
    return random_programs.drawn(draw, statements, num_lines, [_BASE])


def assignments(number: int) -> Lines:
    """The lines that give the sizes their numbers, one for each run."""
    rng = random.Random(f"sizes {number}")
    span = rng.choice(
        ([0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6], [1, 2, 3, 4], [3, 4, 5, 6, 7, 8, 9])
    )
    free = rng.choice((1, 2, 3))  # how many of the sizes vary
    found: list[tuple[int, ...]] = []
    for _ in range(NUM_RUNS):
        if len(found) > 3 and rng.random() < 0.3:
            found.append(rng.choice(found))
            continue
        sizes = [rng.choice(span) for _ in range(free)] + [4, 2][free - 1 :]
        if rng.random() < 0.15:
            sizes = [sizes[0]] * 3
        found.append(tuple(sizes))
    return [f"a, b, c, k = {a}, {b}, {c}, {k}" for k, (a, b, c) in enumerate(found)]


@contextlib.contextmanager
def mode(number: int) -> Iterator[None]:
    """The recorder and the replay setting of a program."""
    is_fast = number % 4 != 3
    before = fast_path.enable(is_fast)
    try:
        with settings.override(replay=("auto", "always", "never")[number % 3]):
            yield
    finally:
        fast_path.enable(before)


def forget() -> None:
    device = devices.context(0)
    with contextlib.suppress(Exception):
        ltc.mark_step(wait=True)
    with contextlib.suppress(Exception):
        ltc.wait_device_ops()
    device.trace.forget()
    device.compiler.forget()


def check_sizes(lines: Lines, heads: Lines, number: int) -> str:
    """How a program differs from eager for one of the assignments; "" if it does not."""
    with mode(number):
        forget()
        for head in heads:
            try:
                what = check([head, *lines], 1, 1)
            except Exception:
                with contextlib.suppress(Exception):
                    ltc.wait_device_ops()
                what = f"the check fails\n{traceback.format_exc()}"
            if what:
                return f"{head}: {what}"
    return ""


def script(lines: Lines, heads: Lines, number: int) -> str:
    text, items = "\n".join(lines), "".join(f"    {head!r},\n" for head in heads)
    return f'''
from tests.nets.dynamic_programs import check_sizes

LINES = """
{text}
""".strip().splitlines()
HEADS = [
{items}]

print(check_sizes(LINES, HEADS, {number}) or "as eager")
'''


def report(number: int, lines: Lines, heads: Lines, what: str) -> None:
    def fails(some: Lines, of: Lines) -> bool:
        return bool(some) and bool(check_sizes(some, of, number))

    if fails(lines, heads):
        at = next((k for k in range(1, len(heads)) if fails(lines, heads[:k])), len(heads))
        heads = heads[:at]
        lines = shrunk(lines, lambda some: fails(some, heads))
        heads = shrunk(heads, lambda some: fails(lines, some))
        what = check_sizes(lines, heads, number) or what
    print(f"program {number}: {what}\n{script(lines, heads, number)}", flush=True)


# -- the command -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    args = parser_of("dynamic_programs", __doc__, count=1000, lines=NUM_LINES).parse_args(argv)
    if args.child:
        return _work(args, *args.child)
    command = [
        sys.executable, "-m", "tests.nets.dynamic_programs", "--lines", str(args.lines), "--child",
    ]  # fmt: skip
    environment = {
        "LTC_CHECK_GRAPHS": "1",
        **os.environ,
        "LTC_NUM_DEVICES": "1",
        "LTC_COMPILE": "off",
    }
    return supervise(args, command, environment, lambda number: _named(number, args.lines))


def _named(number: int, num_lines: int) -> str:
    return "\n".join([*generate(number, num_lines), "", *assignments(number)])


def _work(args: argparse.Namespace, start: int, end: int) -> int:
    warnings.simplefilter("ignore")
    for number in range(start, end):
        print(f"@{number}", flush=True)
        lines, heads = generate(number, args.lines), assignments(number)
        what = check_sizes(lines, heads, number)
        with settings.override(dynamic_shapes="never"):
            is_other = bool(what) and bool(check_sizes(lines, heads, number))
        if is_other:  # not for the sizes: `random_programs` looks for those
            print(f"{number} differs with a way for each size, too", flush=True)
        elif what:
            report(number, lines, heads, what)
    return 0


if __name__ == "__main__":
    sys.exit(main())
