"""The state of a training after some steps, so that all sides are timed on the same numbers.

A side that is compiled while it trains has made a thousand steps when it is timed, another one ten. The speed of a
step goes by its numbers: momenta that decay to denormals make a step of a small VAE 1.4 times as long, on all sides.
Used by breadth_child.py.
"""

import gc
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["Snapshot"]


class Snapshot:
    """Parameters, buffers and the state of all optimizers of this process, in files: memory is measured, too."""

    def __init__(self, module: nn.Module) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="snapshot-")
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        self._tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._restarted = []
        for optimizer in found:
            values = [value for state in optimizer.state.values() for value in state.values()]
            if all(isinstance(value, Tensor) for value in values):
                self._tensors += values
            else:
                self._restarted.append(optimizer)
        self._files = [Path(self._directory.name) / f"{k}.pt" for k in range(len(self._tensors))]
        for tensor, file in zip(self._tensors, self._files, strict=True):
            torch.save(tensor.detach().cpu(), file)

    def close(self) -> None:
        """Remove the files."""
        self._directory.cleanup()

    def restore(self) -> None:
        """Bring all of it back, in place; an optimizer that keeps more than tensors (LBFGS) starts anew."""
        with torch.no_grad():
            for tensor, file in zip(self._tensors, self._files, strict=True):
                tensor.copy_(torch.load(file))
        for optimizer in self._restarted:
            optimizer.state.clear()
