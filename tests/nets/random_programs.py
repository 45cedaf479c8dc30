"""Random programs beside eager: `python -m tests.nets.random_programs --count 10000` (make test-random).

A program is a list of lines drawn by `statements`, found again by its number. It runs once on the CPU and four times
on the lazy devices; what each line raises, what it asks and what all tensors hold at the end must be the same. What
differs is shrunk line by line and printed as a script. The programs run in a child process, so that one that ends its
process, or hangs, is found and named too.
"""

import argparse
import contextlib
import copy
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ltc_core as ltc
from tests.core.beside_eager import ATOL, ROUNDS, RTOL, Raised, attempt, difference
from tests.nets.statements import MOST_ELEMENTS, STATEMENTS, Draw, Maker
from tests.nets.tiers import TIERS, tier
from tests.seed import seed

__all__ = ["check", "drawn", "generate", "main", "shrunk", "supervise"]

NUM_LINES = 14
HANG_S = 120
# Operands that overlap are values to the device, which computes what copies of them give.
_OVERLAP = (
    "some elements of the input tensor and the written-to tensor refer to a single memory location"
)
# Views are values too: one that memory of these strides cannot have is what reshape gives.
_NO_VIEW = "view size is not compatible with input tensor's size and stride"
# What PyTorch says where a gradient comes to a tensor of integers; whether it does depends on who asks first.
_NO_GRADIENT = re.compile(
    "Autograd not support dtype|only Tensors of floating point dtype can require gradients"
)
# The device's own refusal.
_GROWTH = "resize_ would grow memory that other tensors share"
# A program ends before one of its tensors is larger.
_MOST = 4 * MOST_ELEMENTS

Lines = list[str]


