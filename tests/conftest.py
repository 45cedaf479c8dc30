"""Leak checks around every test: what a test starts, it must also end.

A test fails if it leaves behind a thread, a child process, a changed environment variable, a file
in its TMPDIR, a listening port, or values on a lazy device. Each test has a TMPDIR of its own. What
belongs to the process and not to a test is in the tables below, each row with its reason. A test
that passes pays half a millisecond; one that seems to leak gets `GRACE_S` to end what it started.
"""

import functools
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests import prepared

# A compile takes ten seconds of both cores: only tests of compiled programs ask for it.
os.environ.setdefault("LTC_COMPILE", "off")
os.environ.setdefault("LTC_CHECK_GRAPHS", "1")
# Tests use all cores, of which a compiler at idle priority would get nothing.
os.environ.setdefault("LTC_COMPILE_PRIORITY", "normal")
# Whether a step runs in parts is measured, and tests count programs.
os.environ.setdefault("LTC_STREAMING", "never")
os.environ.setdefault("LTC_AT_ONCE", "never")
# Tests run side by side: an OpenMP thread that spins while it waits takes a core from another test. Op by op that makes
# four of five seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A thousand processes import the runtime: they read its compiled modules, and write their lines whole.
for _name in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):
    os.environ.pop(_name, None)
sys.dont_write_bytecode = False
if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as in `nohup make test &`: processes of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("LTC_DEVICE") == "xla":
    # Traced ops import it; what it makes in TMPDIR goes at exit.
    importlib.import_module("torch.distributed.nn")

GRACE_S = 2.0
RANDOM_STATE_BYTES = 5056  # what torch.Generator().get_state() has

PROCESS_THREADS = (
    "ltc-",  # the runtime's workers, one for a device, live as long as the process
    "pytest_timeout",
)
PROCESS_CHILDREN = (
    "multiprocessing.resource_tracker",  # Python's, one for the life of the process
    "multiprocessing.forkserver",
    "torch_shm_manager",  # torch's, started by the first tensor shared through files
    prepared.MODULE,  # the fork server; its programs count as children of this process
)
PROCESS_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "TMPDIR",  # set here
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it when it first compiles
    "KMP_INIT_AT_FORK",  # set by torch
    # set before torch_xla's library is loaded
    "CPU_NUM_DEVICES",
    "GRPC_VERBOSITY",
    "PJRT_DEVICE",
    "TF_CPP_MIN_LOG_LEVEL",
    "XLA_FLAGS",
    "TPU_SKIP_MDS_QUERY",  # set by jax
)
PROCESS_FILES = (
    "torchinductor_",  # torch's compile cache, reused by later tests
    "export_root",  # of torch.export in torch 2.9
    "pymp-",  # multiprocessing's directory, one for the life of the process
)
# In a directory that torch 2.9 makes with the first optimizer, and removes if the process ends as it should.
REMOTE_MODULE = "_remote_module_non_scriptable.py"


def pytest_configure(config: pytest.Config) -> None:
    """Keep the paths of temporary directories short where pytest-xdist runs the tests.

    Python's multiprocessing binds sockets in them, and the path of a socket has 107 characters at most.
    """
    if hasattr(config, "workerinput"):
        config.option.basetemp = None  # a directory of its own, as without xdist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes and compilers come first: so none of them runs alone at the end."""
    items.sort(key=lambda item: "tests/core/" in item.nodeid and "inductor" not in item.nodeid)


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection: a pass over them takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_passes_over_what_others_left() -> None:
    """Exempt what earlier files left, PyTorch's caches, and what one of them unfroze: a pass takes up to seconds."""
    gc.collect()
    gc.freeze()


def _threads() -> set[threading.Thread]:
    """Running threads, less those that Python did not start (autograd's): they are torch's."""
    return {
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith(PROCESS_THREADS)
    }


def _children() -> dict[int, str]:
    multiprocessing.active_children()  # collects those that have ended
    found = {}
    kept = sys.modules.get("ltc_dist.processes.kept_zygote")
    kept_pid = kept.pid() if kept is not None else None  # one for all calls of `spawn`
    for pid in _child_pids():
        if pid == kept_pid:
            continue
        try:
            command = " ".join(psutil.Process(pid).cmdline()) or "(ended, not waited for)"
        except psutil.NoSuchProcess:
            continue
        if not any(name in command for name in PROCESS_CHILDREN):
            found[pid] = command[:200]
    return found


def _child_pids() -> list[int]:
    """Process ids of the children; from /proc where it says so, 20 times cheaper than psutil."""
    pids: list[int] = []
    for parent in (os.getpid(), *prepared.server_pids()):
        tasks = Path(f"/proc/{parent}/task")
        if not (tasks / str(parent) / "children").exists():
            pids += [child.pid for child in psutil.Process(parent).children()]
            continue
        for task in tasks.iterdir():
            try:
                pids += map(int, (task / "children").read_text().split())
            except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
                continue
    return pids


def _variables() -> dict[str, str]:
    return {name: v for name, v in os.environ.items() if name not in PROCESS_VARIABLES}


