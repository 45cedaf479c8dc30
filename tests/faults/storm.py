"""A storm of faults over a job of two processes; afterwards it must have come to what an undisturbed run comes to.

    python -m tests.faults.storm --seconds 60 --seed 7

Random processes of the job (launcher, ranks, DataLoader workers, compile processes) are killed, told to end, stopped
and continued, and find the disk full; a job that ends is started again, as a cluster's scheduler does. What must hold:

- the weights at the end are those of the undisturbed run, bit for bit;
- a job begins at the newest checkpoint there is; whatever has the name of a checkpoint is whole;
- a job that ends, however it ends, leaves no process behind, and no job hangs;
- after a job that ended well no temporary file is left, neither of checkpoints nor of the launcher.

Every action is printed and logged; the directory is kept if something did not hold. The same seed gives the same
sequence of faults, though not the same moments of the job. The disk is a file system of 1 MB in a mount namespace;
where none can be mounted, it is a limit on the size of files that ranks write.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from ltc_core.errors import CheckpointError
from ltc_dist.checkpoint.layout import LATEST, LOCK, step_name, steps_in
from ltc_dist.checkpoint.reading import read
from tests.launching import ROOT, Job, launcher

TRAINING = str(Path(__file__).with_name("storm_training.py"))
DISK = "1m"
_FULL_FILE_BYTES = (
    512  # of a rank's files while the disk is full, where no file system can be mounted
)
_END_S = 240.0  # a job that is left alone is done by then, on a machine however busy
_ORPHAN_S = 30.0  # processes of a job that has ended are gone by then
_PAUSE_S = (0.05, 2.5)  # between two faults
_STOPPED_S = (0.1, 3.0)
_FULL_S = (0.3, 2.0)
# What Python's multiprocessing and tempfile cannot remove when they are killed, and PyTorch keeps for ever.
_LEFT_BY_KILLED = re.compile(r"pymp-.*|torchinductor_.*|[a-z0-9_]{8}")

ROLES = ("launcher", "rank", "rank", "rank", "worker", "worker", "compiler", "compiler")
FAULTS = ("kill", "kill", "term", "stop", "stop", "disk")


class Storm:
    """Starts jobs, disturbs them, and notes down what does not hold.

    Args:
        directory: an empty one; `disk` in it may be a file system of its own.
        steps: of a job.
        has_disk: whether it is one.
        max_faults: after so many the storm is over.
    """

    def __init__(
        self, directory: Path, seed: int, steps: int, has_disk: bool, max_faults: int
    ) -> None:
        self.directory = directory
        self.problems: list[str] = []
        self.num_faults = 0
        self._steps = steps
        self._has_disk = has_disk
        self._max_faults = max_faults
        self._random = random.Random(seed)
        self._began = time.monotonic()
        self._log = (directory / "storm.log").open("w", buffering=1)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._output: list[str] = []
        self._num_jobs = 0

    def close(self) -> None:
        self._log.close()

    def say(self, text: str, is_shown: bool = True) -> None:
        line = f"{time.monotonic() - self._began:8.2f} {text}"
        print(line, file=self._log)
        if is_shown:
            print(line, flush=True)

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.say(f"PROBLEM {text}")

    # -- a job -------------------------------------------------------------------------------------

    def run(self, runs: Path, until: float) -> str | None:
        """Run one job over the checkpoints in `runs`, disturbed up to a time; give its digest if it came to its end."""
        place = self.directory / f"job-{self._num_jobs}"
        self._num_jobs += 1
        place.mkdir()
        newest = max(steps_in(str(runs)), default=0)
        options = [
            "--nprocs",
            "2",
            "--max-restarts",
            "100",
            "--grace",
            "10",
            "--hang-timeout",
            "60",
        ]
        training = [TRAINING, str(runs), "--steps", str(self._steps)]
        self._output = []
        job = Job(
            [*launcher(*options), *training],
            place,
            LTC_COMPILED_CACHE_DIR=str(self.directory / "compiled"),
            PYTHONFAULTHANDLER="1",
        )
        self.say(f"job {self._num_jobs}: launcher is pid {job.process.pid}")
        readers = [
            threading.Thread(target=self._read, args=(stream,))
            for stream in (job.process.stdout, job.process.stderr)
        ]
        for reader in readers:
            reader.start()
        is_disturbed = self._disturb(job, runs, until)
        self._wait(job)
        self._do_later(everything=True)
        self._orphans(job)
        for reader in readers:
            reader.join()
        code = job.process.wait()
        self.say(f"job {self._num_jobs}: exit code {code}")
        self._look(runs, newest)
        finals = re.findall(r"^.*final (\w+)$", "\n".join(self._output), re.MULTILINE)
        # An attempt whose other rank was killed at its very end is made again, from the last checkpoint.
        if code == 0 and len(set(finals)) != 1:
            self.problem(f"exit code 0, and the results {finals}")
        if code == 0:
            self._left_over(place, runs)
        elif not is_disturbed:
            self.problem(f"exit code {code} of a job that nobody disturbed")
        return finals[0] if code == 0 and finals else None

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            self._output.append(text)
            self.say(f"    | {text}", is_shown=False)
            if "made no step" in text:
                self.problem(f"a job hung: {text}")

    def _wait(self, job: Job) -> None:
        deadline = time.monotonic() + _END_S
        while job.process.poll() is None and time.monotonic() < deadline:
            self._do_later()
            time.sleep(0.05)
        if job.process.poll() is None:
            self.problem(f"a job was not done after {_END_S:g} s")
            for process in job.processes():
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGABRT)  # its stacks go to the log
            time.sleep(1)
            job.process.kill()

    def _orphans(self, job: Job) -> None:
        began = time.monotonic()
        while (left := job.processes()) and time.monotonic() < began + _ORPHAN_S:
            time.sleep(0.05)
        for process in left:
            with process.oneshot():
                self.problem(
                    f"an orphan: pid {process.pid} {process.status()} {process.cmdline()[:8]}"
                )
            process.send_signal(signal.SIGABRT)
            process.kill()
        waited_s = time.monotonic() - began
        if waited_s > 1:
            self.say(f"its processes were gone after {waited_s:.1f} s")

    # -- faults ------------------------------------------------------------------------------------

    def _disturb(self, job: Job, runs: Path, until: float) -> bool:
        """Faults at random moments, until the job ends or the storm does; give whether there were any.

        Of four jobs three are left alone until they train.
        """
        before = self.num_faults
        if time.monotonic() < until and self._random.random() < 0.75:
            while job.process.poll() is None and not self._is_training():
                time.sleep(0.05)
        while time.monotonic() < until and self.num_faults < self._max_faults:
            next_at = time.monotonic() + self._random.uniform(*_PAUSE_S)
            while time.monotonic() < min(next_at, until):
                if job.process.poll() is not None:
                    return self.num_faults > before
                self._do_later()
                time.sleep(0.02)
            self._fault(job, runs)
        return self.num_faults > before

    def _is_training(self) -> bool:
        return any("begins at step" in line for line in list(self._output))

    def _fault(self, job: Job, runs: Path) -> None:
        kind, role = self._random.choice(FAULTS), self._random.choice(ROLES)
        which, seconds = self._random.random(), self._random.random()
        if kind == "disk":
            self._fill(job, runs, _between(_FULL_S, seconds))
            return
        found = [p for p, its in roles(job) if its == role]
        if not found:
            return
        process = found[int(which * len(found))]
        name = f"{role} (pid {process.pid})"
        try:
            if kind == "stop":
                length_s = _between(_STOPPED_S, seconds)
                process.send_signal(signal.SIGSTOP)
                self._at(length_s, lambda: _continue(process))
                self.say(f"SIGSTOP of {name} for {length_s:.2f} s")
            else:
                number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
                process.send_signal(number)
                self.say(f"{number.name} to {name}")
        except psutil.NoSuchProcess:
            return
        self.num_faults += 1

    def _fill(self, job: Job, runs: Path, seconds: float) -> None:
        """Let the disk be full for some seconds."""
        if self._has_disk:
            ballast = runs.parent / "ballast"
            with ballast.open("ab") as file:
                try:
                    while True:
                        os.write(file.fileno(), bytes(512))
                except OSError as error:
                    self.say(f"the disk is full for {seconds:.2f} s ({error.strerror})")
            self._at(seconds, lambda: ballast.unlink(missing_ok=True))
        else:
            ranks = [process for process, role in roles(job) if role == "rank"]
            self.say(f"ranks can write no files for {seconds:.2f} s")
            _limit_files(ranks, _FULL_FILE_BYTES)
            self._at(seconds, lambda: _limit_files(job.processes(), resource.RLIM_INFINITY))
        self.num_faults += 1

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _do_later(self, everything: bool = False) -> None:
        for due, action in list(self._later):
            if everything or time.monotonic() >= due:
                action()
                self._later.remove((due, action))

    # -- what must hold ----------------------------------------------------------------------------

    def _look(self, runs: Path, newest_before: int) -> None:
        """Every checkpoint is whole; none was lost; the job began at the newest one."""
        steps = steps_in(str(runs))
        for step in steps:
            try:
                read(str(runs), step)
            except (CheckpointError, OSError) as error:
                self.problem(f"{step_name(step)} is not whole: {error}")
        newest = max(steps, default=0)
        if newest < newest_before:
            self.problem(f"the newest checkpoint was {newest_before} and is {newest}")
        begins = [int(s) for s in re.findall(r"begins at step (\d+)", "\n".join(self._output))]
        if begins and begins[0] < newest_before:
            self.problem(f"there was a checkpoint of {newest_before}, and it began at {begins[0]}")
        if begins != sorted(begins):
            self.problem(f"attempts began at steps {begins}")
        self.say(f"it began at {begins}; checkpoints of {steps}")

    def _left_over(self, place: Path, runs: Path) -> None:
        """A job that ended well has cleared up after itself and those before it."""
        known = {*(step_name(step) for step in steps_in(str(runs))), LATEST, LOCK}
        for name in {path.name for path in runs.iterdir()} - known:
            self.problem(f"{name} is left beside the checkpoints")
        for path in (place / "tmp").iterdir():
            if not _LEFT_BY_KILLED.fullmatch(path.name):
                self.problem(f"temporary {path.name} is left")
        if (runs / LATEST).read_text().strip() != step_name(self._steps):
            self.problem(f"`latest` says {(runs / LATEST).read_text()!r}")


def roles(job: Job) -> list[tuple[psutil.Process, str]]:
    """The processes of a job, each with what it is."""
    found = []
    ranks: set[int] = set()
    for process in job.processes():
        try:
            command, parent = " ".join(process.cmdline()), process.ppid()
        except psutil.NoSuchProcess:
            continue
        if process.pid == job.process.pid:
            found.append((process, "launcher"))
        elif "ltc_launch.shim" in command and parent == job.process.pid:
            ranks.add(process.pid)
            found.append((process, "rank"))
        elif "inductor/child.py" in command or "cc1plus" in command:
            found.append((process, "compiler"))
        elif parent in ranks:
            found.append((process, "worker"))
    return found


def _continue(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        return


def _limit_files(processes: list[psutil.Process], limit: int) -> None:
    for process in processes:
        try:
            _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, hard))
        except ProcessLookupError:
            continue


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share


def weather(
    directory: Path, seconds: float, seed: int, steps: int, has_disk: bool, max_faults: int
) -> list[str]:
    """Run the undisturbed job, then the storm; give what did not hold."""
    storm = Storm(directory, seed, steps, has_disk, max_faults)
    try:
        storm.say(f"seed {seed}; {seconds:g} s; {'a disk of ' + DISK if has_disk else 'no disk'}")
        expected = storm.run(directory / "calm", until=0.0)
        storm.say(f"undisturbed: {expected}")
        disk = directory / "disk"
        disk.mkdir(exist_ok=True)
        until = time.monotonic() + seconds
        rounds = 0
        while expected is not None and (
            rounds == 0 or (time.monotonic() < until and storm.num_faults < max_faults)
        ):
            runs = disk / f"round-{rounds}"
            rounds += 1
            result = None
            while result is None and not storm.problems:
                result = storm.run(runs, until)
            if storm.problems:
                break
            storm.say(f"round {rounds}: {result}")
            if result != expected:
                storm.problem(f"the weights are {result}, those of the undisturbed run {expected}")
            shutil.rmtree(runs)
        storm.say(f"{rounds} rounds, {storm.num_faults} faults, {len(storm.problems)} problems")
        if not storm.num_faults:
            storm.problem("there were no faults")
    finally:
        storm.close()
    return storm.problems


def _with_disk(directory: Path) -> list[str]:
    """The beginning of a command that sees a small file system at `disk`; empty if none can be mounted."""
    disk = directory / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={DISK} none {disk}"
    begin = [shutil.which("unshare") or "", "-rm", "sh", "-c"]
    if not begin[0] or subprocess.run([*begin, mount], capture_output=True).returncode:
        return []
    return [*begin, f'{mount} && exec "$@"', "sh"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--steps", type=int, default=150, help="of one round")
    parser.add_argument("--faults", type=int, default=10**6, help="at most so many of them")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)  # made by the first call
    args = parser.parse_args()
    if args.directory is not None:
        has_disk = bool(os.environ.get("STORM_DISK"))
        given = args.directory, args.seconds, args.seed, args.steps, has_disk, args.faults
        return bool(weather(*given))
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10**6)
    args.directory = Path(tempfile.mkdtemp(prefix="storm-"))
    begin = _with_disk(args.directory)
    again = [word for name, value in vars(args).items() for word in (f"--{name}", str(value))]
    code = subprocess.run(
        [*begin, sys.executable, "-m", "tests.faults.storm", *again],
        env={**os.environ, "STORM_DISK": "1" if begin else "", "PYTHONPATH": str(ROOT)},
    ).returncode
    if code:
        print(f"seed {args.seed}: see {args.directory}/storm.log", file=sys.stderr)
    else:
        shutil.rmtree(args.directory)
    return code


if __name__ == "__main__":
    sys.exit(main())
