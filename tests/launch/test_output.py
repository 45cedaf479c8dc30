"""What processes print: whole lines of any length, whoever prints meanwhile, and nothing of it in TMPDIR."""

import errno
import io
import textwrap
from pathlib import Path

import pytest

from ltc_launch.output import Output, _Stream
from tests.launching import Job, launcher, names_in


def printed(*chunks: bytes) -> str:
    """What comes of a process that writes these chunks."""
    screen = io.StringIO()
    output = Output()
    with open(output.pipe("[0] ", screen), "wb", buffering=0) as end:
        output.start()
        for chunk in chunks:
            end.write(chunk)
    output.stop()
    return screen.getvalue()


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ((b"a\nb\n",), "[0] a\n[0] b\n"),
        ((b"a", b"b", b"c\nd"), "[0] abc\n[0] d\n"),
        ((b"x" * 300_000, b"y\n"), "[0] " + "x" * 300_000 + "y\n"),
        ((b"10%\r", b"20%\r\n", b"30%\r", b"\n", b"\n"), "[0] 10%\n[0] 20%\n[0] 30%\n[0] \n"),
        ((b"caf\xc3", b"\xa9 \xff\n"), "[0] caf\u00e9 \ufffd\n"),
        ((), ""),
    ],
)
def test_lines_of_chunks(chunks: tuple[bytes, ...], expected: str) -> None:
    assert printed(*chunks) == expected


def test_lines_of_two_processes_that_write_by_turns() -> None:
    screen = io.StringIO()
    output = Output()
    with (
        open(output.pipe("[0] ", screen), "wb", buffering=0) as first,
        open(output.pipe("[1] ", screen), "wb", buffering=0) as second,
    ):
        output.start()
        for _ in range(50):
            first.write(b"a" * 9000)
            second.write(b"b" * 9000 + b"\n")
        first.write(b"\n")
    output.stop()
    lines = screen.getvalue().splitlines()
    assert sorted(lines) == ["[0] " + "a" * 450_000, *["[1] " + "b" * 9000] * 50]


def test_a_file_that_grows(tmp_path: Path) -> None:
    screen = io.StringIO()
    output = Output()
    path = tmp_path / "stdout.log"
    output.file(str(path), "[3] ", screen)
    output.start()
    with path.open("ab", buffering=0) as file:
        file.write(b"x" * 100_000)
        file.write(b"y\nrest")
    output.stop()
    assert screen.getvalue() == "[3] " + "x" * 100_000 + "y\n[3] rest\n"


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_processes_do_not_wait_for_a_screen_that_is_gone() -> None:
    output = Output()
    with open(output.pipe("", Closed()), "wb", buffering=0) as end:
        output.start()
        for _ in range(100):
            end.write(b"x" * 9999 + b"\n")  # many times what a pipe holds
    output.stop()


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_that_are_lost_on_a_full_disk_are_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Stream, "_was_told", False)
    output = Output()
    with open(output.pipe("", Full()), "wb", buffering=0) as end:
        output.start()
        for _ in range(3):
            end.write(b"line\n")
    output.stop()
    (told,) = capsys.readouterr().err.splitlines()
    assert "lines of the processes are lost: No space left on device. Next: make room" in told


def test_a_screen_that_does_not_know_a_letter() -> None:
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, "ascii")
    output = Output()
    with open(output.pipe("", screen), "wb", buffering=0) as end:
        output.start()
        end.write("caf\u00e9\nand on\n".encode())
    output.stop()
    assert raw.getvalue() == b"caf\\xe9\nand on\n"


LONG = """
    import os, sys
    rank, length = os.environ["RANK"], 9000
    for k in range(200):
        print(rank * length)
        print("e" + rank * length, file=sys.stderr)
    files = [f for d, _, names in os.walk(os.environ["TMPDIR"]) for f in (os.path.join(d, n) for n in names)]
    assert sum(map(os.path.getsize, files)) < 100_000, files
    sys.stdout.write(rank * length)
"""


@pytest.mark.dist
@pytest.mark.parametrize("options", [(), ("--log-dir", "logs")], ids=["pipes", "files"])
def test_long_lines_of_several_processes(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(LONG))
    code, out, err = Job([*launcher("--nprocs", "2", *options), "train.py"], tmp_path).end()
    assert code == 0, err[-2000:]
    assert sorted(out.splitlines()) == [
        f"[{k}] {str(k) * 9000}" for k in (0, 1) for _ in range(201)
    ]
    assert sorted(err.splitlines()) == [
        f"[{k}] e{str(k) * 9000}" for k in (0, 1) for _ in range(200)
    ]
    if options:
        kept = {p.parent.name: p.read_text() for p in (tmp_path / "logs").rglob("stdout.log")}
        assert kept == {k: f"{k * 9000}\n" * 200 + k * 9000 for k in "01"}
        assert names_in(tmp_path / "tmp") == []
