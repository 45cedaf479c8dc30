"""`torch_xla._XLAC.lowering`: the HLO of pending tensors, and which tensors are its parameters.

In: tensors that are recorded and have not run. Out: HLO as the bytes of its protocol buffer, as text and as JSON, and
for each parameter the tensor that stands for it. JAX writes the HLO (`ltc_core.export`), whatever LTC_EXECUTOR is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc_core import export, source
from ltc_core.api.verbs import to_cpu
from ltc_core.errors import UnsupportedOpError
from ltc_core.record.view_recorder import make_operands
from ltc_core.runtime.devices import context_of
from ltc_core.tensor.handles import Cell
from ltc_core.tensor.lazy_tensor import LazyTensor, wrap
from ltc_dist.compat.hlo_messages import json_of, text_of

__all__ = ["LoweringContext"]


class LoweringContext:
    """HLO of what `build` is given. Numbers that ops were given are constants of it.

    Args:
        name: of the HLO.
    """

    def __init__(self, name: str = "FnLoweringContext") -> None:
        self._name = name
        self._hlo = b""
        self._parameters: list[LazyTensor] = []

    def build(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lower what the tensors need; nothing is run.

        Raises:
            DeviceError: JAX is not installed.
            UnsupportedOpError: they are not computed by one program: they have values, draw random numbers, or need an
                op that runs on the host.
        """
        found = export.pending(tensors)
        hlo, inputs = found.hlo_bytes(self._name), found.inputs()
        trace = context_of(next(t._h for t in tensors if isinstance(t, LazyTensor))).trace
        held = {index: Cell(trace, value, meta) for index, value, _, meta in trace.inputs}
        if not held.keys() >= set(inputs):
            raise UnsupportedOpError(
                "the tensors are computed from random numbers that are drawn while they run",
                got=f"{len(set(inputs) - held.keys())} of {len(inputs)} inputs are not tensors",
                where=source.user_line(),
                next="draw the numbers in a step before: torch_xla.sync() between the draw and its use",
            )
        self._hlo, self._parameters = hlo, [wrap(held[number]) for number in inputs]

    def hlo(self) -> bytes:
        """The bytes of the HLO's protocol buffer; b'' before `build`."""
        return self._hlo

    def hlo_text(self) -> str:
        """The text of the HLO's protocol buffer: `opcode: "add"`."""
        return text_of(self._hlo)

    def hlo_json(self) -> str:
        """The JSON of the HLO's protocol buffer."""
        return json_of(self._hlo)

    def parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """The number of each parameter, with its value on the CPU. Cost: a copy from the device for each."""
        return dict(enumerate(to_cpu(self._parameters)))

    def device_parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """The number of each parameter, with its value as a tensor on the device."""
        return dict(enumerate(self._parameters))

    def tensor_parameter_id(self, tensor: torch.Tensor) -> int:
        """The number of the parameter that has the value of a tensor; -1 for another tensor."""
        if not isinstance(tensor, LazyTensor):
            return -1
        make_operands([tensor], None)
        values = [t._h.value for t in self._parameters]
        return next((k for k, value in enumerate(values) if value is tensor._h.value), -1)

    def get_name_string(self) -> str:
        """Name of the HLO."""
        return self._name

    def set_name_string(self, name: str) -> None:
        """Name the HLO that `build` makes."""
        self._name = name
