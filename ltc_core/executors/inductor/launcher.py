"""Loads and calls the libraries that AOTInductor wrote; the GIL is released during a run.

In: a library, and the metas that its inputs must have. Out: a `Model`, called with lists of tensors. The launch is in
`csrc/ltc_launch.cpp`, which is built on first use (a few seconds, once for each user and torch). Inputs are checked
before each run, because the addresses in compiled code follow from the sizes and strides at compile time. Called by
`tiers` (`load`) and `compiled_subgraph`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch

from ltc_core.graph.ir import TensorMeta
from ltc_core.native_extension import Extension

__all__ = ["Mismatch", "Model", "extension", "load"]

# A launch with 300 inputs takes 24 us with -O1 or -O2, 80 us with -O0. All of them build in 3.5 s.
extension = Extension("_ltc_launch", Path(__file__).parent / "csrc" / "ltc_launch.cpp", "-O1")


class Mismatch(Exception):
    """A tensor is not what the library was compiled for. Nothing has run.

    Attributes:
        position: position of the tensor among the inputs.
        got: its meta.
    """

    def __init__(self, position: int, got: TensorMeta) -> None:
        super().__init__(
            f"input {position} is {got} with strides {got.stride}: not what was compiled for"
        )
        self.position = position
        self.got = got

    def is_of_strides(self, expected: TensorMeta) -> bool:
        """Whether the tensor differs from `expected` only in its strides."""
        return self.got.size == expected.size and self.got.dtype is expected.dtype


@final
class Model:
    """A loaded library, made by `load`. Concurrent runs of one model run one after the other."""

    def __init__(self, native: Any) -> None:
        self._run = native.run

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs of the library, from its inputs, both in order. Donated inputs may be overwritten.

        Raises:
            Mismatch: an input has another size, stride or dtype than expected; nothing has run.
            TypeError: the number of inputs is wrong, or one is not a plain tensor of the device; nothing has run.
            RuntimeError: the library raised; inputs may have been overwritten.
        Cost:
            1 us, and 80 ns an input; the GIL is released during the run.
        """
        found = self._run(tensors)
        if type(found) is int:
            raise Mismatch(found, TensorMeta.like(tensors[found]))
        return found  # type: ignore[no-any-return]


def load(path: Path, expected: Sequence[TensorMeta], device: str = "cpu") -> Model:
    """Load a library. The file of its proxy executor, if it needs one, is beside it with the suffix .json.

    Args:
        expected: the metas of its inputs. Storage offsets and strides of dims of size 1 do not matter.
        device: PyTorch's name of the device that the library was compiled for.

    Raises:
        RuntimeError: it cannot be loaded or takes another number of inputs, or the C++ part could not be built.
    Cost:
        A few milliseconds; the first library also builds the C++ part.
    """
    native = extension.load()
    if native is None:
        raise RuntimeError(extension.unavailable_reason)
    rows = tuple((meta.size, meta.stride, meta.dtype) for meta in expected)
    return Model(native.load(os.path.abspath(path), device, rows))
