"""Jobs as a user starts them: `Job` runs a command, and sees afterwards that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from ltc_dist.processes import child
from tests import prepared

__all__ = ["Job", "launcher", "names_in"]

ROOT = Path(__file__).parents[1]
# PyTorch keeps its compile cache (torchinductor_USER) among the temporary files, one for all programs.
_COMPILE_CACHE = "torchinductor_"
_LEAVE_S = 2.0  # for what a killed launcher leaves


def launcher(*options: str) -> list[str]:
    """The command line of the launcher, up to the script."""
    return [sys.executable, "-m", "ltc_launch", *options]


def names_in(directory: Path) -> list[str]:
    """What is in a directory, but for PyTorch's compile cache, which is made where that is imported."""
    return [p.name for p in directory.iterdir() if not p.name.startswith(_COMPILE_CACHE)]


class Job:
    """A command that runs, and all processes that come from it; Python's programs start in `prepared`.

    Args:
        directory: an empty one, where it runs; its temporary files go to `tmp` in it.
        ignores_interrupts: as under `nohup ... &`.
        is_prepared: whether it may be a fork of a process that has imported PyTorch (`prepared`).
        environ: more variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        ignores_interrupts: bool = False,
        is_prepared: bool = True,
        **environ: str,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._tmp = directory / "tmp"
        self._tmp.mkdir(exist_ok=True)
        self._shared_memory = _shared_memory()
        kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self._tmp), prepared.MARK: self._mark}
        start = prepared.start if is_prepared else prepared.start_alone
        more = {"starts_processes": True} if is_prepared else {}
        self.process = start(
            command,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**kept, **places, **environ},
            start_new_session=True,
            ignores_interrupts=ignores_interrupts,
            **more,
        )

    def wait_for(self, line: str, times: int = 1) -> None:
        """Read the output up to lines that end so."""
        assert self.process.stdout is not None
        seen = []
        while times:
            read = self.process.stdout.readline().decode()
            assert read, f"no {line!r} in {seen}, {self.process.stderr.read().decode()}"  # type: ignore[union-attr]
            seen.append(read)
            times -= read.rstrip("\n").endswith(line)

    def processes(self) -> list[psutil.Process]:
        """All processes of the job that run."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(prepared.MARK) == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def end(self, within_s: float = 100.0, is_killed: bool = False) -> tuple[int, str, str]:
        """Wait for the end; give exit code, output and errors. Nothing may be left of the job.

        Args:
            within_s: a bound many times what it takes; the test fails, and the job is killed, if it is passed.
            is_killed: whether processes were killed that could not remove their temporary directories then. The
                next launcher removes that of a launcher; those of Python's multiprocessing stay.
        """
        is_over = True
        try:
            out, err = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            is_over = False
            self._tell_stacks()
        finally:
            left = self._left(is_killed)
        if not is_over:
            out, err = self.process.communicate(timeout=within_s)
        said = out.decode(errors="replace"), err.decode(errors="replace")
        assert is_over, "\n".join([f"not over after {within_s:.0f} s", *said])
        assert not left, left
        return self.process.returncode, *said

    def _tell_stacks(self) -> None:
        """Have the ranks of a job that hangs write where their threads are: each has a signal registered for it."""
        for process in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                caught = re.search(
                    r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text()
                )
                if caught and int(caught[1], 16) >> (child.STACKS - 1) & 1:
                    process.send_signal(child.STACKS)
        time.sleep(_LEAVE_S)

    def _left(self, is_killed: bool) -> list[str]:
        deadline = time.monotonic() + _LEAVE_S
        while (processes := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in processes]
        for process in processes:
            process.kill()
        while (names := self._shared_memory_left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        left += [f"/dev/shm/{name}" for name in names]
        excused = (_COMPILE_CACHE, *(("ltc-launch-", "pymp-") if is_killed else ()))
        kept = [path for path in self._tmp.iterdir() if not path.name.startswith(excused)]
        left += [f"temporary {p.name}" for p in kept if not (is_killed and _is_probe(p))]
        return left

    def _shared_memory_left(self) -> set[str]:
        new = _shared_memory() - self._shared_memory
        return new - _mapped() if new else new


def _shared_memory() -> set[str]:
    """Names of shared memory that no living process uses: tests that run beside this one have theirs."""
    names = {name for name in os.listdir("/dev/shm") if not _is_named_after_a_process(name)}
    if "PYTEST_XDIST_WORKER" in os.environ:
        # These do not tell whose they are: semaphores of multiprocessing, and tensors on their way between processes.
        # Those of a test beside this one come and go, and stay if it kills the process that sends one.
        names = {name for name in names if not name.startswith(("sem.mp-", "torch_"))}
    return names


def _is_named_after_a_process(name: str) -> bool:
    found = re.search(r"_(\d+)(_|$)", name)
    return found is not None and psutil.pid_exists(int(found[1]))


def _mapped() -> set[str]:
    """Names of shared memory that some process has mapped, such as the semaphores of multiprocessing."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found.update(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return found


def _is_probe(path: Path) -> bool:
    """Tell whether a file is what `tempfile` tries a directory with: a kill may come before it is removed."""
    is_named_so = re.fullmatch("[a-z0-9_]{8}", path.name) is not None
    return is_named_so and path.is_file() and path.read_bytes() in (b"", b"blat")
