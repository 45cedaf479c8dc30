"""TPU chips on the PCI bus: how many, of which kind, and how many devices a process has for them."""

import sys
from pathlib import Path

import pytest

from ltc_core.settings import Settings
from ltc_core.tpu_chips import count_chips, has_megacores


def test_chips_are_counted_on_the_bus(tmp_path: Path) -> None:
    devices = [
        ("0x1ae0", "0x0063"),
        ("0x1ae0", "0x006f"),
        ("0x1ae0", "0x001f"),
        ("0x10de", "0x0063"),
    ]
    for k, (vendor, device) in enumerate(devices):
        (tmp_path / f"{k}").mkdir()
        (tmp_path / f"{k}" / "vendor").write_text(f"{vendor}\n")
        (tmp_path / f"{k}" / "device").write_text(f"{device}\n")
    assert count_chips(str(tmp_path)) == 2 and count_chips(str(tmp_path / "none")) == 0
    assert not has_megacores(str(tmp_path))
    (tmp_path / "0" / "device").write_text("0x005e\n")
    assert has_megacores(str(tmp_path)) and not has_megacores(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({"LTC_DEVICE": "tpu"}, 4),
        ({"PJRT_DEVICE": "TPU"}, 4),
        ({"PJRT_DEVICE": "TPU", "LTC_DEVICE": "cpu"}, 1),
        ({"PJRT_DEVICE": "TPU", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, 1),
        ({"PJRT_DEVICE": "TPU", "SLURM_LOCALID": "0"}, 1),
        ({"PJRT_DEVICE": "TPU", "LTC_DEVICES": "2"}, 1),
        ({"PJRT_DEVICE": "TPU", "LTC_NUM_DEVICES": "2"}, 2),
        ({}, 1),
    ],
)
def test_a_process_alone_on_a_tpu_host_has_all_its_chips(
    environ: dict[str, str], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[Settings.__module__], "count_chips", lambda: 4)
    assert Settings.from_environ(environ).num_devices == devices
