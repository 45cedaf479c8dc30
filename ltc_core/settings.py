"""Every setting, read from the environment in one place: name, type, default, meaning.

A row of `SETTINGS` says how one variable is read; the class `Settings` holds the typed values.
Our name (`LTC_X`) is looked up first, then the names the peers used. A bad value is a
SettingsError; an unknown `LTC_` name is reported once, at import, with the nearest legal one.
The module-level object `settings` is what everything else reads. An attribute is read from the
environment at its first use, so that a script may set a variable after its imports. A later change
of the variable has no effect, and `check_environment` raises.
"""

import difflib
import keyword
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ltc_core.errors import SettingsError, listed
from ltc_core.tpu_chips import count_chips

# The names PyTorch itself reads (libtorch_cpu.so and torch/_lazy/closure.py, torch 2.13). Those
# that are rows below keep PyTorch's meaning; the others are left to torch._lazy.
PYTORCH_NAMES = frozenset(
    {
        "LTC_ENABLE_DYNAMIC_SHAPES",
        "LTC_ENABLE_SOURCE_INFO",
        "LTC_ENABLE_SYMBOLIC_SHAPES",
        "LTC_EXPERIMENTAL",
        "LTC_FORCE_FALLBACK",
        "LTC_MAX_ASYNC_QUEUE",
        "LTC_SAVE_TENSORS_FILE",
        "LTC_SAVE_TENSORS_FMT",
        "LTC_TS_CUDA",
    }
)

# Names of other devices: PyTorch refuses the first six, and `meta` would name two devices.
_TAKEN_DEVICE_NAMES = ("cpu", "cuda", "hip", "mps", "mtia", "xpu", "meta")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Setting:
    """One row: how an attribute of `Settings` is read from the environment.

    `type` is str, int, float, bool or frozenset (a comma list). `translate(name, text)` turns the text of a
    peer's variable into our values. `check(value)` returns "", or for an illegal value which ones are legal.
    """

    attribute: str
    env: str
    aliases: tuple[str, ...]
    type: type
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    fixed: bool = False
    default_of: Callable[[Mapping[str, str]], Any] | None = None
    translate: Callable[[str, str], str] | None = None
    check: Callable[[Any], str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The variables; the first one that is set counts."""
        return (self.env, *self.aliases)

    def legal(self) -> str:
        """Text that says which values are legal."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = _TYPE_WORDS[self.type]
        return words if self.at_least is None else f"{words}, at least {self.at_least:g}"


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(text)


def _parse_names(text: str) -> frozenset[str]:
    """'add, aten::mul' -> {'aten::add', 'aten::mul'}: a bare name is an op of ATen."""
    names = (name.strip() for name in text.split(","))
    return frozenset(name if "::" in name else f"aten::{name}" for name in names if name)


_PARSERS: dict[type, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: _parse_bool,
    frozenset: _parse_names,
}
_TYPE_WORDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: f"one of {', '.join(_TRUE + _FALSE)}",
    frozenset: "op names with commas between them, such as aten::add,aten::mul",
}


def _check_device_name(name: str) -> str:
    is_name = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    if is_name and name not in _TAKEN_DEVICE_NAMES:
        return ""
    return f"a Python identifier that is no device of PyTorch ({', '.join(_TAKEN_DEVICE_NAMES)})"


def _check_devices(text: str) -> str:
    is_list = all(part.strip().isdecimal() for part in text.split(","))
    return "" if is_list or not text else "whole numbers with commas between them, such as 0,2,3"


def _check_share(value: float) -> str:
    return "" if value < 1 else "a number from 0 to below 1"


def _default_cache_dir(environ: Mapping[str, str]) -> str:
    root = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "ltc")


def _translate_debug(name: str, text: str) -> str:
    """Text of our level: 2 at most for torch_xla's variables, which never show graphs.

    PT_XLA_DEBUG=1 turns all reports of torch_xla on; its levels go up to 100.
    """
    if not name.startswith("PT_"):
        return text
    if name == "PT_XLA_DEBUG" and text.lower() in _TRUE:
        return "2"
    if name == "PT_XLA_DEBUG" and text.lower() in _FALSE:
        return "0"
    return str(min(int(text), 2)) if text.isdecimal() else text


