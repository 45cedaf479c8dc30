"""What a report of a fault needs: `python -m ltc_core.doctor` prints versions, device, compiler, caches, libraries,
variables, and tries a training step.

It changes nothing but caches. With `--compile` it also compiles the step, which takes some seconds.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch import nn

from ltc_core import build, metrics, native_extension
from ltc_core.api.verbs import lazy_device, mark_step, wait_device_ops
from ltc_core.device import register
from ltc_core.device.hardware import hardware, hardware_kind
from ltc_core.errors import LtcError, first_line
from ltc_core.native_extension import PREBUILT
from ltc_core.private_directory import private_directory
from ltc_core.settings import SETTINGS, settings, unknown_names
from ltc_core.torch_version import is_tested, tested

__all__ = ["main"]

_LITTLE_ROOM = 1 << 30
_BY_ITSELF = "takes the device under ltc-launch and with LTC_AUTOLOAD=1"
# Distribution -> how it comes to the device; docs/ecosystem.md says more.
LIBRARIES = {
    "accelerate": _BY_ITSELF,
    "transformers": "its Trainer takes the device of accelerate",
    "lightning": _BY_ITSELF,
    "pytorch-lightning": _BY_ITSELF,
    "pytorch-ignite": _BY_ITSELF,
    "safetensors": "saves tensors of the device; load, then move",
    "torch-xla": "used by LTC_DEVICE=xla; scripts that import it get ours with --compat alone",
}
Line = tuple[str, str]


class Findings:
    """What is printed: sections of lines, and what is wrong, with what to do about it."""

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []

    def section(self, name: str, lines: Iterator[Line]) -> None:
        print(f"\n{name}")
        for key, text in lines:
            print(f"  {key:<24} {text}")

    def wrong(self, what: str, next: str) -> str:
        """Note a problem. Return what is printed in its place."""
        self.problems.append((what, next))
        return f"{what}  <--"


def main(arguments: list[str] | None = None) -> int:
    """Print it all; return the number of problems."""
    parser = argparse.ArgumentParser(prog="python -m ltc_core.doctor", description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile the step, too")
    wants_compile = parser.parse_args(arguments).compile
    found = Findings()
    print("ltc doctor: send all of this with a report of a fault")
    found.section("Versions", _versions(found))
    found.section("Machine", _machine())
    found.section("Device", _device(found))
    found.section("C++", _compiled_parts(found))
    found.section("Caches", _caches(found))
    found.section("Libraries", _libraries())
    found.section("Variables", _variables(found))
    found.section("A training step", _trial(found, wants_compile))
    print()
    for what, next in found.problems:
        print(f"problem: {what}\n  Next: {next}")
    print(f"{len(found.problems) or 'no'} problem{'s' * (len(found.problems) != 1)}")
    return len(found.problems)


def _versions(found: Findings) -> Iterator[Line]:
    yield "ltc", f"{_version('ltc') or 'not installed'}, {Path(__file__).parent}"
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    text = f"{torch.__version__}, {Path(torch.__file__).parent}"
    if not is_tested(str(torch.__version__)):
        text = found.wrong(
            f"torch {text}", f"install one from {tested()}: the tests run with these"
        )
    yield "torch", text


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[Line]:
    memory = psutil.virtual_memory()
    names = [row for row in _rows("/proc/cpuinfo") if row.startswith("model name")]
    yield "system", platform.platform()
    yield "processor", names[0].split(":", 1)[1].strip() if names else platform.machine()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield (
        "cores",
        f"{usable} of {os.cpu_count()} usable, torch uses {torch.get_num_threads()} threads",
    )
    yield "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    yield "load", f"{os.getloadavg()[0]:.1f} processes want to run"


def _rows(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _device(found: Findings) -> Iterator[Line]:
    try:
        count, kind = register.device_count(), hardware_kind()
        yield "devices", f"{count} {settings.device_name} on {kind}, executor {settings.executor}"
        yield "first one", f"{lazy_device(0)} computes on {hardware(0)}"
    except LtcError as error:
        yield "devices", found.wrong(first_line(error), error.next)
    yield "compiled programs", f"LTC_COMPILE={settings.compile}"


def _compiled_parts(found: Findings) -> Iterator[Line]:
    compiler = None
    try:
        compiler = native_extension.compiler_command()[0]
        command = [compiler, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        yield "compiler", f"{shutil.which(compiler)}, {said.stdout.splitlines()[0]}"
    except (LookupError, OSError, subprocess.SubprocessError) as error:
        yield (
            "compiler",
            found.wrong(
                first_line(error),
                "install g++ (Debian: apt install g++), or name one in CXX: else steps run slower, op by op",
            ),
        )
    for extension in build.EXTENSIONS:
        began = time.perf_counter()
        if extension.load() is not None:
            came = " from the wheel" if extension.loaded_path().parent == PREBUILT else ""
            yield extension.name, f"loaded{came} in {time.perf_counter() - began:.1f} s"
        elif compiler is None:
            yield extension.name, "not built"
        else:
            what = f"{extension.name} cannot be built: {extension.unavailable_reason}"
            yield (
                extension.name,
                found.wrong(what, "python -m ltc_core.build says it again; report it"),
            )


def _caches(found: Findings) -> Iterator[Line]:
    built = build.EXTENSIONS[0].library_path().parent
    compiled = Path(settings.compiled_cache_dir or built.with_name("compiled")).expanduser()
    for name, path in (("built parts", built), ("compiled programs", compiled)):
        try:
            private_directory(path)
        except OSError as error:
            yield name, found.wrong(str(error), "name a directory of your own in LTC_CACHE_DIR")
            continue
        files = [file for file in path.rglob("*") if file.is_file()]
        mib = sum(file.stat().st_size for file in files) / 2**20
        yield name, f"{path}: {mib:.0f} MiB in {len(files)} files"
        free = shutil.disk_usage(path).free
        if free < _LITTLE_ROOM:
            yield (
                "",
                found.wrong(
                    f"{free / 2**20:.0f} MiB are free there",
                    "make room, or set LTC_CACHE_DIR elsewhere",
                ),
            )


def _libraries() -> Iterator[Line]:
    for name, route in LIBRARIES.items():
        if version := _version(name):
            yield f"{name} {version}", route
    yield "others", "docs/ecosystem.md; a module is moved with .to(ltc_core.lazy_device())"


def _variables(found: Findings) -> Iterator[Line]:
    rows = {name: row for row in SETTINGS for name in row.names}
    unknown = unknown_names(os.environ)
    for name, value in sorted(os.environ.items()):
        if name in rows:
            yield f"{name}={value}", rows[name].doc
        elif name in unknown:
            next = f"unset it; the nearest is {unknown[name]}"
            yield name, found.wrong(f"{name} does not exist", next)
        elif name.startswith(
            ("OMP_", "MKL_", "KMP_", "CUDA_VISIBLE", "RANK", "WORLD_SIZE", "LOCAL_")
        ):
            yield f"{name}={value}", "read by PyTorch"


def _trial(found: Findings, wants_compile: bool) -> Iterator[Line]:
    modes = ["off", "sync"] if wants_compile else ["off"]
    try:
        for mode in modes:
            with settings.override(compile=mode):
                yield from _compared(found, mode)
    except Exception as error:  # whatever it is belongs into the report
        yield (
            "failed",
            found.wrong(
                f"{type(error).__name__}: {first_line(error)}",
                "run it with LTC_EAGER=1: it names the op that fails where it is called",
            ),
        )


def _compared(found: Findings, mode: str) -> Iterator[Line]:
    began = time.perf_counter()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1))
    expected = _losses(copy.deepcopy(model), torch.device("cpu"), lambda: None)
    losses = _losses(model, lazy_device(), mark_step)
    wait_device_ops()
    seconds = time.perf_counter() - began
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    text = f"losses differ from eager's by {difference:.0e} relative, {seconds:.1f} s"
    if difference > 1e-3:
        text = found.wrong(text, "report it; LTC_EXECUTOR=reference runs op by op meanwhile")
    yield {"off": "op by op", "sync": "compiled"}[mode], text
    if mode == "sync" and not metrics.counter_value("CompiledRun"):
        yield "", found.wrong("the step was not compiled", "LTC_EXPLAIN=1 says why")


def _losses(model: nn.Module, device: torch.device, end: Callable[[], None]) -> list[float]:
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(6):
        x = torch.linspace(-1, 1, 64 * 16).view(16, 64).roll(step, 0).to(device)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        end()
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is among the problems
        code = main()
    sys.exit(min(code, 1))