def make(shape: Sequence[int], dtype: torch.dtype, number: int) -> torch.Tensor:
    """Small whole numbers, so that most arithmetic is exact."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def safe(t: torch.Tensor) -> torch.Tensor:
    """Values that every dtype has."""
    return t.nan_to_num(0, 0, 0).clamp(-99, 99) if t.is_floating_point() else t


def _namespace(devices: Sequence[torch.device], cut: Callable[[], object]) -> dict[str, Any]:
    return {
        "torch": torch, "F": F, "copy": copy, "checkpoint": checkpoint, "make": make, "safe": safe,
        "d": list(devices), "cut": cut, "out": [],
    }  # fmt: skip


# -- making ------------------------------------------------------------------------------------------


def generate(number: int, num_devices: int = 2, num_lines: int = NUM_LINES) -> Lines:
    """The program of a number. It runs in eager while it is made, so that lines fit what is there."""
    return drawn(Draw(random.Random(number), num_devices), STATEMENTS, num_lines, [])


def drawn(
    draw: Draw, statements: Sequence[tuple[Maker, float]], num_lines: int, first: Lines
) -> Lines:
    """So many lines after the first ones, of these statements."""
    names = _namespace([torch.device("cpu")] * draw.num_devices, lambda: None)
    makers, weights = zip(*statements, strict=True)
    lines: Lines = []
    torch.manual_seed(0)
    for line in first:
        exec(_code(line), names)
    while len(lines) < num_lines:
        maker = makers[0] if len(lines) < 2 else draw.rng.choices(makers, weights)[0]
        line = maker(draw)
        if line is None:
            continue
        if _reads_what_it_writes(line, names):
            continue
        shapes = {name: t.shape for name, t in names.items() if isinstance(t, torch.Tensor)}
        error = _step(line, names)
        if "out=" in line and not _is_defined(line, shapes, names):
            break
        if error is not None and "# values" in line:
            continue
        if isinstance(error, (NameError, AttributeError, SyntaxError)):
            continue
        if any(isinstance(t, torch.Tensor) and t.numel() > _MOST for t in names.values()):
            break
        lines.append(line)
        draw.tensors = {
            name: t
            for name, t in names.items()
            if isinstance(t, torch.Tensor) and t.numel() <= MOST_ELEMENTS and not t.is_complex()
        }
    return lines


def _is_defined(line: str, shapes: dict[str, torch.Size], names: dict[str, Any]) -> bool:
    """Whether `out=` gives what the operands alone decide.

    What eager reads, and resizes or multiplies into, it overwrites before it has read it. A resized tensor is packed on
    the device, and has the strides of the operands in eager.
    """
    read = re.findall(r"\bt\d+\b", line[: line.index("out=")])
    written = re.findall(r"\bt\d+\b", line[line.index("out=") :])
    for name in written:
        if name not in names or ("matmul" not in line and names[name].shape == shapes[name]):
            continue
        if not names[name].is_contiguous():
            return False
        if any(_lie_together(names[name], names[other]) for other in read if other in names):
            return False
    return True


def _reads_what_it_writes(line: str, names: dict[str, Any]) -> bool:
    """Whether an op in place reads another part of what it writes, of which eager only refuses some."""
    found = re.match(r"(t\d+)\.[a-z]\w*_\((.*)", line)
    if found is None:
        return False
    written = names[found[1]]
    operands = [names[name] for name in re.findall(r"\bt\d+\b", found[2])]
    return any(
        _lie_together(written, t) and (t.shape, t.stride()) != (written.shape, written.stride())
        for t in operands
    )


def _lie_together(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _step(line: str, names: dict[str, Any]) -> Exception | None:
    try:
        exec(_code(line), names)
    except Exception as error:
        return error
    return None


_codes: dict[str, Any] = {}


def _code(line: str) -> Any:
    if line not in _codes:
        if len(_codes) > 10_000:
            _codes.clear()
        _codes[line] = compile(line, "<program>", "exec")
    return _codes[line]


# -- running -----------------------------------------------------------------------------------------


def outcome(lines: Lines, devices: Sequence[torch.device]) -> tuple[list[Any], dict[str, Any]]:
    """What each line raised and asked, then what all tensors hold."""
    events, names = _run(lines, devices)
    events += names["out"]
    held: dict[str, Any] = {}
    for name in sorted(names):
        t = names[name]
        if isinstance(t, torch.Tensor):
            held[name] = attempt(lambda t=t: t)  # type: ignore[misc]
            held[f"{name}.grad"] = attempt(lambda t=t: t.grad if t.is_leaf else None)  # type: ignore[misc]
    return events, held


def _run(lines: Lines, devices: Sequence[torch.device]) -> tuple[list[Any], dict[str, Any]]:
    """What each line raised, and all names at the end."""
    cut = (lambda: None) if devices[0].type == "cpu" else ltc.mark_step
    names = _namespace(devices, cut)
    events: list[Any] = []
    torch.manual_seed(0)
    for line in lines:
        error = _step(line, names)
        events.append(None if error is None else Raised(error))
    return events, names


def check(lines: Lines, num_devices: int = 2, rounds: int = ROUNDS) -> str:
    """How a program differs from eager, in words; "" if it does not.

    A kernel's own refusal comes when the kernel runs: a line that raises in eager may raise at the sync after it. The
    rest of the program is then compared without that line.
    """
    while True:
        late, what = _compare(lines, num_devices, rounds)
        if late is None:
            return what
        what = _told_late(lines[: late + 1], num_devices)
        if what:
            return what
        lines = lines[:late] + lines[late + 1 :]


def _has_no_gradient(*outcomes: Any) -> bool:
    return any(isinstance(o, Raised) and bool(_NO_GRADIENT.search(o.text)) for o in outcomes)


def _is_apart(line: str, got: Any, wanted: Any) -> bool:
    """Whether a line that eager or the device refuses is looked at by itself: what it leaves is not what eager leaves.

    The device writes nothing then, where eager may have written some of several operands.
    """
    if _has_no_gradient(got, wanted):
        return True
    if isinstance(wanted, Raised):
        return got is None or "_foreach_" in line or "out=" in line
    return isinstance(got, Raised) and _GROWTH in got.text


def _told_late(lines: Lines, num_devices: int) -> str:
    """How what a last line raises at the sync after it differs from what eager raises at once."""
    cpu = [torch.device("cpu")] * num_devices
    lazy = [ltc.lazy_device(index) for index in range(num_devices)]
    expected = outcome(lines, cpu)[0][len(lines) - 1]
    events, names = _run(lines, lazy)
    got = events[-1] or attempt(lambda: ltc.mark_step(wait=True))
    del names
    attempt(ltc.wait_device_ops)
    if isinstance(got, Raised) and _GROWTH in got.text:
        return ""
    if _has_no_gradient(got, expected):
        return ""
    if expected is None:
        return f"{lines[-1]}: the device raises {got!r}"
    if got is None and _NO_VIEW in expected.text:
        return ""
    if got is None and _OVERLAP in expected.text and "_foreach_" not in lines[-1]:
        return ""
    what = _difference(got, expected)
    return what and f"{lines[-1]}, and a sync: {what}"


def _difference(got: Any, expected: Any) -> str:
    return difference(got, expected, RTOL, ATOL, strides=True)


def _compare(lines: Lines, num_devices: int, rounds: int) -> tuple[int | None, str]:
    """The line that only one of eager and the device refuses at once; else how the device differs."""
    cpu = [torch.device("cpu")] * num_devices
    lazy = [ltc.lazy_device(index) for index in range(num_devices)]
    events, held = outcome(lines, cpu)
    for number in range(1, rounds + 1):
        got_events, got_held = outcome(lines, lazy)
        late = attempt(lambda: ltc.mark_step(wait=True))
        for k, (got, wanted) in enumerate(zip(got_events, events, strict=False)):
            if k < len(lines) and _is_apart(lines[k], got, wanted):
                return k, ""
        if isinstance(late, Raised):
            return None, f"round {number}: {late!r} comes late"
        for k, (got, wanted) in enumerate(zip(got_events, events, strict=False)):
            what = _difference(got, wanted)
            if what:
                where = lines[k] if k < len(lines) else f"answer {k - len(lines)}"
                return None, f"round {number}, {where}: {what}"
        if held.keys() != got_held.keys():
            return None, f"round {number}: there are {sorted(got_held)}, in eager {sorted(held)}"
        for name, wanted in held.items():
            what = _difference(got_held[name], wanted)
            if what and not _has_no_gradient(got_held[name], wanted):
                return None, f"round {number}, {name}: {what}"
    return None, ""


# -- shrinking ---------------------------------------------------------------------------------------


def shrunk(lines: Lines, fails: Callable[[Lines], bool]) -> Lines:
    """The fewest lines that still fail; larger pieces first, from the end: later lines read what earlier ones make."""
    size = max(len(lines) // 2, 1)
    while size:
        end = len(lines)
        while end > 0:
            start = max(end - size, 0)
            fewer = lines[:start] + lines[end:]
            if fewer and _is_whole(fewer) and fails(fewer):
                lines = fewer
            end = start
        size //= 2
    return lines


def _is_whole(lines: Lines) -> bool:
    """Whether all names are there that the lines read."""
    made: set[str] = set()
    for line in lines:
        target, found = re.match(r"((?:t\d+, )*t\d+) = ", line), set(re.findall(r"\bt\d+\b", line))
        new = set(re.findall(r"t\d+", target[1])) if target else set()
        if not found - new <= made:
            return False
        made |= new
        if line.startswith("del "):
            made -= found
    return True


def script(lines: Lines, num_devices: int) -> str:
    """A program as a script that says where the device and eager differ."""
    return f'''
from tests.nets.random_programs import check

LINES = """
{chr(10).join(lines)}
""".strip().splitlines()

print(check(LINES, num_devices={num_devices}) or "as eager")
'''


# -- the command -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("random_programs", __doc__, count=10_000, lines=NUM_LINES)
    parser.add_argument("--tier", choices=TIERS, default="ops", help="what runs the graphs")
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args(argv)
    return _work(args, *args.child) if args.child else _supervise(args)


def parser_of(module: str, doc: str | None, count: int, lines: int) -> argparse.ArgumentParser:
    """The command line of a net of random programs: so many of them, each of so many lines."""
    parser = argparse.ArgumentParser(description=doc, prog=f"python -m tests.nets.{module}")
    parser.add_argument("--count", type=int, default=count, help="programs to run")
    parser.add_argument("--seed", type=int, default=None, help="default: TEST_SEED, or that of CI")
    parser.add_argument("--number", type=int, default=None, help="run this one program")
    parser.add_argument("--lines", type=int, default=lines)
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser


def _supervise(args: argparse.Namespace) -> int:
    command = [
        sys.executable, "-m", "tests.nets.random_programs", "--tier", args.tier, "--devices", str(args.devices),
        "--lines", str(args.lines), "--child",
    ]  # fmt: skip
    environment = {**os.environ, "LTC_NUM_DEVICES": str(args.devices), "LTC_COMPILE": "off"}
    return supervise(
        args,
        command,
        environment,
        lambda number: "\n".join(generate(number, args.devices, args.lines)),
    )


def supervise(
    args: argparse.Namespace,
    command: Sequence[str],
    environment: dict[str, str],
    text: Callable[[int], str],
) -> int:
    """Run the programs that the command line asks for in child processes: a new one after each that died.

    Args:
        args: of `parser_of`.
        command: the first number and the end come after it.
        text: the program of a number.

    Returns:
        Whether a program differs.
    """
    start = args.number
    if start is None:
        start = (seed() if args.seed is None else args.seed) * 1_000_000
    end = start + (1 if args.number is not None else args.count)
    tier = f", {args.tier}" if "tier" in args else ""
    print(f"programs {start} to {end - 1}{tier}, torch {torch.__version__}", flush=True)
    failures = 0
    while start < end:
        child = [*command, str(start), str(end)]
        found, start = _run_child(child, environment, start, end, text)
        failures += found
    print(f"{failures} programs differ" if failures else "all as eager", flush=True)
    return 1 if failures else 0


def _run_child(
    command: Sequence[str],
    environment: dict[str, str],
    start: int,
    end: int,
    text: Callable[[int], str],
) -> tuple[int, int]:
    """How many programs of one child process failed, and the number to go on with."""
    failures, at = 0, start
    last = [time.monotonic()]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        stop = threading.Event()
        watch = threading.Thread(target=_watch, args=(child, last, stop))
        watch.start()
        assert child.stdout is not None
        for line in child.stdout:
            last[0] = time.monotonic()
            if line.startswith("@"):
                at = int(line[1:])
                continue
            failures += line.startswith("program ")
            print(line, end="", flush=True)
        stop.set()
        watch.join()
    if child.returncode == 0:
        return failures, end
    print(f"program {at} ends its process with {child.returncode}:\n{text(at)}\n", flush=True)
    return failures + 1, at + 1


def _watch(child: subprocess.Popen[str], last: list[float], stop: threading.Event) -> None:
    while not stop.wait(1.0):
        if time.monotonic() - last[0] > HANG_S:
            child.kill()


def _work(args: argparse.Namespace, start: int, end: int) -> int:
    warnings.simplefilter("ignore")
    with tier(args.tier, args.devices):
        for number in range(start, end):
            print(f"@{number}", flush=True)
            lines = generate(number, args.devices, args.lines)
            what = _checked(lines, args.devices)
            if what:
                _report(number, lines, what, args.devices)
    return 0


def _checked(lines: Lines, num_devices: int) -> str:
    try:
        return check(lines, num_devices)
    except Exception:
        with contextlib.suppress(Exception):
            ltc.wait_device_ops()
        return f"the check fails\n{traceback.format_exc()}"


def _report(number: int, lines: Lines, what: str, num_devices: int) -> None:
    fewer = shrunk(lines, lambda some: bool(_checked(some, num_devices)))
    what = _checked(fewer, num_devices) or what
    print(f"program {number}: {what}\n{script(fewer, num_devices)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