def _translate_graph_format(name: str, text: str) -> str:
    return "text" if text == "backend" else text


# Of PyTorch's contract, Open MPI, MVAPICH2, MPICH and Intel MPI, SLURM, in the order of `ltc_dist.job.ranks`.
_LOCAL_RANK = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "SLURM_LOCALID",
)


def _default_device_ordinal(environ: Mapping[str, str]) -> int:
    """The GPU or chip of this process: the processes of a host take one each, in the order of their local ranks."""
    text = next((environ[name] for name in _LOCAL_RANK if name in environ), "")
    local_rank = int(text) if text.isdecimal() else 0
    chosen = environ.get("LTC_DEVICES", "").split(",")
    if local_rank < len(chosen) and chosen[local_rank].strip().isdecimal():
        return int(chosen[local_rank])
    return local_rank


def _default_num_devices(environ: Mapping[str, str]) -> int:
    """The number of the TPU host's chips if this process is alone on it, else 1."""
    asked = environ.get("LTC_DEVICE") or environ.get("PJRT_DEVICE") or ""
    has_chosen = any(environ.get(name) for name in ("LTC_DEVICES", "LTC_DEVICE_ORDINAL"))
    processes = environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE") or "1"
    is_alone = processes == "1" and "SLURM_LOCALID" not in environ
    return max(count_chips(), 1) if asked.upper() == "TPU" and is_alone and not has_chosen else 1


_OF_PJRT = {"CUDA": "cuda", "GPU": "cuda", "TPU": "tpu"}


def _translate_hardware(name: str, text: str) -> str:
    """torch._lazy uses LTC_TS_CUDA=1 for the GPU, torch_xla PJRT_DEVICE=CPU, CUDA, GPU, TPU, NEURON."""
    if name == "LTC_TS_CUDA":
        return "cuda" if text.lower() in _TRUE else "cpu"
    if name == "PJRT_DEVICE":
        return _OF_PJRT.get(text.upper(), "cpu")
    return text.lower()


