"""`torch._lazy.ts_backend`: `init` has nothing to do: importing registers the device."""

__all__ = ["init"]


def init() -> None:
    """Does nothing: importing registered the device."""
