"""Settings: every row of the table, names of peers, bad values, unknown names."""

import mmap
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

from ltc_core.errors import SettingsError
from ltc_core.settings import (
    PYTORCH_NAMES,
    SETTINGS,
    Settings,
    file_of_rank,
    legal_names,
    settings,
    warn_not_here,
    warn_unknown,
)

ROOT = Path(__file__).parents[2]
DEFAULTS = Settings.from_environ({})


def read(attribute, **environ):
    return getattr(Settings.from_environ(environ), attribute)


def test_an_illegal_value_is_told_when_a_device_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LTC_REPLAY", "allways")
    made = Settings()
    with pytest.raises(
        SettingsError,
        match=r"^LTC_REPLAY has an illegal value \(set in the environment\)\n  got: 'allways', expected one of auto",
    ):
        made.check_environment()
    monkeypatch.setenv("LTC_REPLAY", "always")
    made.check_environment()
    assert not made.is_used("replay")


def test_table_and_annotations_agree():
    hints = typing.get_type_hints(Settings)
    assert [name for name in hints if name[0] != "_"] == [row.attribute for row in SETTINGS]
    for row in SETTINGS:
        wanted = row.type if row.default is not None else row.type | None
        assert hints[row.attribute] in (wanted, frozenset[str] if row.type is frozenset else None)


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.attribute)
def test_row_is_well_formed(row):
    assert row.env == "LTC_" + row.attribute.upper()
    assert row.doc.endswith(".")
    value = getattr(DEFAULTS, row.attribute)
    assert value is None or type(value) is row.type


def test_names_are_used_once():
    names = [name for row in SETTINGS for name in (row.env, *row.aliases)]
    assert len(names) == len(set(names))


def test_defaults():
    assert DEFAULTS.device_name == "ltc"
    assert (DEFAULTS.num_devices, DEFAULTS.executor, DEFAULTS.fallback) == (1, "inductor", "allow")
    assert DEFAULTS.collectives == "auto"
    assert DEFAULTS.spmd is False
    assert (DEFAULTS.max_async_queue, DEFAULTS.max_pending_steps) == (100, 4)
    assert (DEFAULTS.trim_graph_size, DEFAULTS.max_graph_size) == (20000, 200000)
    assert DEFAULTS.force_fallback == frozenset()
    assert DEFAULTS.metrics_file is None
    assert DEFAULTS.exit_timeout_s == 30.0


@pytest.mark.parametrize(
    ("attribute", "name", "text", "value"),
    [
        ("device_name", "LTC_DEVICE_NAME", "xla", "xla"),
        ("num_devices", "CPU_NUM_DEVICES", "8", 8),
        ("force_fallback", "LTC_FORCE_FALLBACK", "aten::add", frozenset({"aten::add"})),
        (
            "force_fallback",
            "LTC_FORCE_FALLBACK",
            "add, my::op,",
            frozenset({"aten::add", "my::op"}),
        ),
        ("device", "LTC_DEVICE", "cuda", "cuda"),
        ("device_ordinal", "LOCAL_RANK", "3", 3),
        ("device_ordinal", "OMPI_COMM_WORLD_LOCAL_RANK", "3", 3),
        ("device_ordinal", "SLURM_LOCALID", "3", 3),
        ("device_ordinal", "LTC_DEVICE_ORDINAL", "2", 2),
        ("device", "LTC_TS_CUDA", "1", "cuda"),
        ("device", "LTC_TS_CUDA", "0", "cpu"),
        ("use_bf16", "XLA_USE_BF16", "1", True),
        ("downcast_bf16", "XLA_DOWNCAST_BF16", "on", True),
        ("metrics_file", "XLA_METRICS_FILE", "1", "1"),
        ("metrics_file", "LTC_METRICS_FILE", "STDERR", "STDERR"),
        ("save_tensors_fmt", "LTC_SAVE_TENSORS_FMT", "dot", "dot"),
        ("save_tensors_fmt", "LTC_SAVE_TENSORS_FMT", "backend", "text"),
        ("save_tensors_fmt", "XLA_SAVE_TENSORS_FMT", "hlo", "hlo"),
        ("debug", "LTC_DEBUG", "2", 2),
        ("debug", "PT_XLA_DEBUG_LEVEL", "2", 2),
        ("debug", "PT_XLA_DEBUG_LEVEL", "100", 2),
        ("debug", "PT_XLA_DEBUG", "1", 2),
        ("debug", "PT_XLA_DEBUG", "0", 0),
        ("debug_file", "PT_XLA_DEBUG_FILE", "report.txt", "report.txt"),
        ("debug_frames", "PT_XLA_DEBUG_MAX_FRAME", "3", 3),
        ("emit_steplog", "XLA_EMIT_STEPLOG", "1", True),
        ("device", "PJRT_DEVICE", "CPU", "cpu"),
        ("device", "PJRT_DEVICE", "CUDA", "cuda"),
        ("device", "PJRT_DEVICE", "TPU", "tpu"),
        ("device", "PJRT_DEVICE", "NEURON", "cpu"),
        ("device", "LTC_DEVICE", "XLA", "xla"),
        ("random", "LTC_RANDOM", "host", "host"),
        ("num_devices", "TPU_NUM_DEVICES", "4", 4),
        ("compiled_cache_dir", "XLA_PERSISTENT_CACHE_PATH", "here", "here"),
        ("compiled_cache_read_only", "XLA_PERSISTENT_CACHE_READ_ONLY", "1", True),
        ("rate_smoothing", "RATE_TRACKER_SMOOTHING", "0.9", 0.9),
        ("eager", "XLA_USE_EAGER_DEBUG_MODE", "yes", True),
        ("max_async_queue", "XLA_MAX_ASYNC_QUEUE", "10", 10),
        ("exit_timeout_s", "LTC_EXIT_TIMEOUT_S", "0.5", 0.5),
        ("cache_dir", "LTC_CACHE_DIR", "here", "here"),
        ("cache_dir", "XDG_CACHE_HOME", os.path.join("a", "b"), os.path.join("a", "b", "ltc")),
    ],
)
def test_values_are_read(attribute, name, text, value):
    got = read(attribute, **{name: text})
    assert got == value
    assert type(got) is type(value)


