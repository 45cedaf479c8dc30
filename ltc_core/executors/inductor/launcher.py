"""Launch compiled graphs: libraries that AOTInductor wrote, run without Python's lock.

In: a library, and the metas its inputs must have. Out: a `Model`, called with lists of tensors. What needs speed is
in `csrc/ltc_launch.cpp`, which is built on first use (a few seconds once for each user and torch). Inputs are checked
before anything runs, because compiled code reads and writes where it was told to at compile time.
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

# -O1: a launch with 300 inputs takes 24 us, 80 with -O0; -O2 gains nothing. All build in 3.5 s.
extension = Extension("_ltc_launch", Path(__file__).parent / "csrc" / "ltc_launch.cpp", "-O1")


class Mismatch(Exception):
    """A tensor is not what the library was compiled for. Nothing has run.

    Attributes:
        position: of the tensor among the inputs.
        got: its meta.
    """

    def __init__(self, position: int, got: TensorMeta) -> None:
        super().__init__(
            f"input {position} is {got} with strides {got.stride}: not what was compiled for"
        )
        self.position = position
        self.got = got

    def is_of_strides(self, expected: TensorMeta) -> bool:
        """Whether the tensor has only other strides than `expected`."""
        return self.got.size == expected.size and self.got.dtype is expected.dtype


@final
class Model:
    """A loaded library; `load` makes it. Runs of one model wait for each other."""

    def __init__(self, native: Any) -> None:
        self._run = native.run

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the inputs, in order; some of them may be written to. Give the outputs, in order.

        Raises:
            Mismatch: an input has another size, stride or dtype than expected; nothing has run.
            TypeError: these are not as many tensors, or one is not a plain tensor of the device; nothing has run.
            RuntimeError: what the library raised; inputs may have been written to.
        Cost:
            1 us, and 80 ns an input; Python's lock is free during the run.
        """
        found = self._run(tensors)
        if type(found) is int:
            raise Mismatch(found, TensorMeta.like(tensors[found]))
        return found  # type: ignore[no-any-return]


def load(path: Path, expected: Sequence[TensorMeta], device: str = "cpu") -> Model:
    """Load a library. Its proxy executor's file, if it needs one, lies beside it with the suffix .json.

    Args:
        expected: the metas of its inputs. A storage offset does not matter, nor do strides of dims of size 1.
        device: what the library was compiled for, as PyTorch names it.

    Raises:
        RuntimeError: it cannot be loaded, takes another number of inputs, or this file's own C++ part is not there.
    Cost:
        A few milliseconds, for the first library the build of the C++ part.
    """
    native = extension.load()
    if native is None:
        raise RuntimeError(extension.unavailable_reason)
    rows = tuple((meta.size, meta.stride, meta.dtype) for meta in expected)
    return Model(native.load(os.path.abspath(path), device, rows))
