"""`FullyShardedDataParallel`: a module whose parameters are divided over the processes.

All of it is recorded: gathering, scattering and the optimizer's step are part of the step's graph. Comes from `shards`
and `use`; the wrapped module finds its parameters in `whole_parameters`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

import ltc_core as ltc
from ltc_core.errors import LtcError
from ltc_core.settings import settings
from ltc_dist.collectives.bucketized import all_gather_bucketized, reduce_scatter_bucketized
from ltc_dist.collectives.process_group import Groups, group_of
from ltc_dist.fully_sharded.divided_parameter import DividedParameter
from ltc_dist.fully_sharded.materialize import materialize
from ltc_dist.fully_sharded.names import MODULE, inner, joined, original, shard_name
from ltc_dist.fully_sharded.norm import clip_by_norm
from ltc_dist.fully_sharded.policy import wrap_below
from ltc_dist.fully_sharded.shards import ShardLayout, is_shard
from ltc_dist.fully_sharded.transparent import Transparent
from ltc_dist.fully_sharded.use import Use
from ltc_dist.fully_sharded.whole_parameters import WholeParameters

__all__ = ["FullyShardedDataParallel", "FullyShardedError"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class FullyShardedError(LtcError, RuntimeError):
    """A use of a module that its divided parameters do not allow."""


class FullyShardedDataParallel(Transparent):
    """A module whose parameters, gradients and optimizer state are divided over the processes.

    Each process keeps a shard of each parameter. The parameters are gathered for the module's forward, freed after it,
    gathered again for its backward, and freed; the gradients are averaged over the processes, and each process gets
    those of its shards. Wrap inner modules first, or give a policy: each wrapped module is a unit, which is whole only
    while it runs. The last to be wrapped is the whole model, for the parameters that are left.

    Make the optimizer afterwards, over `parameters()`, and call its own `step`: the gradients are averaged already.
    Clip with `clip_grad_norm_` of this class or of `ltc_dist`: PyTorch's sees the shards of one process. `state_dict`
    has the shards of this process; `Checkpointer` saves those of all processes, and
    `consolidate_sharded_model_checkpoints` makes a model's state dict of such files.

    Args:
        module: the module. Its parameters may lie on the CPU or on the meta device; shards and buffers move to this
            process's lazy device.
        reshard_after_forward: free the whole parameters after forward; without it they are kept for backward.
        flatten_parameters: one shard for all parameters of a dtype that are trained, and one for the rest.
        execute_sharding_on_init: cut the graph, so that the undivided parameters are freed at once.
        sync_on_finalization: cut the graph at the end of backward.
        mark_step_on_finalization: an older name for it.
        disable_reshard_on_root: keep the outermost unit's parameters for backward, which begins with them.
        compute_dtype: of whole parameters, inputs and gradients; None for the parameters' own.
        buffer_dtype: of buffers with floating numbers; None for `compute_dtype`.
        fp32_reduce_scatter: average gradients in float32.
        sharding_groups: lists of ranks; each list shares one set of parameters. All processes by default.
        sharding_rank, sharding_world_size: accepted for old scripts: the group says it.
        shard_param_on_dim_0: divide the rows of each parameter, which keeps its other dimensions.
        reduce_scatter_bucket_size_mb: MiB of a message of gradients at most; 0 for LTC_BUCKET_MB.
        auto_wrap_policy: which inner modules are units, as for `torch.distributed.fsdp`.
        auto_wrapper_callable: wraps them; this class by default.
        param_init_fn: called with each module on the meta device; by default its memory is made, and its
            `reset_parameters` called.
        optimization_barrier_in_forward, optimization_barrier_in_backward, pin_layout_in_collective_ops,
            coalesce_all_gather_ops: accepted for old scripts. Ops run in the order in which they were recorded, and a
            unit's parameters are one message.

    Attributes:
        sharded_params: the shards of this unit.

    Raises:
        RuntimeError: the module is wrapped already, or has no `forward`.
        ValueError: a dtype that is not a floating one.
        FullyShardedError: a parameter belongs to another unit, or has integers.
        NotImplementedError: a debugging option of torch_xla's.

    Cost: recorded; of each unit one all_gather in forward, one more and one reduce_scatter in backward.

    Source: `torch_xla.distributed.fsdp.XlaFullyShardedDataParallel`; ZeRO, arXiv:1910.02054.
    """

    HELD = MODULE

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Groups = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        reduce_scatter_bucket_size_mb: float | None = 0,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        mark_step_on_finalization: bool = False,
        _shard_size_multiple: int = 128,
        _use_xla_patched_linear: bool = True,
        _debug_msg: str = "xla_fsdp",
        _debug_print: bool = False,
        **debugging: Any,
    ) -> None:
        _check(module, compute_dtype, buffer_dtype, debugging)
        super().__init__()
        options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "flatten_parameters": flatten_parameters,
            "execute_sharding_on_init": execute_sharding_on_init,
            "sync_on_finalization": sync_on_finalization,
            "disable_reshard_on_root": disable_reshard_on_root,
            "compute_dtype": compute_dtype,
            "buffer_dtype": buffer_dtype,
            "fp32_reduce_scatter": fp32_reduce_scatter,
            "sharding_groups": sharding_groups,
            "shard_param_on_dim_0": shard_param_on_dim_0,
            "reduce_scatter_bucket_size_mb": reduce_scatter_bucket_size_mb,
            "param_init_fn": param_init_fn,
            "mark_step_on_finalization": mark_step_on_finalization,
            "_shard_size_multiple": _shard_size_multiple,
        }
        if auto_wrap_policy is not None:
            wrap = functools.partial(auto_wrapper_callable or type(self), **options)
            wrap_below(module, auto_wrap_policy, FullyShardedDataParallel, wrap, _is_whole)
        self.reshard_after_forward = reshard_after_forward
        self.flatten_parameters = flatten_parameters
        self.disable_reshard_on_root = disable_reshard_on_root
        self.compute_dtype = compute_dtype
        self.buffer_dtype = buffer_dtype or compute_dtype
        self.fp32_reduce_scatter = fp32_reduce_scatter
        self.sharding_groups = sharding_groups
        here = group_of(sharding_groups)
        self.rank, self.world_size = here.position, len(here.members)
        self.gradient_predivide_factor = 1.0
        self.gradient_postdivide_factor = float(self.world_size)
        self._ends_step = sync_on_finalization or mark_step_on_finalization
        self._bucket_mb = reduce_scatter_bucket_size_mb or 0
        self._multiple = 1 if shard_param_on_dim_0 else _shard_size_multiple
        self._is_on_dim_0 = shard_param_on_dim_0 and not flatten_parameters
        self._device = ltc.lazy_device()
        # The outermost unit, once a forward was called; in a list, so that it is no submodule.
        self._root: list[FullyShardedDataParallel] = []
        self._is_synced = True
        self._uses: list[Use] = []  # forwards under way
        # Modules and attributes that are lists of parameters, and which ones; they are filled during forward.
        self._lists: list[tuple[nn.Module, str, list[int]]] = []
        # A backward, and the forward that it repeats because the module has a checkpoint.
        self._recomputed: tuple[int, Use] | None = None
        # Gradients of whole parameters, of backwards under `no_sync`, by the number of the shard.
        self._unsynced: dict[int, torch.Tensor] = {}
        self._has_unsynced = False  # of the root: some unit may have such
        materialize(module, param_init_fn)
        self._fsdp_wrapped_module = module
        self.sharded_params: list[Any] = []  # parameters that say what they are part of
        self._divide()
        self._cast_buffers()
        if execute_sharding_on_init:
            ltc.mark_step(device=self._device)

    @property
    def module(self) -> nn.Module:
        """The module that is wrapped."""
        return self._fsdp_wrapped_module

    def extra_repr(self) -> str:
        return (
            f"world_size={self.world_size}, rank={self.rank}, compute_dtype={self.compute_dtype}, "
            f"buffer_dtype={self.buffer_dtype}, flatten_parameters={self.flatten_parameters}, "
            f"reshard_after_forward={self.reshard_after_forward}, sharding_groups={self.sharding_groups}"
        )

    # -- dividing ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _divide(self) -> None:
        """Make the shards, and take the whole parameters out of their modules."""
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        names: dict[nn.Parameter, list[str]] = {}
        for path, module in self._fsdp_wrapped_module.named_modules(remove_duplicate=False):
            if isinstance(module, FullyShardedDataParallel):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                full_name = joined(path, name)
                _check_parameter(parameter, full_name)
                places.setdefault(parameter, []).append((module, name))
                names.setdefault(parameter, []).append(full_name)
        rows = self._rows(list(places))
        for members in rows:
            self._add_shard(members, [names[p][0] for p in members])
        self._shared_names = {row[0]: row[1:] for row in names.values() if len(row) > 1}
        numbers = {p: k for k, p in enumerate(p for members in rows for p in members)}
        for parameter, index in numbers.items():
            parameter._belongs_to_unit = True  # type: ignore[attr-defined]
            for module, name in places[parameter]:
                _whole_parameters(module).divide(name, self, index)
                self._lists += _lists(module, numbers)

    def _rows(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Which parameters share a shard."""
        if not self.flatten_parameters:
            return [[p] for p in parameters]
        rows: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for parameter in sorted(parameters, key=lambda p: not p.requires_grad):
            rows.setdefault((parameter.requires_grad, parameter.dtype), []).append(parameter)
        return list(rows.values())

    def _add_shard(self, members: list[nn.Parameter], names: list[str]) -> None:
        shapes = [p.shape for p in members]
        layout = ShardLayout(shapes, self.world_size, self._multiple, self._is_on_dim_0)
        data = layout.shard([p.detach() for p in members], self.rank).to(self._device)
        shard: Any = nn.Parameter(data, requires_grad=members[0].requires_grad)
        number = len(self.sharded_params)
        whole = (
            f"{MODULE}.flat_param_{number}"
            if self.flatten_parameters
            else f"{MODULE}.{inner(names[0])}"
        )
        shard._is_sharded = True
        shard._layout, shard._members = layout, names
        shard._unit_rank, shard._groups = self.rank, self.sharding_groups
        shard._orig_name = whole
        shard._orig_size = (
            torch.Size([sum(layout.numels)]) if self.flatten_parameters else shapes[0]
        )
        shard._name = shard_name(whole)
        self.register_parameter(shard._name, shard)
        self.sharded_params.append(shard)

    @torch.no_grad()
    def _cast_buffers(self) -> None:
        for module in self._fsdp_wrapped_module.modules():
            if isinstance(module, FullyShardedDataParallel):
                continue
            for name, buffer in module.named_buffers(recurse=False):
                before = getattr(buffer, "_orig_dtype", buffer.dtype)
                dtype = self.buffer_dtype if buffer.is_floating_point() else None
                if hasattr(buffer, "_orig_dtype"):
                    dtype = None  # an inner unit has cast it
                cast: Any = buffer.to(self._device, dtype or buffer.dtype)
                if cast.dtype != before:
                    cast._orig_dtype = before
                module._buffers[name] = cast

    # -- running -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._find_root()
        if self.compute_dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        if not self.sharded_params:
            return self._fsdp_wrapped_module(*args, **kwargs)
        use = Use(self)
        self._uses.append(use)
        reshards = self.reshard_after_forward and not (
            self._is_root and self.disable_reshard_on_root
        )
        keeps = use.keeps() if reshards and torch.is_grad_enabled() else contextlib.nullcontext()
        assert use.whole is not None
        for module, name, indices in self._lists:
            vars(module)[name] = [use.whole[index] for index in indices]
        try:
            with keeps:
                return self._fsdp_wrapped_module(*args, **kwargs)
        finally:
            for module, name, indices in self._lists:
                vars(module)[name] = [None] * len(indices)
            self._uses.remove(use)
            use.end_of_forward()

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.compute_dtype) if value.is_floating_point() else value

    def _find_root(self) -> None:
        """The unit whose forward is called first is the outermost one."""
        if not self._root:
            for unit in self._units():
                unit._root = [self]

    @property
    def _is_root(self) -> bool:
        return self._root == [self]

    def _units(self) -> list[FullyShardedDataParallel]:
        return [m for m in self.modules() if isinstance(m, FullyShardedDataParallel)]

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of this unit is under way."""
        return bool(self._uses)

    def whole(self, index: int, name: str) -> torch.Tensor:
        """A parameter while it is whole, else what describes it."""
        if self._uses:
            use = self._uses[-1]
        else:
            backward = torch._C._current_graph_task_id()
            if backward == -1:
                return self._described(index, name)
            if self._recomputed is None or self._recomputed[0] != backward:
                self._recomputed = backward, Use(self)
                Variable._execution_engine.queue_callback(self._forget_recomputed)
            use = self._recomputed[1]
        assert use.whole is not None
        return use.whole[index]

    def _described(self, index: int, name: str) -> DividedParameter:
        places = [(shard, shape) for shard in self.sharded_params for shape in shard._layout.shapes]
        shard, shape = places[index]
        count, device = self.world_size, self._device
        return DividedParameter(shape, shard.dtype, device, shard.requires_grad, name, count)

    def _forget_recomputed(self) -> None:
        self._recomputed = None

    def gather(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole parameters."""
        mine = [shard.reshape(-1).to(self.compute_dtype or shard.dtype) for shard in shards]
        cap_mb = settings.bucket_mb
        vectors = all_gather_bucketized(mine, 0, self.sharding_groups, bucket_cap_mb=cap_mb)
        pairs = zip(self.sharded_params, vectors, strict=True)
        return [whole for shard, vector in pairs for whole in shard._layout.whole(vector)]

    def _by_shard(self, values: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """The shards, and those of the values, one for each parameter, that belong to each."""
        rest = iter(values)
        for shard in self.sharded_params:
            yield shard, list(itertools.islice(rest, len(shard._layout.shapes)))

    def frozen(self, whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are not trained."""
        rows = self._by_shard(whole)
        return [one for shard, members in rows if not shard.requires_grad for one in members]

    def scatter(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the shards, averaged over the processes, of those of this process's whole parameters."""
        self._recomputed = None
        rows: dict[int, torch.Tensor] = {}
        for number, (shard, mine) in enumerate(self._by_shard(gradients)):
            if shard.requires_grad and any(grad is not None for grad in mine):
                rows[number] = self._row(mine, shard._layout)
        if not self._is_synced:
            for number, row in rows.items():
                before = self._unsynced.get(number)
                self._unsynced[number] = row if before is None else before + row
            return [None] * len(self.sharded_params)
        if self._root and self._root[0]._has_unsynced:
            Variable._execution_engine.queue_callback(self._root[0]._average_the_rest)
        found = self._averaged(rows)
        if self._ends_step:
            Variable._execution_engine.queue_callback(self._end_step)
        return found

    def _averaged(self, rows: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the shards, of `rows` and of what was kept under `no_sync`."""
        for number, before in self._unsynced.items():
            rows[number] = rows[number] + before if number in rows else before
        self._unsynced = {}
        scale = 1 / (self.gradient_predivide_factor * self.gradient_postdivide_factor)
        if self.gradient_predivide_factor == self.gradient_postdivide_factor == 1:
            scale = 1 / self.world_size
        parts = reduce_scatter_bucketized(
            "sum",
            list(rows.values()),
            scale,
            0,
            self.world_size,
            self.sharding_groups,
            bucket_cap_mb=self._bucket_mb or settings.bucket_mb,
        )
        found: list[torch.Tensor | None] = [None] * len(self.sharded_params)
        for number, part in zip(rows, parts, strict=True):
            shard = self.sharded_params[number]
            found[number] = part.to(shard.dtype).view(shard.shape)
        return found

    @torch.no_grad()
    def _average_the_rest(self) -> None:
        """What was kept under `no_sync` by units that took no part in this backward."""
        self._has_unsynced = False
        for unit in self._units():
            if not unit._unsynced:
                continue
            for shard, grad in zip(unit.sharded_params, unit._averaged({}), strict=True):
                if grad is not None:
                    shard.grad = grad if shard.grad is None else shard.grad + grad

    def _row(self, gradients: list[torch.Tensor | None], layout: ShardLayout) -> torch.Tensor:
        there = next(grad for grad in gradients if grad is not None)
        whole = [
            there.new_zeros(shape) if grad is None else grad
            for grad, shape in zip(gradients, layout.shapes, strict=True)
        ]
        parts = layout.parts(whole)
        return parts.float() if self.fp32_reduce_scatter else parts

    def _end_step(self) -> None:
        ltc.mark_step(device=self._device)

    # -- gradients ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients in each process; the next backward outside averages the sum.

        Cost: memory of whole gradients.
        """
        self._find_root()
        if not self._is_root:
            raise FullyShardedError(
                "no_sync was called on an inner unit",
                got="a module inside another one that is wrapped",
                next="call it on the outermost wrapped module",
            )
        before = [(unit, unit._is_synced) for unit in self._units()]
        for unit, _ in before:
            unit._is_synced = False
        self._has_unsynced = True
        try:
            yield
        finally:
            for unit, was_synced in before:
                unit._is_synced = was_synced

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide the summed gradients by `pre` times `post`, in place of the number of processes; (1, 1) is the mean.

        Args:
            recursive: also in the units inside.
        """
        for unit in self._units() if recursive else [self]:
            unit.gradient_predivide_factor, unit.gradient_postdivide_factor = (
                float(pre),
                float(post),
            )

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The shards that have a gradient."""
        return [p for p in self.parameters() if p.grad is not None]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, groups: Groups = None
    ) -> torch.Tensor:
        """Scale the gradients of all shards so that their norm over all processes is at most `max_norm`.

        Returns:
            The norm before.

        Cost: recorded; one all_reduce.
        """
        parameters = self.params_with_grad
        if not parameters:
            return torch.zeros((), device=self._device)
        return clip_by_norm(parameters, float(max_norm), float(norm_type), groups)

    # -- state -------------------------------------------------------------------------------------

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The shards of all units, with the names that their parameters had."""
        found: list[tuple[str, nn.Parameter]] = []
        for path, unit in self.named_modules():
            if isinstance(unit, FullyShardedDataParallel):
                for shard in unit.sharded_params:
                    found.append((original(joined(path, shard._orig_name)), shard))
        return found

    def get_shard_metadata(self) -> dict[str, Any]:
        """What `consolidate_sharded_model_checkpoints` needs of one process, beside the shards of all."""
        shards: dict[str, dict[str, Any]] = {}
        flat: dict[str, tuple[list[str], list[torch.Size], list[int]]] = {}
        shared: dict[str, list[str]] = {}
        for path, unit in self.named_modules(remove_duplicate=False):
            if not isinstance(unit, FullyShardedDataParallel):
                continue
            shards[path] = {
                shard._name: {"_orig_size": shard._orig_size, "_orig_name": shard._orig_name}
                for shard in unit.sharded_params
            }
            if unit.flatten_parameters:
                for shard in unit.sharded_params:
                    names = [inner(name) for name in shard._members]
                    layout = shard._layout
                    flat[joined(path, shard._orig_name)] = names, layout.shapes, layout.numels
            prefix = original(f"{path}." if path else "")
            shared |= {
                prefix + k: [prefix + v for v in row] for k, row in unit._shared_names.items()
            }
        buffers = {
            name: {"_orig_dtype": buffer._orig_dtype}
            for name, buffer in self.named_buffers()
            if hasattr(buffer, "_orig_dtype")
        }
        return {
            "shard_info": shards,
            "flatten_info": flat,
            "buffer_info": buffers,
            "shared_info": shared,  # torch_xla has no such entry, and loses these names
            "world_size": self.world_size,
            "rank": self.rank,
        }


def _check(
    module: nn.Module,
    compute_dtype: torch.dtype | None,
    buffer_dtype: torch.dtype | None,
    debugging: dict[str, Any],
) -> None:
    if isinstance(module, FullyShardedDataParallel):
        raise RuntimeError(
            "Cannot wrap a module that is already wrapped with FSDP. For nested FSDP, first wrap the inner child "
            "modules before wrapping the outer parent module."
        )
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise RuntimeError(
            f"The module wrapped by FSDP *must define a `forward` method*; {type(module).__name__} has none."
        )
    for name, dtype in (("compute_dtype", compute_dtype), ("buffer_dtype", buffer_dtype)):
        if dtype is not None and dtype not in _FLOATS:
            raise ValueError(f"{name} must be one of {list(_FLOATS)}, not {dtype}")
    for name, value in debugging.items():
        if not name.startswith("_debug_dummy_"):
            raise TypeError(
                f"FullyShardedDataParallel.__init__() got an unexpected keyword argument '{name}'"
            )
        if value:
            raise NotImplementedError(
                f"{name} is not here: it replaces a collective by a false one"
            )


def _check_parameter(parameter: nn.Parameter, name: str) -> None:
    if hasattr(parameter, "_belongs_to_unit"):
        raise FullyShardedError(
            f"the parameter {name} is divided already, as part of a unit inside",
            got="one parameter in two units",
            next="wrap the modules that share it in one unit",
        )
    if not parameter.is_floating_point():
        raise FullyShardedError(
            f"the parameter {name} cannot be divided",
            got=str(parameter.dtype),
            next="register it as a buffer",
        )


def _whole_parameters(module: nn.Module) -> WholeParameters:
    if not isinstance(module._parameters, WholeParameters):
        module._parameters = WholeParameters(module._parameters)
    return module._parameters


def _lists(
    module: nn.Module, numbers: dict[nn.Parameter, int]
) -> list[tuple[nn.Module, str, list[int]]]:
    """Attributes that are lists of parameters, such as `_flat_weights` of an LSTM; they are emptied."""
    found = []
    for name, value in vars(module).items():
        if isinstance(value, list) and value and all(_is_in(item, numbers) for item in value):
            found.append((module, name, [numbers[item] for item in value]))
    for _, name, indices in found:
        vars(module)[name] = [None] * len(indices)
    return found


def _is_in(item: Any, numbers: dict[nn.Parameter, int]) -> bool:
    return isinstance(item, nn.Parameter) and item in numbers


def _is_whole(parameter: nn.Parameter) -> bool:
    return not is_shard(parameter)