def test_cache_dir_is_under_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("cache_dir") == str(tmp_path / ".cache" / "ltc")


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", "0", "False", "no", "off"])
def test_booleans(text):
    assert read("sync_wait", LTC_SYNC_WAIT=text) is (text.lower() in ("1", "true", "yes", "on"))


def test_our_name_comes_before_the_peers():
    assert read("num_devices", LTC_NUM_DEVICES="2", CPU_NUM_DEVICES="8") == 2
    assert read("use_bf16", LTC_USE_BF16="0", XLA_USE_BF16="1") is False


def test_empty_is_unset():
    assert read("num_devices", LTC_NUM_DEVICES="", CPU_NUM_DEVICES="8") == 8
    assert read("metrics_file", LTC_METRICS_FILE=" ") is None


@pytest.mark.parametrize(
    ("name", "text", "legal"),
    [
        ("LTC_FALLBACK", "maybe", "one of error, warn, allow"),
        ("LTC_EXECUTOR", "Reference", "one of inductor, jax, reference, null"),
        ("LTC_COLLECTIVES", "gloo", "one of auto, graph, host"),
        ("LTC_NUM_DEVICES", "0", "a whole number, at least 1"),
        ("LTC_NUM_DEVICES", "two", "a whole number, at least 1"),
        ("CPU_NUM_DEVICES", "1.5", "a whole number, at least 1"),
        ("LTC_EXIT_TIMEOUT_S", "-1", "a number, at least 0"),
        ("LTC_EXIT_TIMEOUT_S", "nan", "a number, at least 0"),
        ("LTC_USE_BF16", "2", "one of 1, true, yes, on, 0, false, no, off"),
        ("RATE_TRACKER_SMOOTHING", "1", "a number from 0 to below 1"),
        ("LTC_DEBUG", "4", "one of 0, 1, 2, 3"),
        ("LTC_DEBUG", "100", "one of 0, 1, 2, 3"),
        ("PT_XLA_DEBUG", "much", "one of 0, 1, 2, 3"),
        ("LTC_DEVICE_NAME", "my-device", "a Python identifier"),
        ("LTC_DEVICE_NAME", "class", "a Python identifier"),
        ("LTC_DEVICE_NAME", "cuda", "no device of PyTorch"),
        ("XLA_SAVE_TENSORS_FMT", "svg", "one of text, dot, hlo"),
    ],
)
def test_a_bad_value_names_the_variable_and_what_is_legal(name, text, legal):
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({name: text})
    first, got, following = str(caught.value).split("\n")
    assert first == f"{name} has an illegal value (set in the environment)"
    assert got.startswith(f"  got: {text!r}, expected ")
    assert legal in got
    assert following.startswith("  Next: ")