# fmt: off
SETTINGS: tuple[Setting, ...] = (
    Setting("device_name", "LTC_DEVICE_NAME", (), str, "ltc",
            "Name of the device; fixed at the first import.",
            fixed=True, check=_check_device_name),
    Setting("num_devices", "LTC_NUM_DEVICES",
            ("CPU_NUM_DEVICES", "TPU_NUM_DEVICES", "GPU_NUM_DEVICES"), int, 1,
            "Devices of this process, and the processes of spawn where it is not told (default: 1, or a TPU's chips).",
            at_least=1, default_of=_default_num_devices),
    Setting("executor", "LTC_EXECUTOR", (), str, "inductor",
            "What runs the graphs; jax: XLA through JAX, reference runs op by op, null does no maths.",
            choices=("inductor", "jax", "reference", "null")),
    Setting("spmd", "LTC_SPMD", ("XLA_USE_SPMD",), bool, False,
            "With LTC_EXECUTOR=jax the devices of all processes are one mesh, and no gradient is averaged."),
    Setting("collectives", "LTC_COLLECTIVES", (), str, "auto",
            "Where LTC_EXECUTOR=jax runs collectives; graph: in its programs, host: between them, as auto on a CPU.",
            choices=("auto", "graph", "host")),
    Setting("device", "LTC_DEVICE", ("LTC_TS_CUDA", "PJRT_DEVICE"), str, "cpu",
            "What the graphs run on: the processor, a GPU or a TPU chip for each device; xla: what PJRT_DEVICE names.",
            choices=("cpu", "cuda", "tpu", "xla"), translate=_translate_hardware),
    Setting("device_ordinal", "LTC_DEVICE_ORDINAL", (), int, 0,
            "The GPU or chip of this process's first device (default: that of LTC_DEVICES, or its local rank).",
            at_least=0, default_of=_default_device_ordinal),
    Setting("devices", "LTC_DEVICES", (), str, "",
            "The GPUs or chips of a host's processes in the order of their local ranks, such as 0,2,3.",
            check=_check_devices),
    Setting("compile", "LTC_COMPILE", (), str, "async",
            "When graphs are compiled: in the background, before their first run, or never.",
            choices=("async", "sync", "off")),
    Setting("compile_after", "LTC_COMPILE_AFTER", (), int, 0,
            "Runs after which a graph that comes back is compiled in the background; 0: once its steps have taken as "
            "long as compiling may.", at_least=0),
    Setting("compile_priority", "LTC_COMPILE_PRIORITY", (), str, "idle",
            "What the background compiler takes of busy cores: nothing, a tenth of one or more, or its share.",
            choices=("idle", "low", "normal")),
    Setting("compile_timeout_s", "LTC_COMPILE_TIMEOUT_S", (), float, 1800.0,
            "Seconds of processor time one compile may take until it is given up; also seconds in which it takes none.",
            at_least=1),
    Setting("compiled_cache_bytes", "LTC_COMPILED_CACHE_BYTES", (), int, 4 << 30,
            "Compiled programs kept on disk; the longest unused go first.", at_least=0),
    Setting("compiled_cache_dir", "LTC_COMPILED_CACHE_DIR", ("XLA_PERSISTENT_CACHE_PATH",), str, "",
            "Where compiled programs are kept (default: compiled in LTC_CACHE_DIR)."),
    Setting("compiled_cache_read_only", "LTC_COMPILED_CACHE_READ_ONLY",
            ("XLA_PERSISTENT_CACHE_READ_ONLY",), bool, False,
            "Load compiled programs from there, and keep new ones for this process only."),
    Setting("replay", "LTC_REPLAY", (), str, "auto",
            "Whether ops that run one by one run in C++: once that part is built, always (wait for it), or never.",
            choices=("auto", "always", "never")),
    Setting("keep_memory", "LTC_KEEP_MEMORY", (), bool, True,
            "Keep memory that a step frees for the next one."),
    Setting("fallback", "LTC_FALLBACK", (), str, "allow",
            "An op without a rule: raise, run on the CPU with a warning, or run there silently.",
            choices=("error", "warn", "allow")),
    Setting("force_fallback", "LTC_FORCE_FALLBACK", (), frozenset, frozenset(),
            "Ops that always run on the CPU, for finding the one at fault."),
    Setting("use_bf16", "LTC_USE_BF16", ("XLA_USE_BF16",), bool, False,
            "Store and compute float32 and float64 as bfloat16."),
    Setting("downcast_bf16", "LTC_DOWNCAST_BF16", ("XLA_DOWNCAST_BF16",), bool, False,
            "Store and compute float32 as bfloat16, float64 as float32."),
    Setting("random", "LTC_RANDOM", (), str, "device",
            "Where a TPU's random numbers are made; host: eager's own numbers, sent to it in each step. cpu_stream: all"
            " devices draw from the CPU's generator, at once, as eager PyTorch on the CPU does.",
            choices=("device", "host", "cpu_stream")),
    Setting("metrics_file", "LTC_METRICS_FILE", ("XLA_METRICS_FILE",), str, None,
            "Append the metrics of each step to this file (STDERR, STDOUT; 1: ltc_metrics.txt), in a job to .RANK."),
    Setting("trace", "LTC_TRACE", (), str, None,
            "Write a timeline of the run to this file, for ui.perfetto.dev; in a job all ranks are in it at the end."),
    Setting("report", "LTC_REPORT", (), str, None,
            "Write a report of the run into this directory: report.html, for a browser, and the timeline behind it."),
    Setting("watch", "LTC_WATCH", (), str, None,
            "Publish what this process does in this directory (1: one in TMPDIR), for python -m ltc_core.top."),
    Setting("save_tensors_file", "LTC_SAVE_TENSORS_FILE", ("XLA_SAVE_TENSORS_FILE",), str, None,
            "Append each graph that is run to this file; in a job to .RANK each."),
    Setting("save_tensors_fmt", "LTC_SAVE_TENSORS_FMT", ("XLA_SAVE_TENSORS_FMT",), str, "text",
            "Format of those graphs (backend is read as text); hlo: with LTC_EXECUTOR=jax StableHLO of each program.",
            choices=("text", "dot", "hlo"), translate=_translate_graph_format),
    Setting("ir_debug", "LTC_IR_DEBUG", ("XLA_IR_DEBUG",), bool, False,
            "Show the user's line of each node in graphs."),
    Setting("debug", "LTC_DEBUG", ("LTC_DEBUG_LEVEL", "PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG"), int, 0,
            "Report 1: each graph that is built, and a summary at exit; 2: each run as well; 3: the graphs too.",
            choices=("0", "1", "2", "3"), translate=_translate_debug),
    Setting("debug_file", "LTC_DEBUG_FILE", ("PT_XLA_DEBUG_FILE",), str, None,
            "Append these reports to this file, in a job to .RANK each, and not to stderr."),
    Setting("debug_frames", "LTC_DEBUG_FRAMES", ("PT_XLA_DEBUG_MAX_FRAME",), int, 8,
            "Frames of yours that a report shows at most.", at_least=0),
    Setting("check_graphs", "LTC_CHECK_GRAPHS", (), bool, False,
            "Check that each graph is well formed before it is compiled; LTC_DEBUG does so, too."),
    Setting("emit_steplog", "LTC_EMIT_STEPLOG", ("XLA_EMIT_STEPLOG",), bool, False,
            "Write the hash of each graph that is run to stderr."),
    Setting("explain", "LTC_EXPLAIN", (), bool, False,
            "Say why each graph is built: what differs from the nearest known one; at exit how each graph ran."),
    Setting("sync_wait", "LTC_SYNC_WAIT", ("XLA_SYNC_WAIT",), bool, False,
            "Each sync waits until the device is done."),
    Setting("eager", "LTC_EAGER", ("XLA_USE_EAGER_DEBUG_MODE",), bool, False,
            "Run each op where it is called, so that an error has the line of its op."),
    Setting("max_async_queue", "LTC_MAX_ASYNC_QUEUE", ("XLA_MAX_ASYNC_QUEUE",), int, 100,
            "Asynchronous step closures that may wait.", at_least=1),
    Setting("max_pending_steps", "LTC_MAX_PENDING_STEPS", (), int, 4,
            "Steps that may be recorded ahead of the device.", at_least=1),
    Setting("steps", "LTC_STEPS", (), str, "auto",
            "Where steps end that the script does not mark: at optimizer.step() and uploads, or at mark_step alone.",
            choices=("auto", "marked")),
    Setting("dynamic_shapes", "LTC_DYNAMIC_SHAPES", (), str, "auto",
            "Whether graphs that differ in sizes only become one, from the third size on: it is not compiled.",
            choices=("auto", "never")),
    Setting("streaming", "LTC_STREAMING", (), str, "auto",
            "Whether a step that is waited for may begin to run while it is recorded, where that is quicker.",
            choices=("auto", "never")),
    Setting("at_once", "LTC_AT_ONCE", (), str, "auto",
            "Whether ops run where they are called, as eager PyTorch runs them: auto, where that is quicker.",
            choices=("auto", "never", "always")),
    Setting("distribution_checks", "LTC_DISTRIBUTION_CHECKS", (), str, "later",
            "When torch.distributions raises an illegal parameter or sample: at the next read, or now, waiting for it.",
            choices=("later", "now")),
    Setting("trim_graph_size", "LTC_TRIM_GRAPH_SIZE", ("XLA_TRIM_GRAPH_SIZE",), int, 20000,
            "Ops recorded without a cut, after which the loop is cut at its head.", at_least=1),
    Setting("max_graph_size", "LTC_MAX_GRAPH_SIZE", (), int, 200000,
            "Ops of one graph at most: it is cut there, wherever that is.", at_least=1),
    Setting("compilation_cache_size", "LTC_COMPILATION_CACHE_SIZE", ("XLA_COMPILATION_CACHE_SIZE",),
            int, 1024, "Programs kept for graphs that come back.", at_least=1),
    Setting("cache_dir", "LTC_CACHE_DIR", (), str, "",
            "Where built files are kept (default: ltc in XDG_CACHE_HOME, or in ~/.cache).",
            default_of=_default_cache_dir),
    Setting("autoload", "LTC_AUTOLOAD", (), bool, False,
            "Register the device when torch is imported; accelerate, Lightning and ignite choose it then."),
    Setting("compat", "LTC_COMPAT", (), bool, False,
            "Serve torch_xla, torch._lazy and lazy_tensor_core to old scripts once torch is imported."),
    Setting("zygote", "LTC_ZYGOTE", (), bool, True,
            "Start the processes of a job as forks of one that has imported PyTorch; 0: each from nothing."),
    Setting("collective_timeout_s", "LTC_COLLECTIVE_TIMEOUT_S", (), float, 600.0,
            "Seconds processes wait for each other.", at_least=0.1),
    Setting("bucket_mb", "LTC_BUCKET_MB", ("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",), float, 32.0,
            "MiB of the vectors that tensors are reduced in.", at_least=0),
    Setting("rate_smoothing", "LTC_RATE_SMOOTHING", ("RATE_TRACKER_SMOOTHING",), float, 0.4,
            "How much of RateTracker's rate is that of the time before, from 0 to below 1.", at_least=0,
            check=_check_share),
    Setting("data_warning_s", "LTC_DATA_WARNING_S", (), float, 60.0,
            "Seconds a training loop waits for a batch before it is told what the loader does.",
            at_least=0.1),
    Setting("data_timeout_s", "LTC_DATA_TIMEOUT_S", ("LTC_DATA_TIMEOUT",), float, 0.0,
            "Seconds after which waiting for a batch is an error; 0: never.", at_least=0),
    Setting("exit_timeout_s", "LTC_EXIT_TIMEOUT_S", (), float, 30.0,
            "Seconds the interpreter's exit waits for pending work.", at_least=0),
)
# fmt: on

