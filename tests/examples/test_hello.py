"""examples/hello.py prints what eager PyTorch computes, and the words about mixed devices."""

import os
import re
import sys
from pathlib import Path

import torch

from tests import prepared

ROOT = Path(__file__).parents[2]


def numbers(output: str, name: str) -> list[float]:
    """The values printed as `name = tensor([...`, up to the closing bracket."""
    start = output.index(f"{name} = tensor(")
    return [
        float(text) for text in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", output[start:].split("]]")[0])
    ]


def test_hello(tmp_path: Path) -> None:
    done = prepared.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "hello.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    device = done.stdout.splitlines()[0].removeprefix("device: ")
    assert re.fullmatch(r"[a-z]+:0", device)
    assert f"device='{device}'" in done.stdout
    t0 = torch.tensor(numbers(done.stdout, "\nt0")).view(2, 2)
    t1 = torch.tensor(numbers(done.stdout, "\nt1")).view(2, 2)
    for name, expected in (("t0 + t1", t0 + t1), ("t0.mm(t1)", t0 @ t1)):
        printed = torch.tensor(numbers(done.stdout, name)).view(2, 2)
        torch.testing.assert_close(printed, expected, rtol=1e-3, atol=2e-4)  # four digits printed
    assert re.search(r"linear\(l_in\) = tensor\(\[.*grad_fn=", done.stdout, re.DOTALL)
    assert (
        "DeviceMismatchError: Input tensor is not a lazy tensor: torch.FloatTensor" in done.stdout
    )
    assert "Next: " in done.stdout
