"""`torch_xla.stablehlo`: exported programs as StableHLO, by `ltc_core.export`.

A saved program is a directory of `ltc_core.export`, not one of torch_xla's. It has one method, `forward`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """How a program is exported, and what is written of it.

    Attributes:
        inline_all_constant, custom_ops_allowed_in_graph, export_node_metadata: accepted. Numbers are always constants
            of the program, ops without a rule are refused, and nothing is written about nodes.
        export_weights: whether the module keeps the weights. Without them it can be shown and saved, not called.
    """

    include_human_readable_text: bool = True
    override_tracing_arguments: Sequence[Any] | None = None
    override_tracing_kwargs: Mapping[str, Any] | None = None
    save_weights: bool = True
    inline_all_constant: bool = True
    export_weights: bool = True
    custom_ops_allowed_in_graph: set[str] = dataclasses.field(default_factory=set)
    export_node_metadata: bool = False


class _Bundle(NamedTuple):
    """What a module is made of: its weights by name."""

    state_dict: dict[str, Any]


class StableHLOGraphModule:
    """A program that can be called, shown and saved.

    Args:
        program: the program.
        has_weights: whether it has its weights.
    """

    def __init__(self, program: export.StableHLOProgram, has_weights: bool = True) -> None:
        self._program = program
        self._has_weights = has_weights
        if not has_weights:
            program.weights = {name: t.to("meta") for name, t in program.weights.items()}

    @property
    def _bundle(self) -> _Bundle:
        weights = self._program.weights if self._has_weights else {}
        return _Bundle({name: t.numpy() for name, t in weights.items()})

    def __call__(self, *args: Any) -> Any:
        return self.evaluate(_METHOD, args)

    def evaluate(self, method_name: str, args: Sequence[Any]) -> Any:
        """Call a method; there is `forward`.

        Raises:
            ExportError: the program was exported without its weights, or for other arguments.
        """
        program = self._of(method_name)
        if not self._has_weights:
            raise ExportError(
                "the program has no weights",
                got="one that was exported with export_weights=False",
                next="export it with export_weights=True; save_weights=False leaves them out of the directory",
            )
        return program(*args)

    def get_stablehlo_text(self, method_name: str | None = None) -> str:
        return self._of(method_name).text()

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        return self._of(method_name).bytecode

    def save(self, directory_path: _Path, options: StableHLOExportOptions | None = None) -> None:
        """Write it into a directory."""
        chosen = options or StableHLOExportOptions()
        weights = chosen.save_weights and self._has_weights
        self._program.save(directory_path, weights, chosen.include_human_readable_text)

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
    program = export.stablehlo(module, args, kwargs, _free_sizes(exported_model))
    return StableHLOGraphModule(program, chosen.export_weights)


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