_ROWS: dict[str, Setting] = {row.attribute: row for row in SETTINGS}
_UNREAD = object()


class Settings:
    """The values, each read at its first use. An assigned value is checked like one from the environment."""

    # attribute -> the texts of its variables when it was read or assigned; all variables at the last check.
    _seen: dict[str, tuple[str | None, ...]]
    _all_seen: Any

    device_name: str
    num_devices: int
    executor: str
    spmd: bool
    collectives: str
    device: str
    device_ordinal: int
    devices: str
    compile: str
    compile_after: int
    compile_priority: str
    compile_timeout_s: float
    compiled_cache_bytes: int
    compiled_cache_dir: str
    compiled_cache_read_only: bool
    replay: str
    keep_memory: bool
    fallback: str
    force_fallback: frozenset[str]
    use_bf16: bool
    downcast_bf16: bool
    random: str
    metrics_file: str | None
    trace: str | None
    report: str | None
    watch: str | None
    save_tensors_file: str | None
    save_tensors_fmt: str
    ir_debug: bool
    debug: int
    debug_file: str | None
    debug_frames: int
    check_graphs: bool
    emit_steplog: bool
    explain: bool
    sync_wait: bool
    eager: bool
    max_async_queue: int
    max_pending_steps: int
    steps: str
    dynamic_shapes: str
    streaming: str
    at_once: str
    distribution_checks: str
    trim_graph_size: int
    max_graph_size: int
    compilation_cache_size: int
    cache_dir: str
    autoload: bool
    compat: bool
    zygote: bool
    collective_timeout_s: float
    bucket_mb: float
    rate_smoothing: float
    data_warning_s: float
    data_timeout_s: float
    exit_timeout_s: float

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read every row from `environ` (default: os.environ).

        Raises:
            SettingsError: a value is illegal.
        """
        environ = os.environ if environ is None else environ
        made = cls()
        for row in SETTINGS:
            made.__dict__[row.attribute] = _read(row, environ)
        return made

    def __init__(self) -> None:
        self.__dict__.update(_seen={}, _all_seen=None)

    def __getattr__(self, name: str) -> Any:
        """Read a setting at its first use; Python calls this for attributes that are not there yet."""
        row = _ROWS.get(name)
        if row is None:
            raise AttributeError(f"there is no setting {name!r}")
        if name == "device":
            warn_not_here(os.environ)
        self._seen[name] = _texts(row)
        value = self.__dict__[name] = _read(row, os.environ)
        return value

    def peek(self, name: str) -> Any:
        """Value of a setting, without using it: the environment may still change an unused setting."""
        found = self.__dict__.get(name, _UNREAD)
        return _read(_ROWS[name], os.environ) if found is _UNREAD else found

    def is_used(self, name: str) -> bool:
        """Whether a setting was read or assigned."""
        return name in self.__dict__

    def check_environment(self, *names: str) -> None:
        """Raise if a variable is illegal, or was set too late; called when a device is requested, and by `spawn`.

        Args:
            names: the settings to check; by default all that were used.

        Raises:
            SettingsError: the value of a variable is illegal, or differs from that of its setting, used before.

        Cost: 2 us if nothing has changed. A removed variable gives a warning.
        """
        now = getattr(os.environ, "_data", None)  # the dict inside: compares twenty times faster
        if not names and now is not None and now == self._all_seen:
            return
        for name in names or tuple(self._seen):
            row = _ROWS[name]
            texts = _texts(row)
            if texts != self._seen.get(name, texts):
                self._check_changed(row, texts)
                self._seen[name] = texts
        if names:
            return
        for row in _ROWS.values():  # so that no run finds an illegal value, half-way
            if row.attribute not in self._seen and any(_texts(row)):
                _read(row, os.environ)
        if now is not None:
            self.__dict__["_all_seen"] = dict(now)

    def _check_changed(self, row: Setting, texts: tuple[str | None, ...]) -> None:
        used, wanted = self.__dict__[row.attribute], _read(row, os.environ)
        if used == wanted:
            return
        before = self._seen[row.attribute]
        pairs = zip(row.names, before, texts, strict=True)
        name, _, text = next(pair for pair in pairs if pair[1] != pair[2])
        if text is None:
            warnings.warn(
                f"{name} was removed from the environment: that has no effect, {row.attribute} stays {_show(used)}",
                stacklevel=4,
            )
            return
        raise SettingsError(
            f"{name} was set too late to have an effect",
            got=f"{name}={text}; {row.attribute} is {_show(used)} since its first use",
            where="the environment",
            next=f"set it before the first use of the device, or in the environment of the program; "
            f"LTC_{row.attribute.upper()} is its name here",
        )

    def accept_environment(self) -> None:
        """Treat the current variables as those that were read, since the runtime itself has set some of them."""
        for name in self._seen:
            self._seen[name] = _texts(_ROWS[name])

    def __setattr__(self, name: str, value: Any) -> None:
        row = _ROWS.get(name)
        if row is None:
            near = difflib.get_close_matches(name, _ROWS, n=1, cutoff=0.0)
            raise SettingsError(
                f"there is no setting {name!r}", next=f"the nearest one is {near[0]!r}."
            )
        if row.fixed and value != getattr(self, name):
            raise SettingsError(
                f"the setting {name!r} is fixed at the first import",
                got=f"{value!r}, and it is {getattr(self, name)!r}",
                next=f"set {row.env} in the environment before the program starts.",
            )
        if row.type is float and type(value) is int:
            value = float(value)
        if not (value is None and row.default is None):
            wanted = row.legal() if type(value) is not row.type else _problem(row, value)
            if wanted:
                raise _illegal(f"the setting {name!r}", repr(value), wanted)
        self._seen[name] = _texts(row)
        self.__dict__[name] = value

    @contextmanager
    def override(self, **values: Any) -> Iterator["Settings"]:
        """Change settings for a `with` block, in all threads."""
        before = {name: getattr(self, name) for name in values if name in _ROWS}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield self
        finally:
            self.__dict__.update(before)

    def describe(self) -> str:
        """Return the table of all settings as text; a value is shown if it is not the default."""
        blocks = []
        for row in SETTINGS:
            also = f" (also {', '.join(row.aliases)})" if row.aliases else ""
            default = "" if row.default_of else f", default {_show(row.default)}"
            value = self.peek(row.attribute)
            now = "" if value == _default(row, os.environ) else f"; now {_show(value)}"
            blocks.append(f"{row.env}{also}\n    {row.legal()}{default}{now}\n    {row.doc}")
        return "\n".join(blocks)


def _show(value: Any) -> str:
    if isinstance(value, frozenset):
        return ",".join(sorted(value)) or "none"
    if isinstance(value, bool):
        return str(int(value))
    return "unset" if value is None else str(value)


def _read(row: Setting, environ: Mapping[str, str]) -> Any:
    """Return a row's value: its own name first, then its aliases; empty counts as unset."""
    for name in row.names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if row.translate is not None:
            text = row.translate(name, text)
        try:
            value = _PARSERS[row.type](text)
        except ValueError:
            raise _illegal(name, repr(environ[name]), row.legal(), "the environment") from None
        wanted = _problem(row, value)
        if wanted:
            raise _illegal(name, repr(environ[name]), wanted, "the environment")
        return value
    return _default(row, environ)