def test_assignment_is_checked():
    made = Settings.from_environ({})
    made.fallback = "error"
    made.exit_timeout_s = 2
    made.metrics_file = None
    assert (made.fallback, made.exit_timeout_s, made.metrics_file) == ("error", 2.0, None)
    assert type(made.exit_timeout_s) is float
    for name, value in [
        ("fallback", "eror"),
        ("num_devices", 0),
        ("num_devices", True),
        ("num_devices", "2"),
        ("use_bf16", 1),
        ("cache_dir", None),
    ]:
        with pytest.raises(SettingsError, match=f"the setting '{name}' has an illegal value"):
            setattr(made, name, value)
    assert made.fallback == "error"


def test_the_device_name_is_fixed():
    made = Settings.from_environ({})
    made.device_name = made.device_name
    with pytest.raises(SettingsError, match="'device_name' is fixed at the first import"):
        made.device_name = "xla"


def test_an_unknown_attribute_names_the_nearest():
    with pytest.raises(SettingsError, match=r"no setting 'fallbak'\n  Next: .* 'fallback'"):
        Settings.from_environ({}).fallbak = "warn"


def test_override_puts_back_what_was():
    made = Settings.from_environ({})
    with pytest.raises(ZeroDivisionError), made.override(debug=2, eager=True):
        assert (made.debug, made.eager) == (2, True)
        raise ZeroDivisionError
    assert (made.debug, made.eager) == (0, False)
    with pytest.raises(SettingsError), made.override(debug=2, fallback="eror"):
        pytest.fail("an illegal override was entered")
    assert made.debug == 0


def test_a_setting_is_read_at_its_first_use(monkeypatch):
    made = Settings()
    assert not made.is_used("debug") and made.peek("debug") == 0
    monkeypatch.setenv("LTC_DEBUG", "2")
    assert made.peek("debug") == 2 and not made.is_used("debug")
    assert made.debug == 2 and made.is_used("debug")
    monkeypatch.delenv("LTC_DEBUG")
    assert made.peek("debug") == 2
    with made.override(fallback="warn"):
        monkeypatch.setenv("LTC_FALLBACK", "error")
    assert made.fallback == "allow"  # it was used by `override`
    with pytest.raises(AttributeError):
        made.no_such_setting  # noqa: B018


@pytest.mark.parametrize("assigned", [False, True])
def test_what_is_set_too_late_is_an_error(assigned, monkeypatch):
    made = Settings()
    monkeypatch.setenv("XLA_USE_BF16", "1")
    if assigned:
        made.use_bf16 = True
    assert made.use_bf16
    made.check_environment()
    monkeypatch.setenv("LTC_DEBUG", "1")  # not used yet
    made.check_environment()
    monkeypatch.setenv("LTC_USE_BF16", "true")  # the same
    made.check_environment()
    monkeypatch.setenv("LTC_USE_BF16", "0")
    made.check_environment("debug")
    for _ in range(2):
        with pytest.raises(SettingsError) as caught:
            made.check_environment()
        first, got, following = str(caught.value).split("\n")
        assert first == "LTC_USE_BF16 was set too late to have an effect (set in the environment)"
        assert got == "  got: LTC_USE_BF16=0; use_bf16 is 1 since its first use"
        assert following.startswith("  Next: set it before the first use of the device")
    monkeypatch.delenv("LTC_USE_BF16")
    made.check_environment()
    monkeypatch.setenv("LTC_DEBUG", "4")
    with pytest.raises(SettingsError, match="LTC_DEBUG has an illegal value"):
        made.debug  # noqa: B018


def test_a_variable_that_is_removed_is_warned_of_once(monkeypatch, recwarn):
    made = Settings()
    monkeypatch.setenv("XLA_USE_BF16", "1")
    assert made.use_bf16
    monkeypatch.delenv("XLA_USE_BF16")
    for _ in range(2):
        made.check_environment()
    (warning,) = recwarn.list
    assert "XLA_USE_BF16 was removed from the environment: that has no effect" in str(warning)


def test_what_the_runtime_sets_itself_is_accepted(monkeypatch):
    made = Settings()
    assert made.num_devices == 1
    monkeypatch.setenv("LTC_NUM_DEVICES", "3")
    made.accept_environment()
    made.check_environment()


