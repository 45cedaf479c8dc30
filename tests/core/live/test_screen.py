"""Text at the bottom of a terminal: drawn, moved down by what is printed, and erased at the end."""

import io
import os

from ltc_core.live.screen import Screen, above, fitted, printable


def test_lines_are_cut_to_the_width() -> None:
    assert fitted("abc", 3) == "abc"
    assert fitted("abcdefgh", 6) == "abc..."
    assert fitted("日本語", 6) == "日本語"
    assert fitted("日本語日本語", 7) == "日本..."
    assert fitted("e\u0301" * 3, 3) == "e\u0301" * 3


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[0m\tb\u2028") == r"a\x1b[0m\tb\u2028"


def test_what_is_printed_comes_above_and_nothing_is_left() -> None:
    stream = io.StringIO()
    sizes = []

    def text(size: os.terminal_size) -> list[str]:
        sizes.append(size)
        return ["one", "two" * 100]

    screen = Screen(stream, text)
    try:
        screen.refresh()
        above(stream, screen).write("line\n")
    finally:
        screen.end()
    assert sizes[0] == (80, 24)
    assert shown(stream.getvalue()) == ["line", ""]


def shown(output: str) -> list[str]:
    """What a terminal shows that knows: carriage return, newline, one line up, erase to the end of the line."""
    rows, row, column = [""], 0, 0
    k = 0
    while k < len(output):
        if output.startswith("\x1b[K", k):
            rows[row] = rows[row][:column]
            k += 3
        elif output.startswith("\x1b[1A", k):
            row -= 1
            k += 4
        else:
            if output[k] == "\r":
                column = 0
            elif output[k] == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            else:
                rows[row] = rows[row][:column].ljust(column) + output[k] + rows[row][column + 1 :]
                column += 1
            k += 1
    while len(rows) > 2 and not rows[-1]:
        rows.pop()
    return rows
