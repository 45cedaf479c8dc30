"""Processes that share stdout and stderr: each line is whole, whatever its length."""

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.launching import ROOT, Job, launcher

pytestmark = pytest.mark.dist

LINES = """
import os, sys
import ltc_dist as ltd

def work(rank):
    ltd.rendezvous("all print at a time")
    for k in range(300):
        for length in (10, 9000, 70_000):
            print(str(rank) * length)
        print("e" + str(rank) * 9000, file=sys.stderr)
    sys.stdout.buffer.write(b"in bytes\\n")

if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        ltd.spawn(work, nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("how", ["launcher", "spawn", "fork", "forkserver"])
def test_long_lines_into_one_pipe(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LINES)
    begin = launcher("--nprocs", "2", "--no-prefix") if how == "launcher" else [sys.executable]
    code, out, err = Job([*begin, "train.py", how], tmp_path).end()
    assert code == 0, err[-2000:]
    lengths = Counter((line[0], len(line)) for line in out.splitlines() if len(set(line)) == 1)
    assert lengths == {(rank, n): 300 for rank in "01" for n in (10, 9000, 70_000)}
    assert out.count("in bytes\n") == 2
    assert Counter(err.splitlines()) == {f"e{rank * 9000}": 300 for rank in "01"}


PARTS = """
import logging, sys
handler = logging.StreamHandler(sys.stderr)  # of the stream as it was
from ltc_dist.processes.whole_lines import write_whole_lines
write_whole_lines()
print("caf\\u00e9", end="", flush=True)
print(" and on")
print(sys.stdout.fileno(), sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.name)
sys.stdout.reconfigure(encoding="ascii", errors="backslashreplace")
print("caf\\u00e9")
logging.getLogger().addHandler(handler)
logging.warning("by logging")
print("not ended", end="")
"""


def test_what_is_not_a_long_line() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", textwrap.dedent(PARTS)],
        cwd=ROOT,
        capture_output=True,
        timeout=100,
    )
    assert done.stderr == b"by logging\n" and done.returncode == 0
    assert done.stdout.decode().split("\n") == [
        "caf\u00e9 and on",
        "1 False utf-8 <stdout>",
        "caf\\xe9",
        "not ended",
    ]
