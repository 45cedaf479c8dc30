"""examples/stages.py shows every stage of a step, and what it says is so."""

import os
import re
import sys
from pathlib import Path

from tests import prepared

ROOT = Path(__file__).parents[2]


def test_stages(tmp_path: Path) -> None:
    done = prepared.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "stages.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    recorded, graph, program, buffers, again = re.split(r"^\d\. .*\n=+\n", done.stdout, flags=re.M)[
        1:
    ]
    num_ops = len(re.findall(r"^   %\d+: .* = aten\.", recorded, re.M))
    assert num_ops > 20
    nodes = re.findall(r"^%\d+: .* = aten\..*  # (.*)$", graph, re.M)
    num_dead = int(re.search(r"nodes; (\d+) more were recorded", graph)[1])
    assert len(nodes) + num_dead == num_ops
    assert all("stages.py" in line and "in record_step" in line for line in nodes)
    assert "input (donated)" in graph
    assert len(re.findall(r"^   aten\.", program, re.M)) == len(nodes)
    assert len(re.findall(r"output %\d+ ends in the memory of input %\d+", program)) >= 4
    assert len(re.findall(r"\d+\.(?:weight|bias) .*, in the same memory as before", buffers)) == 4
    before, after = re.search(r"built before it: (\d+), after it: (\d+)", again).groups()
    assert before == after
