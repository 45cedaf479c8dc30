"""What torch_xla's library itself counted so far."""

from ltc_core.executors.torch_xla import library


def compiled_by_xla() -> int:
    return _count("CompileTime")


def transfers() -> tuple[int, int]:
    """Transfers to PJRT's devices, and from them."""
    return _count("TransferToDeviceTime"), _count("TransferFromDeviceTime")


def _count(name: str) -> int:
    data = library.load()._xla_metric_data(name)
    return 0 if data is None else int(data[0])
