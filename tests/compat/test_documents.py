"""The programs of the five documents, through the modules that the documents import, on one device and on two.

A program asserts what its document promises; it tells its losses, and those of the same loop in plain PyTorch.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Job

DOCUMENTS = Path(__file__).parent / "documents"
ULP = 1 / 256

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


def told(directory: Path, program: str, *arguments: str, **environ: str) -> list[dict[str, Any]]:
    """Run a program; give what it tells, having compared its losses with plain PyTorch's."""
    command = [sys.executable, "-W", "error", "-m", "ltc_dist.compat"]
    environ = {"LTC_COMPILE": "off", **environ}
    job = Job([*command, str(DOCUMENTS / program), *arguments], directory, **environ)
    code, out, err = job.end()
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    is_exact = not any("BF16" in name for name in environ)
    for each in found:
        wanted = pytest.approx(each["plain"], **({"rel": 1e-4} if is_exact else {"abs": 0.05}))
        assert each["losses"] == wanted and len(each["plain"]) >= 4
    return found


def test_000_the_guide_of_lazy_tensor_core(tmp_path: Path) -> None:
    (found,) = told(tmp_path, "guide_lazy_tensor_core.py")
    assert found["single"] == ULP < found["double"]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_001_the_guide_of_torch_xla_in_2020(tmp_path: Path, num_devices: int) -> None:
    environ = {"CPU_NUM_DEVICES": str(num_devices)}
    one, threads, processes = told(tmp_path, "guide_torch_xla_2020.py", **environ)
    assert one["single"] == ULP < one["double"]
    assert (threads["size"], threads["device"]) == (num_devices, f"xla:{num_devices - 1}")
    assert (processes["size"], processes["device"]) == (num_devices, "xla:0")


def test_002_the_tutorial_of_torch_lazy(tmp_path: Path) -> None:
    (found,) = told(tmp_path, "tutorial_torch_lazy.py")
    assert found["elsewhere"] == ["aten::_local_scalar_dense"]  # the losses that were looked at
    assert found["losses"][-1] < found["losses"][0] / 2


@pytest.mark.parametrize("num_devices", [1, 2])
def test_003_the_later_guide_of_torch_xla(tmp_path: Path, num_devices: int) -> None:
    environ = {"CPU_NUM_DEVICES": str(num_devices)}
    one, processes = told(tmp_path, "guide_torch_xla.py", **environ)
    assert one["single"] == ULP < one["double"]
    assert (processes["size"], processes["device"]) == (num_devices, "xla:0")


def test_004_the_guideline_of_torch_xla_py(tmp_path: Path) -> None:
    environ = {"CPU_NUM_DEVICES": "2", "XLA_METRICS_FILE": "1"}
    threads, native = told(tmp_path, "performance_torch_xla_2019.py", **environ)
    assert (threads["size"], native["size"]) == (2, 0)
    (path,) = tmp_path.glob("*metrics*")
    assert path.read_text().count("Counter: MarkStep\n  Value: ") >= 8  # one for each step


@pytest.mark.parametrize(
    ("program", "variable", "double"),
    [
        ("guide_lazy_tensor_core.py", "LTC_USE_BF16", 0),
        ("guide_torch_xla.py", "XLA_USE_BF16", 0),
        ("guide_torch_xla.py", "XLA_DOWNCAST_BF16", ULP),
    ],
)
def test_numbers_are_bfloat16_and_say_they_are_not(
    tmp_path: Path, program: str, variable: str, double: float
) -> None:
    (found,) = told(tmp_path, program, "dtypes", **{variable: "1"})
    assert (found["single"], found["double"]) == (0, double)
