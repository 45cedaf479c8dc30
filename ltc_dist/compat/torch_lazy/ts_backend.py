"""`torch._lazy.ts_backend`: `init` has nothing to do, as the device is there."""

__all__ = ["init"]


def init() -> None:
    """Does nothing: importing registered the device."""
