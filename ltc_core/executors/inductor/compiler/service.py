"""The compile service of this process: a thread that serves requests from the disk cache or by the compiler's process.

A request is a key and a payload that only the builder reads. Its `Outcome` is passed to the callback `done` in the
service's thread. Urgent requests come first, then the order of submission. A request that another process is building
is put off until it is built, so only one rank of a job starts a compiler. Nothing raises: a failure is a sentence in
the outcome. Called by `tiers`; calls `artifacts` and `compiler_process`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ltc_core import metrics
from ltc_core.executors.artifacts import Artifacts
from ltc_core.executors.inductor.compiler.compiler_process import Answer, CompilerProcess
from ltc_core.settings import settings

__all__ = ["CompileService", "Outcome", "service"]

_BUILDER = "ltc_core.executors.inductor.compiler.build_artifact:build"
_IDLE_S = 120.0  # the compiler's process, 300 MB, is ended after it was idle for this time
_LOOK_AGAIN_S = 0.25
_BRIEFLY_S = 60.0
_JOIN_TIMEOUT_S = 5.0
_LOG_NAME_LENGTH = 16
_NO_PLACE = "the compiled program cannot be kept"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a request.

    Attributes:
        path: directory of the artifact, or None.
        problem: why there is none, without a full stop; "" if the process ends, or the service was shut down.
        op: name of the op that the compiler refused, if it is known.
        seconds: duration of the build.
        from_cache: whether another process or run had built it.
        facts: the facts that the builder returned.
    """

    path: Path | None = None
    problem: str = ""
    op: str = ""
    seconds: float = 0.0
    from_cache: bool = False
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def failed(cls, problem: str) -> Outcome:
        return cls(problem=problem)

    @property
    def is_dropped(self) -> bool:
        """Whether the request was dropped by a shutdown: no message is printed and it is not tried again."""
        return self.path is None and not self.problem


class _Request:
    """A requested key, and the callbacks of all who requested it."""

    def __init__(self, key: str, payload: bytes, order: int) -> None:
        self.key = key
        self.payload = payload
        self.order = order
        self.urgent = False
        self.callbacks: list[Callable[[Outcome], None]] = []
        self.not_before = 0.0
        self.put_off_at = 0.0


