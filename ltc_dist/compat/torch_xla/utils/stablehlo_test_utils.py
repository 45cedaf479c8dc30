"""`torch_xla.utils.stablehlo_test_utils`: helpers of tests of exported programs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from ltc_dist.compat.absent import Absent
from ltc_dist.compat.table import TF

__all__ = [
    "compare_exported_program_and_saved_model_result",
    "has_tf_package",
    "load_save_model_and_inference",
    "wrap_func_as_nn_module",
]

compare_exported_program_and_saved_model_result = Absent(
    "compare_exported_program_and_saved_model_result", TF
)
load_save_model_and_inference = Absent("load_save_model_and_inference", TF)


@functools.cache
def has_tf_package() -> bool:
    """Whether TensorFlow is installed."""
    return importlib.util.find_spec("tensorflow") is not None


class _Wrapped(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def wrap_func_as_nn_module(f: Callable[..., Any]) -> torch.nn.Module:
    """A module, in evaluation mode, whose forward pass is a function."""
    return _Wrapped(f).eval()
