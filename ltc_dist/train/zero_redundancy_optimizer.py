"""ZeRO stage 1: each process keeps the optimizer's state of its part of every parameter.

A step reduce-scatters the mean gradients, clips them by their norm over all processes, runs the inner optimizer on this
process's shards, and all-gathers the parameters. All of it is recorded. Comes from `bucketized`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ltc_core.errors import CheckpointError, CollectiveError, DeviceError, LtcError, listed
from ltc_core.settings import settings
from ltc_core.source import user_line
from ltc_dist.collectives.bucketized import all_gather_bucketized, reduce_scatter_bucketized
from ltc_dist.collectives.ops import all_reduce
from ltc_dist.collectives.process_group import Groups, group_of

__all__ = ["UnsupportedOptionError", "ZeroRedundancyOptimizer"]

Pair = tuple[torch.Tensor, torch.Tensor]

_NEEDED = ("base_state", "param_groups", "shape_info", "shard")  # in a state_dict


class UnsupportedOptionError(LtcError, NotImplementedError):
    """An option of an old script that has no counterpart here."""


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer, and shards its state over the processes.

    A parameter is flattened and padded with zeros to a length that the number of processes divides; each process has
    one shard of it. An optimizer that depends on the shape or the norm of a parameter gives other results than without
    it.

    `step` reduces the gradients: call nothing between `backward` and `step`. With a `GradScaler` call
    `ltc_dist.reduce_gradients` before its `step`, so that all processes find the same overflows.

    Each process saves its shards. `Checkpointer(directory, optimizer=optimizer)` saves those of all processes, and cuts
    them anew when another number of processes restores them: training goes on with the same losses. `load_state_dict`
    takes only what the same rank of a job of as many processes saved.

    Args:
        params: parameters or groups, on one device.
        optimizer_class: of the inner optimizer, such as `torch.optim.AdamW`.
        optimizer_dtype: of shards and state; None for float32.
        grad_clipping: whether gradients are clipped.
        max_norm: of all gradients together; None for 1.0.
        sharding_groups: lists of ranks; each list shares one set of parameters. All processes by default.
        grad_norm_groups: over these the norm is summed up as well, for models that are themselves split.
        lazy_init: shard when `init_zero` is called.
        bucket_cap_mb_all_gather: MiB of a vector of parameters at most; 0 for LTC_BUCKET_MB.
        bucket_cap_mb_reduce_scatter: the same for gradients.
        use_grad_acc_hook: refused; gradients are summed up in their own dtype.
        save_master_weights: `state_dict` has the shards too, which may be more precise than the parameters.
        higher_cc_precision: reduce gradients in `optimizer_dtype`.
        pin_layout, coalesce_cc: accepted for old scripts.
        defaults: arguments of the inner optimizer.

    Attributes:
        base_optimizer: the inner one, over the shards.

    Raises:
        UnsupportedOptionError: `use_grad_acc_hook`.
        DeviceError: the parameters are not on one lazy device.
        CollectiveError: groups that do not have every rank in exactly one list.

    Source: `torch_xla.distributed.zero_redundancy_optimizer`, which shards along dim 0; ZeRO, arXiv:1910.02054.
    """

    base_optimizer: torch.optim.Optimizer | None = None

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Groups = None,
        grad_norm_groups: Groups = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        coalesce_cc: bool = False,
        **defaults: Any,
    ) -> None:
        if use_grad_acc_hook:
            raise UnsupportedOptionError(
                "gradients are summed up in their own dtype",
                got="use_grad_acc_hook=True",
                next="leave it out; with float32 parameters and torch.autocast gradients are float32",
            )
        super().__init__(params, defaults)
        self.optimizer_class = optimizer_class
        self.optimizer_dtype = optimizer_dtype or torch.float32
        self.grad_clipping = grad_clipping
        self.max_norm = 1.0 if max_norm is None else max_norm
        self.save_master_weights = save_master_weights
        self.higher_cc_precision = higher_cc_precision
        self._groups, self._norm_groups = sharding_groups, grad_norm_groups
        self._gather_mb = bucket_cap_mb_all_gather
        self._scatter_mb = bucket_cap_mb_reduce_scatter
        self._norm: torch.Tensor | None = None
        if not lazy_init:
            self.init_zero()

    # -- shards ------------------------------------------------------------------------------------

    @property
    def sharding_groups(self) -> Groups:
        return self._groups

    @sharding_groups.setter
    def sharding_groups(self, groups: Groups) -> None:
        if self.base_optimizer is not None:
            raise CollectiveError(
                "the parameters are sharded already",
                got=f"new sharding_groups {groups}",
                next="set them before init_zero(), with lazy_init=True",
            )
        self._groups = groups

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before the last clipping; None if there was none."""
        return self._norm

    def init_zero(self) -> None:
        """Make the shards, of the parameters as they are now, and the inner optimizer.

        Cost: recorded; the first time in a job the processes of a group connect.
        """
        devices = {p.device for group in self.param_groups for p in group["params"]}
        if len(devices) != 1 or next(iter(devices)).type != settings.device_name:
            raise DeviceError(
                "the parameters must be on one lazy device",
                got=", ".join(sorted(map(str, devices))),
                next="move the model before the optimizer is made",
            )
        rows = [self._sharded(group) for group in self.param_groups]
        self.base_optimizer = self.optimizer_class(rows, **self.defaults)
        self.defaults = self.base_optimizer.defaults
        _copy_options(self.base_optimizer, self)

    def _sharded(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group of the inner optimizer for one of parameters."""
        shards = []
        for p in group["params"]:
            shard = torch.nn.Parameter(self._shard_of(p), requires_grad=p.requires_grad)
            shards.append(shard)
        return {**group, "params": shards}

    def _shard_of(self, p: torch.Tensor) -> torch.Tensor:
        here = group_of(self._groups)
        flat = self._padded(p.detach())
        size = flat.numel() // len(here.members)
        return flat.narrow(0, here.position * size, size).to(self.optimizer_dtype, copy=True)

    def _padded(self, value: torch.Tensor) -> torch.Tensor:
        """Make a vector whose length the processes divide."""
        lacking = -value.numel() % len(group_of(self._groups).members)
        flat = value.reshape(-1)
        return torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat

    def _pairs(self) -> Iterator[Pair]:
        """Return each parameter with its shard."""
        for group, row in zip(self.param_groups, self._inner.param_groups, strict=True):
            yield from zip(group["params"], row["params"], strict=True)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        if self.base_optimizer is None:
            raise CollectiveError(
                "the parameters are not sharded yet",
                got="lazy_init=True",
                next="call init_zero() on the optimizer first",
            )
        return self.base_optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and its shards."""
        super().add_param_group(param_group)
        if self.base_optimizer is not None:
            self.base_optimizer.add_param_group(self._sharded(self.param_groups[-1]))
            _copy_options(self.base_optimizer, self)

    # -- a step ------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step with the gradients averaged over the processes.

        Parameters without a gradient stay; they must be the same ones in all processes.

        Args:
            kwargs: for the inner optimizer's `step`.

        Returns:
            What the closure gives.

        Raises:
            CollectiveError: there are no shards yet. When the graph runs: processes do not agree.

        Cost: recorded. One reduce_scatter and one all_gather for each vector, one all_reduce for the norm.
        """
        inner = self._inner
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _copy_options(self, inner)
        with torch.no_grad():
            pairs = [(p, shard) for p, shard in self._pairs() if p.grad is not None]
            self._reduce(pairs)
            if self.grad_clipping and pairs:
                self._clip([shard.grad for _, shard in pairs])  # type: ignore[misc]
        inner.step(**kwargs)
        inner.zero_grad()
        with torch.no_grad():
            self._gather(pairs)
        _copy_options(inner, self)
        return loss

    def _reduce(self, pairs: Sequence[Pair]) -> None:
        """Assign each shard its part of the mean gradient."""
        grads = [self._padded(p.grad) for p, _ in pairs]  # type: ignore[arg-type]
        if self.higher_cc_precision:
            grads = [grad.to(self.optimizer_dtype) for grad in grads]
        count = len(group_of(self._groups).members)
        if count > 1:
            cap_mb = self._scatter_mb or settings.bucket_mb
            grads = reduce_scatter_bucketized(
                "sum", grads, 1 / count, 0, count, self._groups, bucket_cap_mb=cap_mb
            )
        for (_, shard), grad in zip(pairs, grads, strict=True):
            shard.grad = grad.to(self.optimizer_dtype)

    def _clip(self, grads: list[torch.Tensor]) -> None:
        total = torch.stack(torch._foreach_norm(grads)).square().sum()
        total = all_reduce("sum", total, groups=self._groups)
        if self._norm_groups is not None:
            total = all_reduce("sum", total, groups=self._norm_groups)
        self._norm = total.sqrt()
        torch._foreach_mul_(grads, (self.max_norm / (self._norm + 1e-6)).clamp(max=1.0))

    def _gather(self, pairs: Sequence[Pair]) -> None:
        """Write the shards of all processes to the parameters."""
        parts = [shard.to(p.dtype) for p, shard in pairs]
        if len(group_of(self._groups).members) > 1:
            cap_mb = self._gather_mb or settings.bucket_mb
            parts = all_gather_bucketized(parts, 0, self._groups, bucket_cap_mb=cap_mb)
        for (p, _), flat in zip(pairs, parts, strict=True):
            p.copy_(flat[: p.numel()].view(p.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of parameters and shards."""
        super().zero_grad(set_to_none)
        if self.base_optimizer is not None:
            self.base_optimizer.zero_grad(set_to_none)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process: it can be loaded by the same rank of a job of as many processes.

        Returns:
            'state' (empty), 'param_groups', 'base_state' (of the inner optimizer), 'shape_info' (of the parameters),
            'shard' ([position, number of processes]), 'ranks' (that share the parameters), with `save_master_weights`
            'sharded_master_weights'.
        """
        here = group_of(self._groups)
        pairs = list(self._pairs())
        found = super().state_dict()
        found["base_state"] = self._inner.state_dict()["state"]
        found["shape_info"] = {k: p.shape for k, (p, _) in enumerate(pairs)}
        found["shard"] = [here.position, len(here.members)]
        found["ranks"] = list(here.members)
        if self.save_master_weights:
            found["sharded_master_weights"] = {k: s.detach() for k, (_, s) in enumerate(pairs)}
        return found

    def check_state_dict(self, state_dict: dict[str, Any], name: str = "this state") -> None:
        """Check that a state can be loaded here.

        Args:
            name: of the state, for messages.

        Raises:
            CheckpointError: it is not one of this class, is the shard of another process or of a job of another size,
                or has other parameters.
        """
        if missing := [key for key in _NEEDED if key not in state_dict]:
            raise _load_error(
                f"{name} is not the state of a ZeroRedundancyOptimizer",
                got=f"it has {listed(state_dict)}; expected {listed(missing)} too",
                next="load what its state_dict() gave, in the same rank",
            )
        here = group_of(self._groups)
        mine = here.position, len(here.members)
        position, count = state_dict["shard"]
        members = state_dict.get("ranks", here.members)  # older states do not have it
        if (position, count) != mine or tuple(members) != here.members:
            saved = f"shard {position} of {count}" + _among(state_dict.get("ranks"))
            raise _load_error(
                f"{name} is of another shard",
                got=f"{saved}; here shard {mine[0]} of {mine[1]}{_among(here.members)}",
                next=f"start {count} processes, and load in each rank what it saved; or save and restore with "
                "ltc_dist.Checkpointer, which cuts shards anew for another number of processes (without "
                "sharding_groups)",
            )
        if different := self._other_parameters(state_dict):
            raise _load_error(
                f"{name} has other parameters",
                got=listed(different),
                next="make the model and the groups that it was saved from",
            )

    def _other_parameters(self, state_dict: dict[str, Any]) -> list[str]:
        """Say how the parameters of a state differ from those here."""
        theirs, mine = state_dict["param_groups"], self.param_groups
        sizes, here = ([len(g["params"]) for g in groups] for groups in (theirs, mine))
        if sizes != here:
            return [f"groups of {listed(sizes)} parameters, here of {listed(here)}"]
        names, names_here = (
            [name for g in groups for name in g.get("param_names", [None] * len(g["params"]))]
            for groups in (theirs, mine)
        )
        found = []
        parameters = [p for group in mine for p in group["params"]]
        for k, (p, name, name_here) in enumerate(zip(parameters, names, names_here, strict=True)):
            shape = tuple(state_dict["shape_info"].get(k, ()))
            called = f"parameter {k}" + (f" ({name_here})" if name_here else "")
            if name and name_here and name != name_here:
                found.append(f"{called} is {name} in it")
            if shape != tuple(p.shape):
                found.append(f"{called} has shape {shape} in it, here {tuple(p.shape)}")
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this rank, after the model: without saved shards they are made of the parameters.

        `ltc_dist.Checkpointer` loads the state of a job of another number of processes.

        Raises:
            CheckpointError: see `check_state_dict`; nothing has been changed then.
        """
        self.check_state_dict(state_dict)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        if self.base_optimizer is None:
            self.init_zero()
        weights = state_dict.get("sharded_master_weights")
        with torch.no_grad():
            for k, (p, shard) in enumerate(self._pairs()):
                shard.copy_(self._shard_of(p) if weights is None else weights[k])
            if weights is not None:
                self._gather(list(self._pairs()))
        inner = self._inner
        _copy_options(self, inner)
        groups = inner.state_dict()["param_groups"]
        inner.load_state_dict({"state": state_dict["base_state"], "param_groups": groups})


def _among(ranks: Sequence[int] | None) -> str:
    return f" among ranks {listed(ranks)}" if ranks is not None else ""


def _load_error(what: str, *, got: str, next: str) -> CheckpointError:
    error = CheckpointError(what, got=got, where=user_line(), next=next)
    error.where_words = "loaded at"
    return error


def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy the options of an optimizer's groups to those of another, without the parameters."""
    for mine, theirs in zip(source.param_groups, target.param_groups, strict=True):
        theirs.update({key: value for key, value in mine.items() if key != "params"})
