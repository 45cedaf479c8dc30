"""The command line, and the options of a file, as one checked `Spec`.

    ltc-launch --nprocs 8 train.py --lr 0.1
    ltc-launch --nprocs 2 -m package.train

Options may stand in `[tool.ltc]` of a pyproject.toml in the working directory, or in the file that --config names;
the command line wins. A mistake ends the command with one line and exit code 2. `agent` runs the `Spec`.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Spec", "num_cores", "parse"]

_MOST_PROCS = 4096


@dataclass(frozen=True)
class Spec:
    """One launch.

    Attributes:
        target: a script's path, or a module's name if `is_module`.
        nprocs: processes on this host.
        endpoint: host:port of the first host's store; empty for one host.
        rdzv_id: keeps apart jobs that meet at one endpoint.
        log_dir: where the output of each process is kept; empty for nowhere.
        prefix: whether lines on the console begin with the rank.
        tee: whether output that is kept in files is shown on the console, too.
        grace_s: seconds between SIGTERM and SIGKILL, when the launcher is sent SIGTERM.
        hang_timeout_s: seconds without a step after which the job is ended; 0 for never.
        devices: the GPUs of the processes of this host, separated by commas; empty for one each.
        watch: whether the terminal shows what each process does.
        compat: whether the script may import torch_xla and the other served modules.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    nprocs: int = 1
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str = ""
    rdzv_id: str = ""
    backend: str = "static"
    max_restarts: int = 0
    env: dict[str, str] = field(default_factory=dict)
    log_dir: str = ""
    prefix: bool = False
    grace_s: float = 30.0
    dry_run: bool = False
    tee: bool = True
    hang_timeout_s: float = 0.0
    devices: str = ""
    compat: bool = False
    watch: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        words, _, unknown = message.partition("unrecognized arguments: ")
        if not words and unknown.startswith("-"):
            unknown = unknown.split()[0]
            near = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.0)
            message = f"there is no option {unknown}; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="ltc-launch",
        description="Run a script in several processes, on one host or several.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nprocs", "--nproc-per-node", default="1", metavar="N",
        help="processes on this host; 'auto': one for each GPU or TPU chip, or each core")  # fmt: skip
    add("--nnodes", type=int, default=1, metavar="N", help="hosts; run the command on each")
    add("--node-rank", type=int, default=0, metavar="K", help="which host this is, from 0")
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="where the first host listens, for several hosts",
    )
    add("--rdzv-id", default="", metavar="NAME",
        help="keeps apart jobs that meet at one endpoint")  # fmt: skip
    add("--rdzv-backend", default="static", choices=("static", "c10d"),
        help="c10d lets hosts come in any order and after a failure again")  # fmt: skip
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all processes again after a failure",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for the processes",
    )
    add(
        "--log-dir", default="", metavar="DIR", help="keep the output of each process in files here"
    )
    add("--prefix", action=argparse.BooleanOptionalAction, default=None,
        help="begin each line with its rank; on for several processes")  # fmt: skip
    add("--tee", action=argparse.BooleanOptionalAction, default=True,
        help="with --log-dir: show the output too")  # fmt: skip
    add("--devices", default="", metavar="K,K,...",
        help="the GPU or chip of each process, with LTC_DEVICE=cuda or tpu; 0, 1, ... by default")  # fmt: skip
    add("--grace", type=float, default=30.0, metavar="S",
        help="after SIGTERM: seconds processes have to save their work and end")  # fmt: skip
    add("--hang-timeout", type=float, default=0.0, metavar="S",
        help="end the job, with the stacks of its processes, when one makes no step for so long; "
        "longer than its start and than its longest pause")  # fmt: skip
    add("--compat", action="store_true",
        help="serve torch_xla, torch._lazy and lazy_tensor_core to the script, under their device's name")  # fmt: skip
    add("--watch", action="store_true",
        help="show below the output what each process does, waits for and holds; needs a terminal")  # fmt: skip
    add("--config", default="", metavar="FILE", help="a TOML file with these options")
    add(
        "--dry-run",
        action="store_true",
        help="show what would be started, and with which variables",
    )
    add("-m", "--module", action="store_true", help="the target is a module's name")
    add("target", help="the script")
    add("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def parse(argv: Sequence[str]) -> Spec:
    """Read a command line.

    Raises:
        SystemExit: code 2 for a mistake, code 0 for --help.
    """
    parser = _parser()
    first = parser.parse_args(argv)
    options = _from_file(parser, first.config)
    if options:
        parser.set_defaults(**options)
        first = parser.parse_args(argv)
    return _checked(parser, first)


def _from_file(parser: _Parser, name: str) -> dict[str, Any]:
    path = Path(name or "pyproject.toml")
    if not name and not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        parser.error(f"{path} cannot be read: {error}")
    table = content.get("tool", {}).get("ltc", {}) if not name else content
    if name and "tool" in content:
        table = content["tool"].get("ltc", {})
    known = {action.dest for action in parser._actions} - {"help", "config", "target", "args"}
    options = {key.replace("-", "_"): value for key, value in table.items()}
    unknown = sorted(options.keys() - known)
    if unknown:
        parser.error(f"{path} has no option {unknown[0]!r}; legal are {', '.join(sorted(known))}")
    if isinstance(options.get("env"), dict):
        options["env"] = [f"{k}={v}" for k, v in options["env"].items()]
    if "nprocs" in options:
        options["nprocs"] = str(options["nprocs"])
    return options


def _make_log_dir(parser: _Parser, path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        parser.error(f"--log-dir {path} cannot be used: {error.strerror}")


def _checked(parser: _Parser, given: argparse.Namespace) -> Spec:
    nprocs = _number_of_processes(parser, given.nprocs, given.devices)
    if given.nnodes < 1 or not 0 <= given.node_rank < given.nnodes:
        parser.error(
            f"--node-rank {given.node_rank} of --nnodes {given.nnodes}: ranks of hosts count from 0"
        )
    if given.nnodes > 1 and not given.rdzv_endpoint:
        parser.error("several hosts need --rdzv-endpoint HOST:PORT, the address of the first one")
    host, _, port = given.rdzv_endpoint.rpartition(":")
    if given.rdzv_endpoint and not (host and port.isdecimal() and 0 < int(port) < 65536):
        parser.error(f"--rdzv-endpoint must be HOST:PORT, not {given.rdzv_endpoint!r}")
    for name in ("max_restarts", "grace", "hang_timeout"):
        if getattr(given, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    if not given.module:
        _check_script(parser, given.target)
    if given.log_dir and not given.dry_run:
        _make_log_dir(parser, given.log_dir)
    return Spec(
        given.target,
        args=tuple(given.args),
        is_module=given.module,
        nprocs=nprocs,
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        endpoint=given.rdzv_endpoint,
        rdzv_id=given.rdzv_id,
        backend=given.rdzv_backend,
        max_restarts=given.max_restarts,
        env=_variables(parser, given.env),
        log_dir=given.log_dir,
        prefix=given.nnodes * nprocs > 1 if given.prefix is None else given.prefix,
        grace_s=given.grace,
        dry_run=given.dry_run,
        tee=given.tee,
        hang_timeout_s=given.hang_timeout,
        devices=_devices(parser, given.devices, nprocs),
        compat=given.compat,
        watch=given.watch,
    )


def _number_of_processes(parser: _Parser, text: str, devices: str) -> int:
    if text == "auto":
        return devices.count(",") + 1 if devices else _one_each()
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_PROCS:
        parser.error(f"--nprocs must be a whole number, 1 or more, or 'auto', not {text!r}")
    return int(text)


def _devices(parser: _Parser, text: str, nprocs: int) -> str:
    if not text:
        return ""
    ordinals = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in ordinals):
        parser.error(f"--devices must be whole numbers with commas between them, not {text!r}")
    if len(ordinals) != nprocs:
        parser.error(f"--devices names {len(ordinals)} devices for {nprocs} processes")
    return ",".join(ordinals)


def _one_each() -> int:
    asked = (os.environ.get("LTC_DEVICE") or os.environ.get("PJRT_DEVICE") or "").lower()
    if asked in ("cuda", "gpu"):
        import torch  # takes a second: imported only where GPUs are asked for

        return max(1, torch.cuda.device_count())
    if asked == "tpu":
        from ltc_core.tpu_chips import count_chips  # as above

        return max(1, count_chips())
    return num_cores()


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_script(parser: _Parser, target: str) -> None:
    path = Path(target)
    if path.is_dir():
        parser.error(f"{target} is a directory; name the script in it")
    if not path.is_file():
        parser.error(f"there is no script {target}")


def _variables(parser: _Parser, pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            parser.error(f"--env needs NAME=VALUE, not {pair!r}")
        found[name] = value
    return found
