"""`torch._lazy.config`."""

import ltc_core as ltc
from ltc_core.ops.dispatch import choose_anew

__all__ = ["get_force_fallback", "set_force_fallback", "set_reuse_ir"]


def get_force_fallback() -> str:
    """Return the ops that always run on the CPU, with commas between them."""
    return ",".join(sorted(ltc.settings.force_fallback))


def set_force_fallback(configval: str) -> None:
    """Set the ops that always run on the CPU: 'aten::add,aten::mul'."""
    names = (name.strip() for name in configval.split(","))
    ltc.settings.force_fallback = frozenset(name for name in names if name)
    choose_anew()


def set_reuse_ir(val: bool) -> None:
    """Does nothing: what was recorded before is always found again."""
