"""`torch_xla.distributed.spmd.debugging`: pictures of shardings, for a terminal. They need the package rich."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from typing import Any

import torch

from ltc_dist.compat.absent import NotHereError
from ltc_dist.compat.torch_xla import runtime
from ltc_dist.compat.xla_text import sharding_text

__all__ = ["construct_v1_sharding_str", "visualize_sharding", "visualize_tensor_sharding"]

_COPIES = " last_tile_dim_replicate"
_DEVICES = re.compile(r"\{devices=\[([\d,]+)\]([\d,]+)(" + _COPIES + r")?\}")


def construct_v1_sharding_str(t: torch.Tensor) -> str:
    """How a tensor was marked, such as '{devices=[2,2]0,1,2,3}'."""
    return sharding_text(t)


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> Any:
    """Print which device has which part of a tensor; see `visualize_sharding`."""
    return visualize_sharding(sharding_text(t), **kwargs)


def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> Any:
    """Print which device has which part of a tensor, for its first two dimensions.

    Args:
        sharding: such as '{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}' or '{replicated}'; '' is the latter.
        use_color: lines between the parts are left out, if the terminal has colors.
        scale, min_width: accepted; a part is as wide as its text.
        max_width: of the picture, in characters.

    Returns:
        The table of `rich` that was printed.

    Raises:
        ValueError: the package rich is missing, or the text is no such sharding; the texts are torch_xla's.

    Source: `torch_xla.distributed.spmd.debugging.visualize_sharding`.
    """
    if importlib.util.find_spec("rich") is None:
        raise ValueError("`visualize_sharding` requires `rich` to be installed.")
    align, box, console_of, padding, style, table_of = (
        importlib.import_module(f"rich.{name}")
        for name in ("align", "box", "console", "padding", "style", "table")
    )
    print(f"Visualizing {sharding} (showing up to the first two dimensions)")
    console = console_of.Console(width=max_width)
    is_colored = use_color and console.color_system is not None
    table = table_of.Table(
        show_header=False,
        show_lines=not use_color,
        padding=0,
        highlight=not use_color,
        pad_edge=False,
        box=None if is_colored else box.SQUARE,
    )
    for row in _parts(sharding):
        table.add_row(
            *(
                padding.Padding(
                    align.Align(f"{runtime.device_type()} {part}", "center", vertical="middle"),
                    (1, 1, 1, 1),
                    style=style.Style(),
                )
                for part in row
            )
        )
    console.print(table, end="\n\n")
    return table


def _parts(sharding: str) -> list[list[int | list[int]]]:
    """The device of each part of the first two dimensions, or the devices that have copies of it."""
    if sharding in ("", "{replicated}"):
        return [[list(range(runtime.global_runtime_device_count()))]]
    found = _DEVICES.fullmatch(sharding)
    if found is None:
        raise ValueError(f"sharding {sharding} is not organized as expected")
    *tiles, last = map(int, found[1].split(","))
    devices = list(map(int, found[2].split(",")))
    copies = last if found[3] else 1
    sizes = tiles if found[3] else [*tiles, last]
    if len(devices) != math.prod(sizes) * copies:
        raise ValueError(f"sharding {sharding} is not organized as expected")
    if len(sizes) > 2 and math.prod(sizes[2:]) > 1:
        raise NotHereError(
            "the picture shows two dimensions", got=sharding, next="print the text of the sharding"
        )
    width = sizes[1] if len(sizes) > 1 else 1
    groups = [devices[at : at + copies] for at in range(0, len(devices), copies)]
    cells: list[int | list[int]] = [each if found[3] else each[0] for each in groups]
    return [cells[at : at + width] for at in range(0, len(cells), width)]
