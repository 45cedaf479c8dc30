"""`torch_xla.core.xla_op_registry`, ops on tensors whose computation a function builds."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

from ltc_dist.compat.torch_xla.core import xla_builder as xb

__all__ = ["Op", "register"]


class Op:
    """An op on tensors. Its function is called once for the shapes and keyword arguments of a call.

    Args:
        name: of the op.
        opfn: takes and returns `xb.Op`, or returns several of them by `xb.Op.tuple`.
    """

    def __init__(self, name: str, opfn: Callable[..., xb.Op]) -> None:
        self._name, self._opfn = name, opfn
        self._lock = threading.Lock()
        self._functions: dict[bytes, Callable[..., list[torch.Tensor]]] = {}

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """Record the op.

        Args:
            kwargs: for the function; they cannot be tensors.

        Returns:
            A tensor, or a list if the function returns a tuple. No gradient flows through it.
        """
        shapes = xb.tensor_shape(args)
        key = pickle.dumps(([shape.shape for shape in shapes], kwargs))
        with self._lock:
            function = self._functions.get(key)
            if function is None:
                computation = xb.create_computation(self._name, self._opfn, shapes, **kwargs)
                function = self._functions[key] = xb.xla_computation_as_func(computation)
        results = function(args)
        return results[0] if len(results) == 1 else results


def register(name: str, opfn: Callable[..., xb.Op]) -> Op:
    """Make an op on tensors of a function that builds its computation."""
    return Op(name, opfn)
