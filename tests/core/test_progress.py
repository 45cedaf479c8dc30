"""The line that moves while something takes long: seen in a terminal and in a notebook, and nowhere else."""

import io
import sys
import threading
from types import ModuleType

import pytest

from ltc_core import progress


class Terminal(io.StringIO):
    """A stream that says when something was written to it."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.is_written = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.is_written.set()
        return super().write(text)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "_DRAW_S", 0.01)


def test_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.shown("writing a file", lambda: "3 of 10 MiB"):
        assert terminal.is_written.wait(60)
    text = terminal.getvalue()
    assert text.startswith("\r\x1b[K[ltc] writing a file: 0 s, 3 of 10 MiB")
    assert text.endswith("\r\x1b[K")  # nothing of it stays
    assert "\n" not in text


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal(False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with progress.shown("compiling"):
        assert stream.is_written.wait(60)


def test_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal(False)
    monkeypatch.setattr(sys, "stderr", stream)
    before = threading.active_count()
    with progress.shown("compiling"):
        assert threading.active_count() == before
    assert stream.getvalue() == ""


def test_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress.shown("compiling"):
        pass


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_AFTER_S", 60.0)
    with progress.shown("compiling"):
        pass
    assert terminal.getvalue() == ""


def test_an_error_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(KeyError), progress.shown("compiling"):
        assert terminal.is_written.wait(60)
        raise KeyError
    assert terminal.getvalue().endswith("\r\x1b[K")
