"""`dp`: `torch_xla.distributed.data_parallel`.

Loops of 2019 and of the documents write `for _, (data, target) in loader`, later ones `for data, target in loader` or
`enumerate(loader)`. A pair looks like a batch of two, so the source of the loop decides what it gets.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import ltc_dist.train.data_parallel
from ltc_dist.train.data_parallel import Context

__all__ = ["Context", "DataParallel"]


class DataParallel(ltc_dist.train.data_parallel.DataParallel):
    """Replicas of a model, one for each device; loops get batches, or pairs (number, batch) if they unpack pairs."""

    def __call__(self, loop_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the loop for each device; see `ltc_dist.train.data_parallel`."""
        if kwargs.get("enumerate_batches") is None:
            kwargs["enumerate_batches"] = unpacks_pairs(loop_fn)
        return super().__call__(loop_fn, *args, **kwargs)


def unpacks_pairs(loop_fn: Callable[..., Any]) -> bool:
    """Whether a loop is written for pairs: `for k, (data, target) in loader`, its second argument."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(loop_fn)))
    except (OSError, TypeError, SyntaxError):
        return False
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    names = [a.arg for a in functions[0].args.args if a.arg != "self"] if functions else []
    return len(names) > 1 and any(
        isinstance(node, ast.For)
        and isinstance(node.iter, ast.Name)
        and node.iter.id == names[1]
        and isinstance(node.target, ast.Tuple)
        and len(node.target.elts) == 2
        and isinstance(node.target.elts[1], ast.Tuple | ast.List)
        for node in ast.walk(tree)
    )