AFTER_THE_IMPORT = """
import os, sys, torch
import ltc_core as ltc
import ltc_dist as ltd
from ltc_core.api.eager import is_eager_mode
from ltc_core.errors import SettingsError
settings = ltc.settings
used = {row for row in vars(settings) if not row.startswith("_")}
assert used == {"device_name", "cache_dir", "compat", "autoload"}, used
os.environ |= {"XLA_USE_BF16": "1", "CPU_NUM_DEVICES": "3", "LTC_EAGER": "1", "LTC_EXECUTOR": "reference"}
assert torch.ltc.device_count() == 3 and len(ltc.get_lazy_supported_devices()) == 3
x = torch.full((2,), 1.001).to("ltc:2")
assert x.cpu().tolist() == [1.0, 1.0] and x.dtype == torch.float32
y = x + x
assert is_eager_mode() and ltc.metrics.counter_value("ExecuteComputation") >= 1
torch.manual_seed(3)
a = torch.rand(2, device="ltc:2").cpu()
os.environ["CPU_NUM_DEVICES"] = "4"
for call in (ltc.lazy_device, lambda: ltd.spawn(print, start_method="spawn")):
    try:
        call()
    except SettingsError as error:
        assert "CPU_NUM_DEVICES was set too late" in str(error), error
    else:
        sys.exit("no error")
"""


def test_variables_may_be_set_after_the_import():
    names = [name for row in SETTINGS for name in row.names]
    environ = {name: value for name, value in os.environ.items() if name not in names}
    cache = {"LTC_CACHE_DIR": settings.cache_dir}
    done = subprocess.run(
        [sys.executable, "-c", AFTER_THE_IMPORT],
        env={**environ, **cache},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_describe_names_every_setting():
    text = Settings.from_environ({"LTC_DEBUG": "2"}).describe()
    for row in SETTINGS:
        assert row.env in text
        assert row.doc in text
        assert all(alias in text for alias in row.aliases)
    assert "one of 0, 1, 2, 3, default 0; now 2" in text
    assert text.count("; now") == 1


def test_unknown_names_are_warned_of_once_with_the_nearest():
    environ = {"LTC_METRIC_FILE": "x", "LTC_DEVICENAME": "y", "XLA_FOO": "z", "LTC_DEBUG": "1"}
    environ["ltc_compile"] = "sync"
    with pytest.warns(UserWarning, match="settings that do not exist") as caught:
        warn_unknown(environ)
    (warning,) = caught
    assert "LTC_METRIC_FILE (nearest: LTC_METRICS_FILE)" in str(warning.message)
    assert "LTC_DEVICENAME (nearest: LTC_DEVICE_NAME)" in str(warning.message)
    assert "ltc_compile (nearest: LTC_COMPILE)" in str(warning.message)
    assert "XLA_FOO" not in str(warning.message)


def test_many_unknown_names_are_counted():
    with pytest.warns(UserWarning, match="and 4 more"):
        warn_unknown({f"LTC_UNKNOWN_{i}": "1" for i in range(9)})


def test_known_names_are_not_warned_of(recwarn):
    warn_unknown(dict.fromkeys(legal_names(), "1"))
    assert not recwarn.list


def test_the_warning_comes_at_import():
    environ = {**os.environ, "LTC_EXECUTER": "null", "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", "import ltc_core.settings"],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("LTC_EXECUTER (nearest: LTC_EXECUTOR)") == 1


def test_every_name_that_pytorch_reads_is_known():
    libraries = Path(torch.__file__).parent / "lib"
    found = {"LTC_MAX_ASYNC_QUEUE"}  # torch/_lazy/closure.py
    with (
        open(libraries / "libtorch_cpu.so", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found |= {m.group(1).decode() for m in re.finditer(rb"\0(LTC_[A-Z_]+)\0", data)}
    assert len(found) > 5
    assert found <= PYTORCH_NAMES


def test_the_module_object_is_read_from_the_environment():
    assert isinstance(settings, Settings)
    for row in SETTINGS:
        assert hasattr(settings, row.attribute)


def test_each_process_of_a_job_writes_a_file_of_its_own(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert file_of_rank("a.txt") == "a.txt"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert file_of_rank("a.txt") == "a.txt.3"


def test_hardware_that_there_is_no_executor_for_is_named():
    with pytest.warns(UserWarning, match="PJRT_DEVICE=NEURON: there is no executor for it"):
        warn_not_here({"PJRT_DEVICE": "NEURON"})
    for quiet in (
        {},
        {"PJRT_DEVICE": "CPU"},
        {"PJRT_DEVICE": "TPU"},
        {"PJRT_DEVICE": "NEURON", "LTC_DEVICE": "xla"},
    ):
        warn_not_here(quiet)
