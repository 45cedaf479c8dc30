"""What the command lines of benchmarks.peers and benchmarks.breadth have in common."""

import argparse
from pathlib import Path

__all__ = ["add_json", "check", "positive"]


def positive(text: str) -> int:
    """Read a number of the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add where the figures go: a file, - (stdout) or nowhere."""
    parser.add_argument(
        "--json", nargs="?", default="", const="-", metavar="FILE",
        help="write the figures there, beside the tables in Markdown; alone: print them instead",
    )  # fmt: skip


def check(parser: argparse.ArgumentParser, json_file: str) -> None:
    """End with a message where nothing can be measured, or the figures cannot be written."""
    if not Path("/proc/self/status").exists():
        parser.error("the peak of a process is read from /proc, which only Linux has")
    if json_file and not Path(json_file).absolute().parent.is_dir():
        parser.error(f"there is no directory for {json_file}")