def _texts(row: Setting) -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, row.names))


def _default(row: Setting, environ: Mapping[str, str]) -> Any:
    return row.default if row.default_of is None else row.default_of(environ)


def _problem(row: Setting, value: Any) -> str:
    """Return what would be legal, or "" if `value` is."""
    if row.choices and str(value) not in row.choices:
        return row.legal()
    if row.at_least is not None and not value >= row.at_least:
        return row.legal()
    return row.check(value) if row.check is not None else ""


def _illegal(what: str, got: str, wanted: str, where: str = "") -> SettingsError:
    return SettingsError(
        f"{what} has an illegal value",
        got=f"{got}, expected {wanted}",
        where=where,
        next="give it a legal value, or unset it for the default.",
    )


def file_of_rank(path: str) -> str:
    """The file that this process writes to: 'graphs.txt.3' for rank 3 of a job, the path itself outside of a job."""
    rank, _ = rank_in_job()
    return path if rank is None else f"{path}.{rank}"


def rank_in_job() -> tuple[int | None, int]:
    """The rank of this process and the number of processes; the rank is None outside of a job."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    if size == "1" or not (size.isdecimal() and rank.isdecimal()):
        return None, 1
    return int(rank), int(size)


def legal_names() -> list[str]:
    """Return every `LTC_` name that means something, to us or to PyTorch, sorted."""
    ours = {name for row in SETTINGS for name in (row.env, *row.aliases)}
    return sorted(name for name in ours | PYTORCH_NAMES if name.startswith("LTC_"))


def unknown_names(environ: Mapping[str, str]) -> dict[str, str]:
    """The names in `environ` that begin as settings do and are none, in order, and the nearest legal name of each."""
    legal = legal_names()
    # Compared without the prefix that all share, which would make everything look near.
    known = [name[4:] for name in legal]
    unknown = sorted(n for n in environ if n.upper().startswith("LTC_") and n not in legal)
    return {
        n: f"LTC_{difflib.get_close_matches(n[4:].upper(), known, n=1, cutoff=0.0)[0]}"
        for n in unknown
    }


def warn_unknown(environ: Mapping[str, str]) -> None:
    """Warn, in one warning, of the unknown `LTC_` names in `environ`, each with the nearest legal name."""
    hints = [f"{name} (nearest: {near})" for name, near in unknown_names(environ).items()]
    if not hints:
        return
    warnings.warn(
        f"the environment has settings that do not exist: {listed(hints)}. They are ignored; "
        "ltc_core.settings.settings.describe() lists those that exist.",
        stacklevel=2,
    )


def warn_not_here(environ: Mapping[str, str]) -> None:
    """Warn if PJRT_DEVICE, a peer's variable, asks for hardware that has no executor."""
    wanted = environ.get("PJRT_DEVICE", "").upper()
    is_chosen = environ.get("LTC_DEVICE") or environ.get("LTC_TS_CUDA")
    if wanted not in ("", "CPU", *_OF_PJRT) and not is_chosen:
        warnings.warn(
            f"PJRT_DEVICE={environ['PJRT_DEVICE']}: there is no executor for it, graphs run on the CPU; LTC_DEVICE=cpu "
            "says that this is meant, LTC_DEVICE=xla asks torch_xla for it.",
            stacklevel=2,
        )


settings = Settings()
