"""The TPU chips of this host, read from its PCI bus, without a TPU library or client.

Used by `settings` for the number of devices, by `executors.torch_xla.topology` for the chip of a process, and by
`executors.torch_xla.library` for the generation of the chips.
"""

from __future__ import annotations

import glob
from pathlib import Path

__all__ = ["CHIP_IDS", "GOOGLE", "count_chips", "has_megacores"]

_BUS = "/sys/bus/pci/devices"
# PCI vendor, and its devices that are TPU chips.
GOOGLE = "0x1ae0"
CHIP_IDS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
_V4 = "0x005e"


def count_chips(devices: str = _BUS) -> int:
    """Count the TPU chips on this host's PCI bus; 0 if the host shows no PCI bus."""
    return sum(chip in CHIP_IDS for chip in _of_google(devices))


def has_megacores(devices: str = _BUS) -> bool:
    """Whether the chips here are v4, whose two cores can work as one device."""
    return _V4 in _of_google(devices)


def _of_google(devices: str) -> list[str]:
    vendors = [Path(path) for path in glob.glob(f"{devices}/*/vendor")]
    chips = [path for path in vendors if path.read_text().strip() == GOOGLE]
    return [path.with_name("device").read_text().strip() for path in chips]
