"""What stands in a chain for what the compiler makes, and what runs one."""

from collections.abc import Generator, Sequence
from typing import Any

import torch

__all__ = ["Interpreted", "ended"]


class Interpreted:
    """A part's FX graph in the place of its library."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(self.module(*tensors))


def ended(steps: Generator[None, None, list[Any]]) -> tuple[list[Any], int]:
    """Run a program to its end; give the results, and how often it would have waited."""
    waits = 0
    while True:
        try:
            next(steps)
            waits += 1
        except StopIteration as end:
            return end.value, waits
