"""Executors by name: adding one is one file and one row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ltc_core.executors.base import Executor, NodeFailure, Program
from ltc_core.executors.inductor.executor import InductorExecutor
from ltc_core.executors.null import NullExecutor
from ltc_core.executors.reference import ReferenceExecutor

__all__ = ["EXECUTORS", "Executor", "NodeFailure", "Program"]

EXECUTORS: dict[str, Callable[[torch.device], Executor]] = {
    "inductor": InductorExecutor,
    "reference": ReferenceExecutor,
    "null": NullExecutor,
}
