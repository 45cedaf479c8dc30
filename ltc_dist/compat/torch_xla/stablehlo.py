"""`torch_xla.stablehlo`: exported programs as StableHLO, by `ltc_core.export`.

A saved program is a directory of `ltc_core.export`, not one of torch_xla's. It has one method, `forward`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from ltc_core import export
from ltc_core.api.torch_export import cpu_module
from ltc_core.errors import ExportError

__all__ = [
    "StableHLOExportOptions",
    "StableHLOGraphModule",
    "_run_decompositions",
    "exported_program_to_stablehlo",
    "save_as_stablehlo",
    "save_torch_model_as_stablehlo",
]

_METHOD = "forward"
_Path = str | os.PathLike[str]


@dataclasses.dataclass
class StableHLOExportOptions:
    """How a program is exported, and what is written of it."""

    include_human_readable_text: bool = True
    override_tracing_arguments: Sequence[Any] | None = None
    override_tracing_kwargs: Mapping[str, Any] | None = None
    save_weights: bool = True


class StableHLOGraphModule:
    """A program that can be called, shown and saved.

    Args:
        program: the program.
    """

    def __init__(self, program: export.StableHLOProgram) -> None:
        self._program = program

    def __call__(self, *args: Any) -> Any:
        return self._program(*args)

    def evaluate(self, method_name: str, args: Sequence[Any]) -> Any:
        """Call a method; there is `forward`."""
        return self._of(method_name)(*args)

    def get_stablehlo_text(self, method_name: str | None = None) -> str:
        return self._of(method_name).text()

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        return self._of(method_name).bytecode

    def save(self, directory_path: _Path, options: StableHLOExportOptions | None = None) -> None:
        """Write it into a directory."""
        chosen = options or StableHLOExportOptions()
        self._program.save(directory_path, chosen.save_weights, chosen.include_human_readable_text)

    @classmethod
    def load(cls, directory_path: _Path) -> StableHLOGraphModule:
        """Read what `save` wrote."""
        return cls(export.load(directory_path))

    def _of(self, method_name: str | None) -> export.StableHLOProgram:
        if method_name not in (None, _METHOD):
            raise ExportError(
                "the program has no such method",
                got=f"{method_name!r}, expected {_METHOD!r}",
                next="leave the name out",
            )
        return self._program


def exported_program_to_stablehlo(
    exported_model: torch.export.ExportedProgram, options: StableHLOExportOptions | None = None
) -> StableHLOGraphModule:
    """A program of `torch.export` as StableHLO. Sizes that it leaves free are free in it; others are constants."""
    chosen = options or StableHLOExportOptions()
    args, kwargs = exported_model.example_inputs or ((), {})
    if chosen.override_tracing_arguments is not None:
        args = tuple(chosen.override_tracing_arguments)
        kwargs = dict(chosen.override_tracing_kwargs or {})
    module = cpu_module(exported_model)
    return StableHLOGraphModule(export.stablehlo(module, args, kwargs, _free_sizes(exported_model)))


def _run_decompositions(
    exported_model: torch.export.ExportedProgram,
) -> torch.export.ExportedProgram:
    """A program in core ops of ATen, with `grid_sample` and the softmax of attention in ops of them."""
    aten = torch.ops.aten
    table: Any = torch.export.default_decompositions()
    table.update(get_decompositions([aten.grid_sampler_2d]))
    table[aten._safe_softmax.default] = torch.softmax
    return exported_model.run_decompositions(table)  # type: ignore[no-any-return]


def _free_sizes(exported_model: torch.export.ExportedProgram) -> list[dict[int, str]]:
    """Of each tensor among the arguments: dim -> name of its free size."""
    given = set(exported_model.graph_signature.user_inputs)
    nodes = exported_model.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in nodes if node.name in given]
    return [
        {dim: str(size) for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
        for value in values
        if isinstance(value, torch.Tensor)
    ]


def save_as_stablehlo(
    exported_model: torch.export.ExportedProgram,
    stablehlo_dir: _Path,
    options: StableHLOExportOptions | None = None,
) -> None:
    """Export a program of `torch.export` into a directory."""
    exported_program_to_stablehlo(exported_model, options).save(stablehlo_dir, options)


def save_torch_model_as_stablehlo(
    torchmodel: torch.nn.Module,
    args: Sequence[Any],
    path: _Path,
    options: StableHLOExportOptions | None = None,
) -> None:
    """Export the forward pass of a module into a directory."""
    StableHLOGraphModule(export.stablehlo(torchmodel, args)).save(path, options)