class CompileService:
    """Builds artifacts in the background.

    Args:
        builder: 'module:function' of `function(payload: bytes, directory: Path) -> dict`, imported in the compiler's
            process. It writes files into the directory and returns facts that JSON can hold; it may raise anything.
        root: directory of the artifacts (default: `settings.compiled_cache_dir`).
    """

    def __init__(self, builder: str = _BUILDER, root: Path | None = None) -> None:
        self._builder = builder
        self._given_root = root
        self._process: CompilerProcess | None = None
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._requests: dict[str, _Request] = {}
        self._busy_since_s = 0.0
        self._order = 0
        self._thread: threading.Thread | None = None
        self._is_shut_down = False
        self._unusable = ""
        self._places: list[Artifacts] = []  # the last one is written to
        self._temporary: Path | None = None

    @property
    def _root(self) -> Path:
        named = settings.compiled_cache_dir or Path(settings.cache_dir) / "compiled"
        return self._given_root or Path(named).expanduser().absolute()

    # -- for the callers ---------------------------------------------------------------------------

    def available(self) -> str:
        """Reason why nothing can be compiled, without a full stop; "" if there is none."""
        if self._unusable:
            return self._unusable
        if not sys.executable or getattr(sys, "frozen", False):
            return f"this Python cannot be started again (sys.executable is {sys.executable!r})"
        compiler = os.environ.get("CXX") or "g++"  # as PyTorch's compiler chooses it
        if shutil.which(compiler) is None:
            named = "no g++ on the PATH" if compiler == "g++" else f"CXX names {compiler!r}"
            return f"there is no C++ compiler ({named})"
        return ""

    @property
    def place(self) -> Path:
        """The directory that artifacts are written to."""
        return self._places[-1].root if self._places else self._root

    def is_cached(self, key: str) -> bool:
        """Whether there is an artifact on disk, damaged or not. Cost: one system call a directory."""
        return any(place.has(key) for place in self._places or [Artifacts(self._root)])

    def submit(
        self, key: str, payload: bytes, done: Callable[[Outcome], None], urgent: bool = False
    ) -> None:
        """Request an artifact; `done` is called once, in the service's thread.

        A key that is queued or being built is not built twice. After `shutdown`, `done` is called at once, in the
        caller's thread, with a dropped outcome.
        """
        with self._changed:
            if not self._is_shut_down:
                request = self._requests.get(key)
                if request is None:
                    if not self._requests:
                        self._busy_since_s = time.monotonic()
                    self._order += 1
                    request = self._requests[key] = _Request(key, payload, self._order)
                request.callbacks.append(done)
                request.urgent |= urgent
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._loop, name="ltc-compiler", daemon=True
                    )
                    self._thread.start()
                self._changed.notify_all()
                return
        done(Outcome())

    @property
    def is_busy(self) -> bool:
        """Whether something is being built, and has been for a minute at most. Cost: 0.1 us."""
        return bool(self._requests) and time.monotonic() - self._busy_since_s < _BRIEFLY_S

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until every `done` was called; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._requests, timeout_s)

    def shutdown(self) -> None:
        """Kill the compiler's process with all that it started, and drop all requests."""
        with self._changed:
            self._is_shut_down = True
            thread, process = self._thread, self._process
            self._changed.notify_all()
        if process is not None:
            process.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def after_fork(self) -> None:
        """In a forked child: start without requests; those of the parent are built by the parent."""
        if self._process is not None:
            self._process.forget()
            self._process = None
        self._begin()

    # -- the thread --------------------------------------------------------------------------------

    def _loop(self) -> None:
        while (request := self._next()) is not None:
            try:
                outcome = self._serve(request)
            except Exception as error:  # a bug, or an error of the disk
                _report()
                outcome = Outcome.failed(f"compiling failed ({type(error).__name__}: {error})")
            if outcome is not None:
                self._finish(request, outcome)
        if self._process is not None:
            self._process.stop()
        for request in list(self._requests.values()):
            self._finish(request, Outcome())

    def _next(self) -> _Request | None:
        """The next request to serve, waited for; None after a shutdown."""
        with self._changed:
            while not self._is_shut_down:
                now = time.monotonic()
                waiting = self._requests.values()
                ready = [request for request in waiting if request.not_before <= now]
                if ready:
                    return min(ready, key=lambda request: (not request.urgent, request.order))
                if waiting:
                    self._changed.wait(min(request.not_before for request in waiting) - now)
                elif self._process is None or not self._process.is_running:
                    self._changed.wait()
                elif not self._changed.wait(_IDLE_S):
                    self._process.stop()
            return None

    def _finish(self, request: _Request, outcome: Outcome) -> None:
        """Call all callbacks of a request, also those added meanwhile."""
        while True:
            with self._changed:
                if not request.callbacks:
                    del self._requests[request.key]
                    self._changed.notify_all()
                    return
                done = request.callbacks.pop(0)
            try:
                done(outcome)
            except BaseException:  # an error of the callback: report it, and call the others
                _report()

    def _serve(self, request: _Request) -> Outcome | None:
        """Outcome of a request, found or built; None if it is put off."""
        started = time.monotonic()
        if not self._places:
            problem = self._open_places()
            if problem:
                return Outcome.failed(problem)
        found = self._find(request.key)
        if found is not None:
            return found
        if self._unusable:
            return Outcome.failed(self._unusable)
        answer = self._build(request)
        if answer is None:
            return self._put_off(request)
        if answer.kind == "disk" and self._use_temporary_place(answer.text):
            return self._serve(request)
        return dataclasses.replace(
            self._outcome(request.key, answer), seconds=time.monotonic() - started
        )

    def _find(self, key: str) -> Outcome | None:
        for place in self._places:
            path = place.find(key)
            if path is not None:
                metrics.count("PersistentCacheHit")
                return Outcome(path, from_cache=True, facts=place.facts(path))
        return None

    def _build(self, request: _Request) -> Answer | None:
        """Answer of the compiler's process; None if another process is building this key."""
        place = self._places[-1]
        try:
            with place.claim(request.key) as is_mine:
                if not is_mine:
                    return None
                path = place.find(request.key)  # another process may have built it meanwhile
                if path is not None:
                    return Answer("found", str(path))
                answer = self._compiler(place.root).ask(request.key, request.payload)
        except OSError as error:
            return Answer("disk", str(error))
        if answer.kind in ("crashed", "ended"):
            with contextlib.suppress(OSError):  # the next build sweeps again
                place.sweep()
        return answer

    def _compiler(self, root: Path) -> CompilerProcess:
        with self._changed:
            if self._process is None or self._process.root != root:
                if self._process is not None:
                    self._process.stop()
                self._process = CompilerProcess(self._builder, root)
            if self._is_shut_down:
                self._process.end()
            return self._process

    def _put_off(self, request: _Request) -> Outcome | None:
        now = time.monotonic()
        request.not_before = now + _LOOK_AGAIN_S
        request.put_off_at = request.put_off_at or now
        # At idle priority the other one may take long; nobody but a step that waits for it minds.
        is_waited_for = settings.compile == "sync"
        if not is_waited_for or now - request.put_off_at < settings.compile_timeout_s:
            return None
        limit = f"{settings.compile_timeout_s:g} s"
        return Outcome.failed(f"another process was not done compiling it after {limit}")

    def _outcome(self, key: str, answer: Answer) -> Outcome:
        if answer.kind in ("built", "found"):
            is_found = answer.kind == "found"
            metrics.count("PersistentCacheHit" if is_found else "PersistentCacheMiss")
            metrics.count("EvictedArtifact", answer.evicted)
            path = Path(answer.text)
            return Outcome(path, from_cache=is_found, facts=self._places[-1].facts(path))
        if answer.kind == "ended":
            return Outcome()
        problem = f"{_NO_PLACE} ({answer.text})" if answer.kind == "disk" else answer.text
        if settings.debug >= 2 and self._process is not None:
            problem += _kept_log(self._places[-1].root, key, self._process.log())
        if answer.kind == "unusable":
            self._unusable = problem
        return Outcome(problem=problem, op=answer.op)

    # -- where artifacts are kept ------------------------------------------------------------------

    def _open_places(self) -> str:
        """Make the directories for artifacts; "" or the reason why that failed."""
        place = Artifacts(self._root, settings.compiled_cache_read_only)
        try:
            place.prepare()
        except OSError as error:
            why = str(error)
            return "" if self._use_temporary_place(why) else f"{_NO_PLACE} ({why})"
        self._places = [place]
        if place.is_read_only and not self._use_temporary_place(""):
            return _NO_PLACE
        return ""

    def _use_temporary_place(self, why: str) -> bool:
        """Build in a temporary directory of this process from now on; False if it already does, or if that failed."""
        if self._temporary is not None or self._is_shut_down:
            return False
        try:
            self._temporary = Path(tempfile.mkdtemp(prefix="ltc-compiled-"))
        except OSError:  # no room here either; the outcome reports `why`
            return False
        self._places.append(Artifacts(self._temporary))
        if self._places[0].is_read_only:
            return True
        print(
            f"[ltc] compiled programs cannot be kept in {self._root}, the next run compiles them again: {why}. "
            "Next: make room there, or let LTC_CACHE_DIR name a directory that can be written.",
            file=sys.stderr,
            flush=True,
        )
        return True


def _report() -> None:
    """Print the error being handled, as Python prints one that ends a thread."""
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def _kept_log(root: Path, key: str, log: bytes) -> str:
    """Write the compiler's output to a file; text for the outcome that names the file."""
    path = root / "logs" / f"{key[:_LOG_NAME_LENGTH]}.log"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(log)
    except OSError as error:
        return f"; what it printed cannot be kept ({error})"
    return f"; what it printed is in {path}"


# -- the service of this process -------------------------------------------------------------------

_service: CompileService | None = None
_lock = threading.Lock()


def service() -> CompileService:
    """The service of this process, made on first use."""
    global _service
    with _lock:
        if _service is None:
            _service = CompileService()
        return _service


def at_exit() -> None:
    if _service is not None:
        _service.shutdown()


def after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    if _service is not None:
        _service.after_fork()
