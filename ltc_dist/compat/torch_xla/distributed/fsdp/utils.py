"""`torch_xla.distributed.fsdp.utils`: activation checkpoints for a module, and a patch that is not needed here."""

from __future__ import annotations

import types
from typing import Any, TypeVar

import torch.utils.checkpoint
from torch import nn

from ltc_dist.compat.torch_xla.distributed.spmd.xla_sharding import apply_xla_patch_to_nn_linear

__all__ = ["apply_xla_patch_to_nn_linear", "checkpoint_module"]

M = TypeVar("M", bound=nn.Module)


def checkpoint_module(module: M) -> M:
    """Have backward run the module's forward again, in place of keeping what it computed. Changes the module.

    Cost: the whole forward is recorded again; ops whose results backward does not need are not run.
    """
    held: Any = module
    held._xla_checkpointed_forward_original = module.forward
    held.forward = types.MethodType(_checkpointed, module)
    return module


def _checkpointed(module: Any, *args: Any, **kwargs: Any) -> Any:
    forward = module._xla_checkpointed_forward_original
    with torch.utils.checkpoint.set_checkpoint_early_stop(
        False
    ):  # what forward does besides is done again, too
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)
