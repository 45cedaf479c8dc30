"""Scripts of libraries' users, native: the losses are those of the same script on the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
# script -> the library, and what it says of the device
LIBRARIES = {
    "with_accelerate.py": ("accelerate", "accelerate trains on ltc"),
    "with_trainer.py": ("transformers", "accelerate trains on ltc"),
    "with_lightning.py": ("lightning", "Lightning trains on ltc"),
    "with_lightning.py --standalone": ("pytorch_lightning", "Lightning trains on ltc"),
    "with_fabric.py": ("lightning", "Lightning trains on ltc"),
    "with_fabric.py --standalone": ("lightning_fabric", "Lightning trains on ltc"),
    "with_ignite.py": ("ignite", "idist.device() of ignite is ltc"),
}


def skip_without(library: str) -> None:
    if importlib.util.find_spec(library) is None:  # its import would change the environment
        pytest.skip(f"{library} is not installed: make test-ecosystem")


def result(command: list[str], directory: Path, **environ: str) -> list[str]:
    """The words of the line that a script prints at its end: the device, the number of processes, the figures."""
    place = directory / str(len(list(directory.iterdir())))
    place.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            *command[:-1],
            str(SCRIPTS / command[-1].split()[0]),
            str(place),
            *command[-1].split()[1:],
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), **environ},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if "result " in line]
    assert len(lines) == 1, done.stdout
    if (
        command[-1].split()[0] not in LIBRARIES
    ):  # its tensors name the device, no library chooses it
        return lines[0].partition("result ")[2].split(" ", 2)
    library, told = LIBRARIES[command[-1].removesuffix(" --cpu")]
    # ignite asks for its device itself, whatever the script uses
    assert (told in done.stderr) == (" ltc " in lines[0] or library == "ignite")
    assert "Time stats" not in done.stderr  # of DistributedDataParallel, which nobody can act on
    return lines[0].partition("result ")[2].split(" ", 2)


@pytest.mark.parametrize("script", LIBRARIES)
def test_one_process(script: str, tmp_path: Path) -> None:
    skip_without(LIBRARIES[script][0])
    device, count, wanted = result([f"{script} --cpu"], tmp_path, LTC_AUTOLOAD="1")
    assert (device, count) == ("cpu", "1")
    assert result([script], tmp_path, LTC_AUTOLOAD="1") == ["ltc", "1", wanted]


def test_generated_texts(tmp_path: Path) -> None:
    """The tokens of the CPU, from a few programs: each token makes the cache of keys and values longer."""
    skip_without("transformers")
    environ = {"LTC_AUTOLOAD": "1", "LTC_RANDOM": "cpu_stream"}
    _, _, wanted = result(["with_generate.py --cpu"], tmp_path, **environ)
    assert result(["with_generate.py"], tmp_path, **environ) == ["ltc", "1", wanted]


@pytest.mark.dist
@pytest.mark.parametrize("script", LIBRARIES)
def test_two_processes(script: str, tmp_path: Path) -> None:
    skip_without(LIBRARIES[script][0])
    launch = ["-m", "ltc_launch", "--nprocs", "2"]
    device, count, wanted = result([*launch, f"{script} --cpu"], tmp_path)
    assert (device, count) == ("cpu", "2")
    assert result([*launch, script], tmp_path) == ["ltc", "2", wanted]


@pytest.mark.dist
def test_trainer_divides_parameters(tmp_path: Path) -> None:
    """As a script for TPUs has it: losses and the model that is left are those without it."""
    skip_without("transformers")
    launch = ["-m", "ltc_launch", "--compat", "--nprocs", "2"]
    script = "with_trainer_sharded.py"
    wanted = result([*launch, f"{script} --plain"], tmp_path)
    assert wanted[:2] == ["xla", "2"]
    assert result([*launch, script], tmp_path) == wanted


@pytest.mark.dist
def test_accelerate_launch_starts_two_processes(tmp_path: Path) -> None:
    skip_without("accelerate")
    script = "with_accelerate.py"
    start = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"]
    _, _, wanted = result(["-m", "ltc_launch", "--nprocs", "2", f"{script} --cpu"], tmp_path)
    assert result([*start, script], tmp_path, LTC_AUTOLOAD="1") == ["ltc", "2", wanted]


@pytest.mark.dist
@pytest.mark.parametrize("script", ["with_lightning.py", "with_fabric.py"])
def test_lightning_starts_two_processes(script: str, tmp_path: Path) -> None:
    """By its own launcher: the script is run again for the second one."""
    environ = {"LTC_AUTOLOAD": "1", "DEVICES": "2"}
    skip_without("lightning")
    device, count, wanted = result([f"{script} --cpu"], tmp_path, **environ)
    assert (device, count) == ("cpu", "2")
    assert result([script], tmp_path, **environ) == ["ltc", "2", wanted]


@pytest.mark.dist
def test_ignite_starts_two_processes(tmp_path: Path) -> None:
    """By `idist.Parallel`: PyTorch spawns them."""
    skip_without("ignite")
    environ = {"LTC_AUTOLOAD": "1", "NPROC": "2"}
    device, count, wanted = result(["with_ignite.py --cpu"], tmp_path, **environ)
    assert (device, count) == ("cpu", "2")
    assert result(["with_ignite.py"], tmp_path, **environ) == ["ltc", "2", wanted]


@pytest.mark.parametrize("library", ["lightning", "pytorch_lightning"])
def test_another_strategy_of_lightning_is_refused(library: str) -> None:
    skip_without(library)
    child = f"""
import {"lightning.pytorch" if library == "lightning" else library} as pl
import {"lightning.fabric" if library == "lightning" else "lightning_fabric"} as fl
import ltc_dist.libraries
from ltc_core.errors import DeviceError

ltc_dist.libraries.use_device()  # after the import of the libraries
for kind in (pl.Trainer, fl.Fabric):
    try:
        kind(accelerator="ltc", devices=2, strategy="ddp_spawn")
    except DeviceError as error:
        assert "got: strategy='ddp_spawn', expected 'auto' or 'ddp'" in str(error), error
        print(kind.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", child],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.stdout.split() == ["Trainer", "Fabric"], done.stderr[-3000:]
