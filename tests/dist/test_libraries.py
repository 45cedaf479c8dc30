"""What accelerate is made to choose. A stand-in has the parts that it is changed in: it is not installed everywhere."""

import textwrap
from pathlib import Path

from tests.core import child

STATE = """
import os
import torch

class DistributedType:
    NO, MULTI_GPU, MULTI_CPU, XLA = "NO", "MULTI_GPU", "MULTI_CPU", "XLA"

class PartialState:
    def __init__(self, cpu=False, backend=None):
        named = os.environ.get("ACCELERATE_TORCH_DEVICE")
        self.device = torch.device(named) if named is not None else None
        self.backend, self.kind = self._prepare_backend(cpu, False, backend)
        self.local_process_index = int(os.environ.get("LOCAL_RANK", -1))
        self.set_device()
        self.device = self.device or torch.device("cpu")

    def set_device(self):
        pass

    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        if "TPU" in os.environ:
            return "xla", DistributedType.XLA
        if cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            return "gloo", DistributedType.MULTI_CPU
        return ("nccl", DistributedType.MULTI_GPU) if "LOCAL_RANK" in os.environ else (None, DistributedType.NO)
"""

LAUNCH = """
def simple_launcher(args):
    print("one process")

def multi_gpu_launcher(args):
    print(args.num_processes, "processes")

def launch_command(args):
    simple_launcher(args)
"""

SHOW = """
from accelerate.state import PartialState
for options in ({}, {"cpu": True}):
    state = PartialState(**options)
    print(state.device, state.backend, state.kind)
"""


def chosen(tmp_path: Path, code: str, **environ: str) -> tuple[list[str], str]:
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "state.py").write_text(STATE)
    (package / "commands").mkdir()
    (package / "commands" / "launch.py").write_text(LAUNCH)
    begin = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    out, err = child.run(begin + code, prelude="", **environ)
    return out.splitlines(), err


ASK = "import ltc_dist.libraries as libraries\nlibraries.use_device()\n"
ONE = ["ltc None NO", "cpu None NO"]


def test_one_process_takes_the_device_unless_the_script_wants_the_cpu(tmp_path: Path) -> None:
    lines, said = chosen(tmp_path, ASK + ASK + SHOW)
    assert lines == ONE
    assert said == (
        "ltc: accelerate trains on ltc; Accelerator(cpu=True) or ACCELERATE_TORCH_DEVICE=cpu choose the CPU\n"
    )


def test_it_may_be_imported_already(tmp_path: Path) -> None:
    assert chosen(tmp_path, "import accelerate.state\n" + ASK + ASK + SHOW)[0] == ONE


def test_autoload_is_enough(tmp_path: Path) -> None:
    code = "import ltc_autoload\nltc_autoload.load()\n" + SHOW
    assert chosen(tmp_path, code, LTC_AUTOLOAD="1")[0] == ONE


def test_processes_of_a_job_are_joined_by_gloo_whatever_hardware_there_is(tmp_path: Path) -> None:
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    lines, said = chosen(tmp_path, ASK + SHOW, **ranks)
    assert lines == ["ltc gloo MULTI_CPU", "cpu gloo MULTI_CPU"]
    assert said == ""  # rank 0 says it


def test_a_process_that_the_script_starts_is_told_nothing(tmp_path: Path) -> None:
    lines, _ = chosen(
        tmp_path, ASK + SHOW + "import os\nprint(os.environ.get('ACCELERATE_TORCH_DEVICE'))"
    )
    assert lines == [*ONE, "None"]


def test_what_the_user_has_chosen_stays(tmp_path: Path) -> None:
    assert chosen(tmp_path, ASK + SHOW, ACCELERATE_TORCH_DEVICE="cpu") == (["cpu None NO"] * 2, "")


def test_torch_xla_stays(tmp_path: Path) -> None:
    assert chosen(tmp_path, ASK + SHOW, TPU="1") == (["cpu xla XLA"] * 2, "")


def test_its_launcher_starts_several_processes(tmp_path: Path) -> None:
    start = """
    from types import SimpleNamespace
    from accelerate.commands import launch
    for count, cpu, use_cpu in ((None, False, False), (1, False, False), (2, False, False), (2, True, False),
                                (2, False, True)):
        launch.launch_command(SimpleNamespace(num_processes=count, cpu=cpu, use_cpu=use_cpu))
    """
    lines, _ = chosen(tmp_path, ASK + textwrap.dedent(start))
    assert lines == ["one process", "one process", "2 processes", "one process", "one process"]


def test_under_compat_a_process_without_a_launcher_is_the_first_of_its_host(tmp_path: Path) -> None:
    show = """
    from accelerate.state import PartialState
    state = PartialState()
    print(state.backend, state.local_process_index)
    """
    lines, _ = chosen(tmp_path, "import ltc_dist.compat\n" + textwrap.dedent(show), TPU="1")
    assert lines == ["xla 0"]
