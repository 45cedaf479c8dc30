"""The parent's hold on one peer: starts its process, asks it, watches its memory, ends it.

While it waits for an answer it looks at the memory of the peer's own children (a compiler), but not
while the peer is timed. The other end is peer_child.py or
breadth_child.py. Goes to peers.py and breadth.py.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path(__file__).parents[1]
_WATCH_EVERY_S = 0.1
_END_WITHIN_S = 30.0


class PeerFailed(Exception):
    """A peer cannot train this model; the text is its reason."""


class PeerProcess:
    """One process that trains one model. `hello` is what it said when the first loss was there.

    Args:
        python: the interpreter, which has what the peer needs.
        environ: variables in addition to those of this process.
        timeout_s: the longest that any answer may take.
        module: what the process runs; it answers commands as peer_child.py does.

    Raises:
        PeerFailed: there is no such interpreter, or the first step failed.
    """

    def __init__(
        self, python: str, peer: str, model: str, device: str, environ: Mapping[str, str],
        timeout_s: float, module: str = "benchmarks.peer_child",
    ) -> None:  # fmt: skip
        self._timeout_s = timeout_s
        self._pending = b""
        self._said = tempfile.TemporaryFile()
        self.children_peak_bytes = 0
        try:
            self._process = subprocess.Popen(
                [python, "-m", module, peer, model, device],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT), **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
                process_group=0,
            )
        except OSError as error:
            self._said.close()
            raise PeerFailed(f"{python} cannot be started: {error.strerror}") from None
        try:
            self.hello: dict[str, Any] = self._answer(watch=True)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process's id, which is also that of its group."""
        return self._process.pid

    # ---- asking ----------------------------------------------------------------------------------

    def ask(self, command: str, watch: bool = False, **arguments: object) -> Any:
        """Send a command and return the answer; `watch` also looks at the children's memory.

        Raises:
            PeerFailed: the peer failed, ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            raise PeerFailed(self._last_words()) from None
        return self._answer(watch)

    def _answer(self, watch: bool) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PeerFailed(f"no answer in {self._timeout_s:.0f} s")
            wait_s = min(left_s, _WATCH_EVERY_S) if watch else left_s
            if select.select([self._process.stdout], [], [], wait_s)[0]:
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise PeerFailed(self._last_words())
                self._pending += read
            elif watch:
                self._watch_children()
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        """Say how a process ended that did not say it itself."""
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {last}" if last else how

    # ---- memory ----------------------------------------------------------------------------------

    def peak_bytes(self) -> int:
        """Return the most the process had in memory, its children not counted."""
        return _peak_bytes(self.pid)

    def _watch_children(self) -> None:
        now = sum(_peak_bytes(pid) for pid in _descendants(self.pid))
        self.children_peak_bytes = max(self.children_peak_bytes, now)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the process end; a process that does not is killed, and that is said."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:  # killed before
            return
        self._process.stdin.close()
        try:
            code = self._process.wait(_END_WITHIN_S)
            if code:
                print(f"  ended with {self._last_words()}", file=sys.stderr)
        except subprocess.TimeoutExpired:
            print(f"  did not end in {_END_WITHIN_S:.0f} s: killed", file=sys.stderr)
        self.kill()

    def kill(self) -> None:
        """End the process at once, with its children if it still runs."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            assert file is not None
            file.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


def _peak_bytes(pid: int) -> int:
    """Read VmHWM; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    values = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(values[0]) * 1024 if values else 0


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found
