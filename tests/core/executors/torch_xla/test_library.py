"""Loading torch_xla's library: what must be there, in words, and what it finds in the environment."""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ltc_core.device.hardware import hardware_kind
from ltc_core.errors import DeviceError
from ltc_core.executors import make
from ltc_core.executors.torch_xla import library
from ltc_core.settings import settings

ROOT = Path(__file__).parents[4]
HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let torch_xla be installed in this version; None: not at all."""

    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    spec = importlib.machinery.ModuleSpec("_XLAC", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


class TestWhatMustBeThere:
    def test_torch_xla(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, None)
        words = r"LTC_DEVICE=tpu needs the package torch_xla(?s:.*)torch_xla 2.9 with torch 2.9(?s:.*)\[tpu\]"
        with settings.override(device="tpu"), pytest.raises(DeviceError, match=words):
            library._check_versions()

    def test_the_torch_that_it_is_built_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, "1.13.0")
        ours = torch.__version__.partition("+")[0]
        words = rf"torch_xla 1.13.0 loads only with(?s:.*)got: torch {ours}(?s:.*)expected 1.13"
        with settings.override(device="xla"), pytest.raises(DeviceError, match=words):
            library._check_versions()

    def test_one_that_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, ".".join(torch.__version__.split(".")[:2]) + ".7")
        with settings.override(device="xla"):
            library._check_versions()

    def test_kernels_of_the_reference_executor(self) -> None:
        words = "LTC_EXECUTOR=reference computes(?s:.*)unset LTC_EXECUTOR, or LTC_DEVICE"
        with settings.override(device="xla", executor="reference"):
            with pytest.raises(DeviceError, match=words):
                make(0)


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LTC_DEVICE", "PJRT", "XLA"))}
    inherited = {**kept, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited, capture_output=True, text=True
    )


def test_the_devices_name_may_not_be_the_librarys() -> None:
    code = "from ltc_core.executors.torch_xla.library import _check_name; _check_name()"
    done = run(code, LTC_DEVICE="xla", LTC_DEVICE_NAME="xla")
    assert done.returncode == 1
    assert "the device cannot be called 'xla'" in done.stderr
    assert "Next: unset LTC_DEVICE_NAME" in done.stderr


def test_old_scripts_get_the_name_ltc_then() -> None:
    code = "import ltc_dist.compat, ltc_core; print(ltc_core.lazy_device())"
    assert run(code, LTC_DEVICE="tpu").stdout == "ltc:0\n"
    assert run(code, PJRT_DEVICE="TPU").stdout == "ltc:0\n"
    assert run(code, LTC_DEVICE="cpu", PJRT_DEVICE="TPU").stdout == "xla:0\n"


@pytest.mark.skipif(HAS_TORCH_XLA, reason="torch_xla is here")
def test_without_it_the_first_use_of_the_device_says_so() -> None:
    done = run("import torch, ltc_core; torch.ones(2).to('ltc')", LTC_DEVICE="tpu")
    assert done.returncode == 1
    assert "DeviceError: LTC_DEVICE=tpu needs the package torch_xla" in done.stderr


class TestWhatItFinds:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(os.environ):
            if name.startswith(("PJRT", "XLA", "TPU", "LIBTPU", "GRPC", "TF_CPP", "CPU_NUM")):
                monkeypatch.delenv(name)
        monkeypatch.setattr(os, "environ", dict(os.environ))

    def test_the_cpu_has_as_many_devices_as_the_process(self) -> None:
        with settings.override(device="xla", num_devices=3):
            library._prepare_environment()
        assert (os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"]) == ("CPU", "3")
        assert "XLA_PERSISTENT_CACHE_PATH" not in os.environ
        assert os.environ["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"

    @pytest.mark.parametrize(("count", "is_asynchronous"), [(1, None), (3, "0")])
    def test_programs_of_several_devices_run_at_the_same_time(
        self, count: int, is_asynchronous: str | None
    ) -> None:
        with settings.override(device="xla", num_devices=count):
            library._prepare_environment()
        assert os.environ.get("PJRT_CPU_ASYNC_CLIENT") == is_asynchronous
        assert int(os.environ.get("XLA_THREAD_POOL_SIZE", "9")) > count

    def test_a_tpu_keeps_its_programs_on_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library.topology, "chip_variables", lambda e: {"A": "b"})
        with settings.override(device="tpu", cache_dir="/c", compiled_cache_read_only=True):
            library._prepare_environment()
        assert os.environ["XLA_PERSISTENT_CACHE_PATH"] == "/c/xla"
        assert os.environ["XLA_PERSISTENT_CACHE_READ_ONLY"] == "1"
        assert (os.environ["PJRT_DEVICE"], os.environ["A"]) == ("TPU", "b")
        assert "xla_latency_hiding_scheduler_rerun=1" in os.environ["LIBTPU_INIT_ARGS"]

    def test_what_the_user_set_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        os.environ.update(XLA_FLAGS="--a=1 --xla_cpu_enable_fast_math=true", GRPC_VERBOSITY="INFO")
        with settings.override(device="xla"):
            library._prepare_environment()
        assert os.environ["XLA_FLAGS"] == "--a=1 --xla_cpu_enable_fast_math=true"
        assert os.environ["GRPC_VERBOSITY"] == "INFO"

    def test_what_is_stored_narrow_is_our_business(self) -> None:
        os.environ["XLA_USE_BF16"] = "1"
        with settings.override(device="xla"):
            library._prepare_environment()
        assert "XLA_USE_BF16" not in os.environ and os.environ["LTC_USE_BF16"] == "1"


@pytest.mark.parametrize(
    ("device", "pjrt", "kind"),
    [("cpu", "", "CPU"), ("tpu", "", "TPU"), ("xla", "", "CPU"), ("xla", "neuron", "NEURON")],
)
def test_the_kind_of_hardware(
    device: str, pjrt: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", pjrt)
    with settings.override(device=device):
        assert hardware_kind() == kind
