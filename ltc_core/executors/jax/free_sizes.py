"""Sizes that a program leaves free: PyTorch's symbols of a trace, and JAX's of the program that is exported.

`Sizes` makes the symbols of both and translates PyTorch's into JAX's; `of_each` makes JAX's alone. Used by `stablehlo`
and `lowering`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from jax import export
from jax import numpy as jnp
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = ["FixedSizeError", "Result", "Sizes", "of_each"]

Size = int | str


class FixedSizeError(ValueError):
    """The program needs the value of a size that was to be free."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Shape, in JAX's sizes, and dtype of an op's result."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        return len(self.shape)


class Sizes:
    """The free sizes of one program.

    Args:
        examples: name of each free size -> a size that it had, from which nothing follows.
    """

    def __init__(self, examples: dict[str, int]) -> None:
        self._env = ShapeEnv()
        shape_env = self._env if examples else None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
        scope = export.SymbolicScope()
        self._names: dict[sympy.Symbol, str] = {}
        self._jax: dict[str, Any] = {}
        self._torch: dict[str, torch.SymInt] = {}
        for name, example in examples.items():
            hint, source = max(example, 2), ConstantSource(name)  # 0 and 1 would be constants
            symbol = self._env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
            assert isinstance(symbol, sympy.Symbol)
            self._names[symbol] = name
            size = self._env.create_symintnode(symbol, hint=hint, source=source)
            assert isinstance(size, torch.SymInt)
            self._torch[name] = size
            (self._jax[name],) = export.symbolic_shape(name, scope=scope)

    def in_torch(self, shape: Sequence[Size]) -> list[int | torch.SymInt]:
        return [self._torch[size] if isinstance(size, str) else size for size in shape]

    def in_jax(self, shape: Sequence[Size]) -> list[Any]:
        return [self._jax[size] if isinstance(size, str) else size for size in shape]

    def of(self, size: Any) -> Any:
        """JAX's size of PyTorch's; a number of the program if it is a symbolic float."""
        if not isinstance(size, torch.SymInt | torch.SymFloat):
            return size
        symbols = {symbol: self._jax[name] for symbol, name in self._names.items()}
        if isinstance(size, torch.SymFloat):
            symbols = {symbol: jnp.asarray(dim, jnp.float64) for symbol, dim in symbols.items()}
        return sympy_interp(PythonReferenceAnalysis, symbols, size.node.expr)

    def result(self, wanted: torch.Tensor) -> Result:
        return Result(tuple(map(self.of, wanted.shape)), wanted.dtype)

    def fixed(self, are_guards_benign: bool) -> list[str]:
        """What the trace took for granted of the free sizes, in words.

        Args:
            are_guards_benign: whether only PyTorch's own code has compared sizes, to choose among kernels.
        """
        found = [
            f"{name} is {self._env.replacements[symbol]}"
            for symbol, name in self._names.items()
            if symbol in self._env.replacements
        ]
        for guard in [] if are_guards_benign else self._env.guards:
            if not isinstance(guard.expr, sympy.Ne):
                names = {symbol: sympy.Symbol(name) for symbol, name in self._names.items()}
                found.append(str(guard.expr.xreplace(names)))
        return list(dict.fromkeys(found))


def of_each(
    shapes: Sequence[Sequence[int]], free: Mapping[int, Collection[int]]
) -> list[tuple[Any, ...]]:
    """Shapes in JAX's sizes; of each position in `free`, the sizes of these dims are free, each for itself."""
    scope = export.SymbolicScope()

    def size(k: int, dim: int) -> Any:
        return export.symbolic_shape(f"size{dim}_of_input{k}", scope=scope)[0]

    return [
        tuple(size(k, dim) if dim in free.get(k, ()) else n for dim, n in enumerate(shape))
        for k, shape in enumerate(shapes)
    ]
