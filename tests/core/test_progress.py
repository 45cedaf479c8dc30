"""The line that moves while something takes long: seen in a terminal and in a notebook, and nowhere else."""

import io
import re
import sys
import threading
from types import ModuleType

import pytest
import torch

import ltc_core as ltc
from ltc_core import progress
from ltc_core.runtime.devices import context


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


def test_a_series_of_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    series = progress.Series("uploading", at_least=3 << 30)
    for _ in range(2):
        series.note(1 << 30)
    assert terminal.getvalue() == ""  # not worth a line yet
    for _ in range(2):
        series.note(1 << 30)
    assert terminal.is_written.wait(60)
    series.end()
    await_no_line()
    text = terminal.getvalue()
    assert re.match(r"\r\x1b\[K\[ltc\] uploading: 0 s, [34].0 GiB", text)
    assert text.endswith("\r\x1b[K")
    series.note(1 << 30)  # another series, which is short
    assert not any(thread.name == "ltc-progress" for thread in threading.enumerate())


def test_a_series_that_goes_on_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_IDLE_S", 0.05)
    progress.Series("uploading", at_least=1).note(1)
    await_no_line()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_uploads_without_a_program_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    uploads = context(0)._uploads
    monkeypatch.setattr(uploads, "_at_least", 1)
    x = torch.ones(4).to(ltc.lazy_device())
    assert terminal.is_written.wait(60)
    x += 1
    ltc.mark_step()
    await_no_line()
    assert "[ltc] uploading to ltc:0: " in terminal.getvalue()


def await_no_line() -> None:
    for thread in threading.enumerate():
        if thread.name == "ltc-progress":
            thread.join(60)
