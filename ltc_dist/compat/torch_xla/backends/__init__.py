"""`torch_xla.backends`: how exactly float32 is multiplied."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from ltc_core.errors import SettingsError

__all__ = ["_WARNING_MESSAGE", "get_mat_mul_precision", "logger", "set_mat_mul_precision"]

logger = logging.getLogger(__name__)

_WARNING_MESSAGE = (
    "Programs contain the precision of products: after a change of it they are compiled anew."
)

_NAMES = {"default": "medium", "high": "high", "highest": "highest"}


def set_mat_mul_precision(precision: Literal["default", "high", "highest"]) -> None:
    """Set how exactly products of float32 are computed: 'default', 'high' or 'highest'.

    It is `torch.set_float32_matmul_precision`, whose 'medium' is 'default' here. Programs are compiled anew, which
    a warning says, as torch_xla's does.

    Source: `torch_xla.backends.set_mat_mul_precision`. There 'default' is the default; here it is 'highest'.
    """
    if precision not in _NAMES:
        raise SettingsError(
            "there is no such precision",
            got=repr(precision),
            next=f"use one of {', '.join(map(repr, _NAMES))}",
        )
    logger.warning(_WARNING_MESSAGE)
    torch.set_float32_matmul_precision(_NAMES[precision])


def get_mat_mul_precision() -> str:
    """The precision of products of float32: 'default', 'high' or 'highest'."""
    found = torch.get_float32_matmul_precision()
    return next(name for name, ours in _NAMES.items() if ours == found)
