"""Old scripts run unchanged: each in the style of its time, with the losses of plain PyTorch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Job, launcher

SCRIPTS = Path(__file__).parent / "scripts"
COMPAT = [sys.executable, "-m", "ltc_dist.compat"]

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return told(tmp_path_factory.mktemp("plain"), [sys.executable], "plain.py")["losses"]  # type: ignore[no-any-return]


def told(directory: Path, command: list[str], script: str, **environ: str) -> dict[str, Any]:
    """Run a script; give what it tells."""
    environ = {"LTC_COMPILE": "off", **environ}
    return facts(Job([*command, str(SCRIPTS / script)], directory, **environ))


def facts(job: Job) -> dict[str, Any]:
    code, out, err = job.end()
    assert code == 0, err
    (line,) = [text for text in out.splitlines() if text.startswith("{")]
    return json.loads(line)  # type: ignore[no-any-return]


def check(found: dict[str, Any], expected: list[float]) -> None:
    assert found["losses"] == pytest.approx(expected, rel=1e-4)
    assert len(expected) == 8


def test_threads_of_1_5(tmp_path: Path, expected: list[float]) -> None:
    found = told(tmp_path, COMPAT, "threads_2019.py", CPU_NUM_DEVICES="2")
    check(found, expected)
    assert found["devices"] == ["xla:0", "xla:1"]


@pytest.mark.parametrize("nprocs", [1, 2])
def test_processes_of_1_13(tmp_path: Path, expected: list[float], nprocs: int) -> None:
    found = told(tmp_path, COMPAT, "processes_1_13.py", NPROCS=str(nprocs))
    check(found, expected)
    assert found["world_size"] == nprocs


@pytest.mark.parametrize("how", ["nested", "size", "type"])
def test_parameters_divided_over_processes(tmp_path: Path, expected: list[float], how: str) -> None:
    job = Job([*COMPAT, str(SCRIPTS / "fully_sharded.py"), how], tmp_path, CPU_NUM_DEVICES="2")
    found = facts(job)
    check(found, expected)
    assert found["world_size"] == 2 and found["after"] < expected[0]
    ranks = [f"model_rank-{rank:08d}-of-00000002.pth" for rank in range(2)]
    assert set(found["names"]) >= {*ranks, "model_consolidated.pth"}


@pytest.mark.parametrize("nprocs", [1, 2])
def test_processes_of_today(tmp_path: Path, expected: list[float], nprocs: int) -> None:
    command = launcher("--nprocs", str(nprocs), "--compat", "--no-prefix")
    found = told(tmp_path, command, "processes_head.py")
    check(found, expected)
    assert found["world_size"] == nprocs


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_module_with_mp_fn(tmp_path: Path, expected: list[float], nprocs: int) -> None:
    command = launcher("--nprocs", str(nprocs), "--compat", "--no-prefix")
    check(told(tmp_path, command, "glue_spawn.py"), expected)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_notebook_that_forks(tmp_path: Path, expected: list[float], nprocs: int) -> None:
    check(told(tmp_path, COMPAT, "kaggle_fork.py", NPROCS=str(nprocs)), expected)


def test_torch_lazy(tmp_path: Path, expected: list[float]) -> None:
    found = told(tmp_path, COMPAT, "torch_lazy.py")
    check(found, expected)
    assert found["lazy"]


def test_lazy_tensor_core(tmp_path: Path, expected: list[float]) -> None:
    found = told(tmp_path, COMPAT, "lazy_tensor_core_loop.py")
    check(found, expected)
    assert found["device"] == "lazy:0"


def test_one_line_at_the_top_does_it_too(tmp_path: Path, expected: list[float]) -> None:
    script = tmp_path / "mine.py"
    text = (SCRIPTS / "processes_1_13.py").read_text()
    path = f"import sys; sys.path.append({os.fspath(SCRIPTS)!r})\n"
    script.write_text(f"import ltc_dist.compat\n{path}{text}")
    job = Job([sys.executable, str(script)], tmp_path, LTC_COMPILE="off", NPROCS="2")
    check(facts(job), expected)
