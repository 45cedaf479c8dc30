"""`torch._lazy.computation`: graphs by their hash. Only the hash is here: the device keeps and runs graphs itself."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import torch

import ltc_core as ltc
from ltc_dist.compat.absent import Absent

__all__ = ["get_graph_hash", "get_tensors_ts_device_data_node", "run_cached_graph"]

_WHY = "graphs are found again by what is recorded; torch._lazy.extract_compiled_graph runs a module as one"
_NUMBERED = re.compile(r"[%$]\d+")

get_tensors_ts_device_data_node = Absent(f"{__name__}.get_tensors_ts_device_data_node", _WHY)
run_cached_graph = Absent(f"{__name__}.run_cached_graph", _WHY)


def get_graph_hash(tensors: Sequence[torch.Tensor]) -> str:
    """Hash of the pending graph, the same in every process; nothing is run."""
    numbers: dict[str, str] = {}

    def renumbered(found: re.Match[str]) -> str:
        """What else is pending does not count: values and numbers are counted in the order of their use."""
        return numbers.setdefault(found[0], f"{found[0][0]}{len(numbers)}")

    return hashlib.sha256(_NUMBERED.sub(renumbered, ltc.dump_ir(tensors)).encode()).hexdigest()
