"""What accelerators a machine has, without touching them."""

from __future__ import annotations

from pathlib import Path

_GOOGLE = "0x1ae0"
# PCI device ids of TPU v2/v3, v4, v5p, v5e, v6e and 7x. Google's vendor id alone would not do: its virtual network
# cards and disks have it too.
_TPUS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a TPU is on the PCI bus of this machine."""
    return any(_read(card / "vendor") == _GOOGLE and _read(card / "device") in _TPUS for card in devices.glob("*"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