def _sockets() -> dict[str, int]:
    """The open sockets of this process: the name /proc gives each, and its descriptor."""
    found: dict[str, int] = {}
    if not os.path.isdir("/proc/self/fd"):
        return found
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the one listdir itself had open
            continue
        if target.startswith("socket:"):
            found[target] = int(descriptor)
    return found


def _listening_port(descriptor: int) -> int | None:
    """The port a socket listens on, if it does. (Unix sockets show up as files in TMPDIR.)"""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or copy.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        return int(copy.getsockname()[1])


def _device_bytes() -> dict[int, int]:
    """Bytes held by the values of each lazy device in use; imports nothing."""
    runtime = sys.modules.get("ltc_core.runtime.devices")
    if runtime is None:
        return {}
    return {context.device.index: context.memory.used_bytes for context in runtime.contexts()}


def _settle_devices() -> list[str]:
    """Run what is still recorded; return the errors of the background that no one was told of.

    So nothing of one test is run, or raised, in the next.
    """
    runtime = sys.modules.get("ltc_core.runtime.devices")
    unseen = []
    for context in runtime.contexts() if runtime is not None else ():
        try:
            context.wait()
        except Exception as error:
            unseen.append(f"nobody saw this error of the background: {error}")
    return unseen


def _forget_the_script() -> None:
    """Forget what is known of the script of this process: whether it marks its steps, its optimizers, its uploads."""
    found_steps = sys.modules.get("ltc_core.runtime.found_steps")
    if found_steps is not None:
        found_steps._script.__init__()
        for found in found_steps._of_device.values():
            found.__init__(found._trace, found._cut)
    novelty = sys.modules.get("ltc_core.program.novelty")
    if novelty is not None:  # most graphs of tests are new
        novelty.novelty.note_again()
    tiers = sys.modules.get("ltc_core.executors.inductor.tiers")
    if tiers is not None:
        tiers._look_budget.__init__()


def _cached_results(module: ModuleType) -> int:
    """How many results the functions of a test module keep that are under functools.cache."""
    return sum(
        value.cache_info().currsize
        for value in vars(module).values()
        if isinstance(value, functools._lru_cache_wrapper)
    )


class Snapshot:
    """What the process holds at one moment, and what a later moment has in excess of it."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.cached_results = _cached_results(module)
        self.threads = _threads()
        self.children = _children()
        self.variables = _variables()
        self.sockets = _sockets()
        self.bytes = _device_bytes()

    def leaks(self, tmpdir: Path) -> list[str]:
        found = [f"thread {t.name!r} is still there" for t in _threads() - self.threads]
        found += [
            f"child process {pid} is still there: {command}"
            for pid, command in _children().items()
            if pid not in self.children
        ]
        found += [
            f"{grown} bytes of values are still on device {index}"
            for index, grown in self.leaked_bytes().items()
        ]
        for name, descriptor in _sockets().items():
            if name not in self.sockets and (port := _listening_port(descriptor)) is not None:
                found.append(f"port {port} is still listened on")
        found += [
            f"file {path.name!r} was left in TMPDIR"
            for path in sorted(tmpdir.iterdir())
            if not (path.name.startswith(PROCESS_FILES) or (path / REMOTE_MODULE).exists())
        ]
        variables = _variables()
        for name in sorted(self.variables.keys() | variables.keys()):
            if self.variables.get(name) != variables.get(name):
                found.append(
                    f"environment variable {name} was {self.variables.get(name)!r} "
                    f"and is {variables.get(name)!r}"
                )
        return found

    def leaked_bytes(self) -> dict[int, int]:
        """Bytes of each device in excess of before, and of a random state made on first use.

        A test that fills a cache of its module (functools.cache) keeps values on purpose.
        """
        if _cached_results(self.module) != self.cached_results:
            return {}
        return {
            index: grown
            for index, used in _device_bytes().items()
            if (grown := used - self.bytes.get(index, 0)) > RANDOM_STATE_BYTES
        }

    def restore(self) -> None:
        """Put the environment back, so that one leak is reported once."""
        for name in _variables().keys() - self.variables.keys():
            del os.environ[name]
        os.environ.update(self.variables)


@pytest.fixture(scope="session")
def _tmp_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Both of these directories outlive a test, so they are made before a test's TMPDIR is set.
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()
    root = Path(tempfile.mkdtemp(prefix="ltc-tests-"))
    yield root
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
def _no_leaks(_tmp_root: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    tmpdir = _tmp_root / "tmp"
    tmpdir.mkdir(exist_ok=True)
    outer_variable, outer_tempdir = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmpdir)
    before = Snapshot(request.module)
    yield
    unseen = _settle_devices()
    _forget_the_script()
    if before.leaked_bytes():
        gc.collect()
    deadline = time.monotonic() + GRACE_S
    while (leaks := before.leaks(tmpdir)) and time.monotonic() < deadline:
        time.sleep(0.02)
        # A thread of autograd may have held what a backward that failed has left.
        if before.leaked_bytes():
            gc.collect()
    before.restore()
    tempfile.tempdir = outer_tempdir
    if outer_variable is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = outer_variable
    if leaks or unseen:
        for path in tmpdir.iterdir():
            if not path.name.startswith(PROCESS_FILES):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        pytest.fail("this test leaks:\n  " + "\n  ".join(leaks + unseen), pytrace=False)
