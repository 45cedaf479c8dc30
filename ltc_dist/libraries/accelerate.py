"""accelerate, and the Trainer of transformers, which takes its device from there."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ltc_core.settings import settings
from ltc_dist.job.ranks import ranks
from ltc_dist.libraries.telling import tell

__all__ = ["change_launcher", "change_local_rank", "change_state", "change_training_arguments"]


def change_state(state: Any) -> None:
    """Replace the method in which accelerate looks for the hardware, and decides how processes are joined."""
    kinds, choose = state.DistributedType, state.PartialState._prepare_backend

    @functools.wraps(choose)
    def prepare(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        is_ours = self.device is None or self.device.type == settings.device_name
        found = choose(self, cpu, *args, **kwargs)
        if not is_ours:
            return found
        if cpu or found[1] is kinds.XLA:
            self.device = None  # what the script says comes before the variable
            return found
        tell("accelerate", "Accelerator(cpu=True) or ACCELERATE_TORCH_DEVICE=cpu choose")
        self.device = torch.device(settings.device_name)
        is_job = int(os.environ.get("WORLD_SIZE", 1)) > 1
        return ("gloo", kinds.MULTI_CPU) if is_job else (None, kinds.NO)

    state.PartialState._prepare_backend = prepare


def change_training_arguments(module: Any) -> None:
    """Let the Trainer take the device of accelerate, and not read the loss of each step, as it does with torch_xla."""
    cls = module.TrainingArguments
    found = cls.__dict__["_setup_devices"]
    set_up = found.func if hasattr(found, "func") else found.fget

    @functools.wraps(set_up)
    def call(self: Any) -> Any:
        device, state = set_up(self), self.distributed_state
        if state is None or state.device.type != settings.device_name:
            return device
        self._n_gpu = 0
        self.logging_nan_inf_filter = False
        return state.device

    changed = type(found)(call)
    if hasattr(changed, "__set_name__"):
        changed.__set_name__(cls, "_setup_devices")
    cls._setup_devices = changed


def change_local_rank(state: Any) -> None:
    """Set the local rank of a process without a launcher to 0.

    accelerate sets it to -1 if the hardware is no TPU, and prints in the process of local rank 0 only.
    """
    set_device = state.PartialState.set_device

    @functools.wraps(set_device)
    def call(self: Any) -> Any:
        if self.backend == "xla" and getattr(self, "local_process_index", 0) == -1:
            self.local_process_index = ranks().local_rank
        return set_device(self)

    state.PartialState.set_device = call


def change_launcher(module: Any) -> None:
    """Let `accelerate launch --num_processes 2` start two processes, as it does where it knows several GPUs."""
    start_one = module.simple_launcher

    @functools.wraps(start_one)
    def start(args: Any) -> None:
        is_job = (args.num_processes or 1) > 1 and not (args.cpu or args.use_cpu)
        (module.multi_gpu_launcher if is_job else start_one)(args)

    module.simple_launcher = start
