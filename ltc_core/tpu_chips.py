"""The TPU chips of this host, read from its PCI bus, without a TPU library or client.

Used by `settings` for the number of devices, by `executors.torch_xla.topology` for the chip of a process, and by
`executors.torch_xla.library` for the generation of the chips.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["count_chips", "has_megacores"]

_BUS = "/sys/bus/pci/devices"
_VENDOR = "0x1ae0"  # Google
_CHIP_IDS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
_V4 = "0x005e"


def count_chips(devices: str = _BUS) -> int:
    """Count the TPU chips on this host's PCI bus; 0 if the host shows no PCI bus."""
    return sum(chip in _CHIP_IDS for chip in _of_google(devices))


def has_megacores(devices: str = _BUS) -> bool:
    """Whether the chips here are v4, whose two cores can work as one device."""
    return _V4 in _of_google(devices)


def _of_google(devices: str) -> list[str]:
    vendors = [p for p in Path(devices).glob("*/vendor") if p.read_text().strip() == _VENDOR]
    return [path.with_name("device").read_text().strip() for path in vendors]
