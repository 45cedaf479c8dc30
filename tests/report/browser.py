"""A page in headless Chromium, for tests: opened from disk, asked by JavaScript, without a server or a port.

The browser is spoken to by its debugging protocol over two pipes (`--remote-debugging-pipe`). Where it is not
installed, `Page` skips the test.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

__all__ = ["Page"]

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_FROM_BROWSER, _TO_BROWSER = 4, 3  # descriptors that the browser writes to and reads from
_LIMIT_S = 60.0


class Page:
    """A page in a browser of its own, in a `with` block.

    Args:
        file: the page's file.
        width, height: of the window, in pixels.

    Attributes:
        problems: what the page has written to the console as an error, and its exceptions.
        requests: addresses that it has asked for, beside its own.
    """

    def __init__(self, file: Path, width: int = 1320, height: int = 900) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            pytest.skip("Chromium is not installed")
        self._program = program
        self._file = file
        self._size = width, height
        self.problems: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Page:
        self._profile = tempfile.mkdtemp()
        to_read, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser's ends get the numbers it expects, in a shell: nothing else runs between fork and exec.
        command = f'exec "$0" "$@" {_TO_BROWSER}<&{to_read} {_FROM_BROWSER}>&{from_browser}'
        arguments = [
            *_FLAGS,
            f"--window-size={self._size[0]},{self._size[1]}",
            f"--user-data-dir={self._profile}",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, self._program, *arguments, "about:blank"],
            pass_fds=(to_read, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TMPDIR": self._profile},
        )
        os.close(to_read)
        os.close(from_browser)
        self._number = 0
        self._session: str | None = None
        self._buffer = b""
        self._events: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=self._file.absolute().as_uri())
        self._until("Page.loadEventFired")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # and the processes that it has started
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"]["exception"].get("description", found))
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of the first element that a CSS selector finds."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> float:
        """Click an element, and wait until the page is drawn; returns the milliseconds of the click's own work."""
        script = f"""(async () => {{
            const found = document.querySelector({json.dumps(selector)});
            if (!found) throw new Error("nothing is " + {json.dumps(selector)});
            const began = performance.now();
            found.dispatchEvent(new MouseEvent("click", {{bubbles: true}}));
            const took = performance.now() - began;
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
            return took;
        }})()"""
        return float(self.ask(script))

    def picture(self, path: Path, selector: str = "body", most_high: int = 4000) -> None:
        """Write an element as a PNG file, at most so many pixels high."""
        box = self.ask(
            f"(({{x, y, width, height}}) => ({{x: x + scrollX, y: y + scrollY, width, height}}))"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        box["height"] = min(box["height"], most_high)
        found = self._call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=True,
            clip={**box, "scale": 1},
        )
        path.write_bytes(base64.b64decode(found["data"]))

    # -- the protocol ------------------------------------------------------------------------------

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise AssertionError(f"{method}: {found['error']['message']}")
                return found["result"]

    def _until(self, event: str) -> None:
        while event not in self._events:
            self._next()

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _LIMIT_S
        while b"\0" not in self._buffer:
            if time.monotonic() > deadline:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            self.problems.append(str(facts["exceptionDetails"]["exception"].get("description")))
        elif event == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.problems.append(facts["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.problems.append(str([a.get("value") for a in facts["args"]]))
        elif event == "Network.requestWillBeSent":
            url = facts["request"]["url"]
            if url != self._file.absolute().as_uri():
                self.requests.append(url)
