"""torch.distributed on tensors of the device: `init_process_group()`, `dist.all_reduce(t)`, DTensor, DDP.

For scripts that use torch.distributed. A call waits for its tensors, gloo works on CPU copies of them, and its
results are copied to the device: such a call cuts the graph. The collectives of divided tensors (FSDP2,
DTensor) are recorded in the graph instead, in jobs of `ltc_dist` (`record`), as `ltc_dist.optimizer_step` does. The
schemas of c10d's ops do not mark the arguments that they write: without the rules here they would write copies.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ltc_core import errors, source
from ltc_core.api.verbs import is_lazy_tensor, to_cpu
from ltc_core.graph.collective import plan_text
from ltc_core.ops.composites import RULE_MAKERS
from ltc_core.runtime.collective_tokens import hand_over
from ltc_core.runtime.devices import upload_all
from ltc_core.settings import settings

__all__ = ["begin", "derived_methods", "hand_over_before_calls", "record", "register"]

dist: Any = torch.distributed  # its stubs lack what is used here
_c10d: Any = getattr(torch._C, "_distributed_c10d", None)  # some builds are without

Rule = Callable[..., Any]

# Ops of c10d that write their first argument.
_WRITE_THEIR_FIRST = frozenset(
    {
        "_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "allreduce_",
        "allreduce_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "broadcast_",
        "gather_",
        "reduce_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
        "scatter_",
    }
)
# Op -> its arguments whose sizes and dtypes are the same in all members of the group: those of one member alone may be
# empty elsewhere, and parts may have any sizes.
_ALIKE = {
    "_allgather_base_": "input_tensor",
    "_reduce_scatter_base_": "output_tensor",
    "allgather_": "input_tensors",
    "allgather_coalesced_": "input_list",
    "allgather_into_tensor_coalesced_": "inputs",
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "alltoall_": "",
    "alltoall_base_": "",
    "barrier": "",
    "broadcast_": "tensors",
    "gather_": "input_tensors",
    "reduce_": "tensors",
    "reduce_scatter_": "output_tensors",
    "reduce_scatter_tensor_coalesced_": "outputs",
    "scatter_": "output_tensors",
}
# Methods of a process group that reduce. The ops have the reduction in an object that Python cannot read.
_REDUCE = (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    "reduce_scatter_tensor_coalesced",
)
# The arguments of functional ops that are the same in all members.
_TOLD = frozenset({"reduce_op", "src"})
_WRITE_NOTHING = frozenset({"barrier", "monitored_barrier_"})
_RECEIVE = frozenset({"recv_", "recv_any_source_"})
# Functional ops that are complete, and may have written their operands, only after `wait_tensor` on their results.
_ONE_TO_ONE = frozenset({"batch_p2p_ops", "irecv", "isend"})


def _not_compared(group: Any, plan: str, has_root: bool) -> Callable[[Any], None] | None:
    return None


# Called before a collective of a group, to compare it with those of the other processes; returns what waits for its
# work, None for PyTorch's own wait. `ltc_dist` sets it, because only it knows the job's store.
begin: Callable[[Any, str, bool], Callable[[Any], None] | None] = _not_compared


def _not_recorded(group: Any, name: str, args: Any, reduction: str) -> Any | None:
    return None


# Called first: records a collective in the graph, from its group, op, arguments and reduction, and returns its result;
# None if it is to run now. `ltc_dist` sets it, because only it connects the processes of graphs.
record: Callable[[Any, str, Any, str], Any | None] = _not_recorded


def register() -> None:
    """Make groups that are created from now on accept tensors of the device."""
    if not dist.is_available():
        return
    name = settings.device_name
    dist.Backend.default_device_backend_map.setdefault(name, "gloo")
    devices = dist.Backend.backend_capability["gloo"]
    if name not in devices:
        devices.append(name)
    RULE_MAKERS["c10d"] = _rule
    RULE_MAKERS["_c10d_functional"] = RULE_MAKERS["_dtensor"] = _functional_rule
    dist.ProcessGroup.barrier = _on_current_device(dist.ProcessGroup.barrier)
    for reduce in _REDUCE:
        method = getattr(dist.ProcessGroup, reduce, None)
        if method is not None:  # not all are in every torch
            setattr(dist.ProcessGroup, reduce, _telling(method))
    config = dist.distributed_c10d.BackendConfig
    config.__init__ = _with_processor(config.__init__)


def _with_processor(init: Callable[..., None]) -> Callable[..., None]:
    """Have gloo serve the processor's tensors, too, where a script names no backend: PyTorch asks for the device's."""

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        backends = self.device_backend_map
        if list(backends) == [settings.device_name]:
            backends["cpu"] = backends[settings.device_name]

    return call


def _on_current_device(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """`barrier(device_ids=[local_rank])` names a device for each process of the host; here each has one of its own."""

    @functools.wraps(barrier)
    def call(*args: Any, opts: Any = None, **kwargs: Any) -> Any:
        if opts is None:
            return barrier(*args, **kwargs)
        if opts.device is not None and opts.device.type == settings.device_name:
            opts.device = torch.device(settings.device_name)
        return barrier(*args, opts=opts, **kwargs)

    return call


class _Reduction(threading.local):
    """The reduction of the call of torch.distributed that this thread is in, as text."""

    name = ""


_reduction = _Reduction()


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a process group that notes its reduction for the plan of the collective."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        of = next((o for o in (*args, *kwargs.values()) if hasattr(o, "reduceOp")), None)
        if of is None:
            return method(*args, **kwargs)
        _reduction.name = f" {of.reduceOp.op.name.lower()}"
        try:
            return method(*args, **kwargs)
        finally:
            _reduction.name = ""

    return call


# Methods of a process group that wait for other processes: the Python names of c10d's ops.
_CALLS = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "barrier", "broadcast", "gather"),
    *("monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)


@functools.cache
def hand_over_before_calls() -> None:
    """Hand over the graph's collectives before each call of torch.distributed from now on, unless it is recorded, too.

    The other processes may wait for these before they come to the barrier or to the exchange of objects.
    """
    for name in _CALLS:
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:  # not all are in every torch
            setattr(dist.ProcessGroup, name, _after_handing_over(method))


# Method -> its second name, which newer versions have.
_NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}


def derived_methods() -> dict[str, Callable[..., Any]]:
    """The methods that wait for other processes, for a class derived in Python from PyTorch's process group.

    PyTorch's C++ looks such a class through for methods that replace its own, and would find the wrappers of this file.
    It takes a method for its own if the frame that calls it has its name. Of two names of a method one is left to it.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in _CALLS:
        method = getattr(dist.ProcessGroup, name, None)
        if method is None:
            continue
        made = inspect.unwrap(method)
        if name in _NEW_NAMES and hasattr(dist.ProcessGroup, _NEW_NAMES[name]):
            found[name] = made
            continue
        made = _named(name, made)
        if name in _REDUCE:
            made = _telling(made)
        elif name == "barrier":
            made = _on_current_device(made)
        found[name] = _after_handing_over(made)
    return found


def _named(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


def _after_handing_over(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_lazy(args):  # the rule of its op hands over what it does not record
            hand_over()
        return method(*args, **kwargs)

    return call


def _has_lazy(given: Any) -> bool:
    """Whether a tensor of the device is among arguments, or in lists of them."""
    if isinstance(given, list | tuple):
        return any(map(_has_lazy, given))
    return is_lazy_tensor(given)


def _rule(op: Any) -> Rule:
    """The rule that runs an op of c10d."""
    name = op._opname
    names = [argument.name for argument in op._schema.arguments]
    if name in _RECEIVE:
        finish: Callable[..., Any] = _receiving
    elif name == "send":
        finish = _sending
    elif name in _WRITE_THEIR_FIRST or name in _WRITE_NOTHING:
        finish = _waiting
    else:
        return _refusal(op)
    at = names.index("process_group")
    plan = _plan_maker(name, names)

    def call(*args: Any, **kwargs: Any) -> Any:
        group = dist.ProcessGroup.unbox(args[at])
        recorded = record(group, name, args, _reduction.name.strip())
        if recorded is not None:
            return recorded, _done(recorded)
        _serve_cpu(group)
        hand_over()
        copies = _copies(args)
        wait = begin(group, plan(copies), "root_rank" in names) if name in _ALIKE else None
        result = op(*copies, **kwargs)
        return finish(result, args[0], copies[0], name in _WRITE_THEIR_FIRST, wait)

    return call


def _plan_maker(name: str, names: list[str]) -> Callable[[Any], str]:
    """What makes the text of a collective from its arguments; the same in all members of the group."""
    alike = names.index(_ALIKE[name]) if _ALIKE.get(name) else None
    root = names.index("root_rank") if "root_rank" in names else None
    what = f"torch.distributed's {name.strip('_')}"

    def plan(args: Any) -> str:
        reduced = f"{what}{_reduction.name}"
        rooted = reduced if root is None else f"{reduced} with root {args[root]}"
        if alike is None:
            return rooted
        return plan_text(f"{rooted} of", pytree.tree_leaves(args[alike]))

    return plan


def _copies(args: Any) -> Any:
    """Copies on the CPU, as gloo wants them: contiguous."""
    return pytree.tree_map(
        lambda t: t.contiguous() if isinstance(t, torch.Tensor) else t, to_cpu(args)
    )


# -- what comes after an op of c10d: its result, its first argument, the copy of that, whether the op wrote it, how to
#    wait for it ------------------------------------------------------------------------------------------------------


# Finished work. Where gloo's thread has the last reference, it frees the work's tensors under the lock of its queue,
# and needs the interpreter for that; `all_to_all_single` of PyTorch 2.13 has it while it waits for that lock.
_kept: deque[Any] = deque(maxlen=4)


def _waiting(result: Any, first: Any, copy: Any, is_written: bool, wait: Any) -> Any:
    """Wait and copy back the written tensors; the same result with finished work, whose tensors are the caller's."""
    work = result[-1] if isinstance(result, tuple) else result
    if work is None:  # monitored_barrier
        return None
    work = dist.Work.unbox(work)
    if wait is None:
        work.wait()
    else:
        wait(work)
    _kept.append(work)
    if is_written:
        _bring_back(first, copy)
    return (first, _done(first)) if isinstance(result, tuple) else _done(first)


def _done(written: Any) -> Any:
    """Finished work, for a caller that waits for what was written."""
    done: Any = torch.futures.Future()
    done.set_result(pytree.tree_leaves(written))
    return _c10d._create_work_from_future(done).boxed()


def _sending(work: Any, first: Any, copy: Any, is_written: bool, wait: Any) -> Any:
    return work  # it holds the copies


def _receiving(work: Any, first: Any, copy: Any, is_written: bool, wait: Any) -> Any:
    return _Receiving(dist.Work.unbox(work), first, copy).boxed()


class _Receiving(getattr(dist, "Work", object)):  # type: ignore[misc]
    """A pending receive: a process may send before it waits for what it receives."""

    # c10d calls methods of this object later, so it must be kept.
    _not_waited_for: set[_Receiving] = set()

    def __init__(self, work: Any, first: Any, copy: Any) -> None:
        super().__init__()
        self._work = work
        self._first = first
        self._copy = copy
        self._is_done = False
        self._not_waited_for.add(self)

    def wait(self, timeout: Any = None) -> bool:
        if not self._is_done:  # waiting again would wait for the next message
            self._work.wait(*(() if timeout is None else (timeout,)))
            self._is_done = True
            _bring_back(self._first, self._copy)
            self._first = self._copy = None
            self._not_waited_for.discard(self)
        return True

    def is_completed(self) -> bool:
        return self._is_done or (self._work.is_completed() and self.wait())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


def _serve_cpu(group: Any) -> None:
    """Make a group that was created for the device alone accept CPU tensors too."""
    cpu, device = torch.device("cpu"), torch.device(settings.device_name)
    if cpu in group._device_types:
        return
    if device not in group._device_types:
        raise errors.CollectiveError(
            f"the process group {_name_of(group)}has no backend for tensors of {device.type}",
            got=f"backends for {errors.listed(sorted(d.type for d in group._device_types)) or 'no device'}",
            where=source.user_line(),
            next=f"init_process_group('cpu:gloo,{device.type}:gloo'), or without a backend",
        )
    group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, group._get_backend(device))


def _name_of(group: Any) -> str:
    """The name and a space; '' for a group that `new_group` and `init_process_group` have not made."""
    try:
        return f"{group.group_name} "
    except RuntimeError:  # it has none
        return ""


def _bring_back(there: Any, here: Any) -> None:
    if isinstance(there, torch.Tensor):
        if is_lazy_tensor(there):
            there.detach().copy_(here)
        return
    for one, other in zip(there, here, strict=True):
        _bring_back(one, other)


# -- functional collectives ----------------------------------------------------------------------


# What has not been waited for -> the copy on the CPU that is sent or received.
_under_way: Any = WeakTensorKeyDictionary()


def _functional_rule(op: Any) -> Rule:
    """The rule that runs a functional collective, whose group is an argument and whose results are tensors."""
    name = op._opname
    if name == "wait_tensor":
        return _wait_tensor
    if name == "_wrap_tensor_autograd":
        # Its module takes 50 ms to import; where the op exists, it is imported already.
        return sys.modules["torch.distributed._functional_collectives"].AsyncCollectiveTensor  # type: ignore[no-any-return]
    names = [argument.name for argument in op._schema.arguments]
    if "group_name" not in names:
        return _refusal(op)
    at = names.index("group_name")
    plan = _functional_plan_maker(name, names)
    writes = [
        a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]

    def call(*args: Any, **kwargs: Any) -> Any:
        group = _group_named(args[at])
        recorded = None if kwargs else record(group, name, args, "")
        if recorded is not None:
            return recorded
        _serve_cpu(group)
        hand_over()
        copies, named = _copies(args), _copies(kwargs)
        if name not in _ONE_TO_ONE:
            begin(group, plan(copies), True)  # these ops wait by themselves
        result = op(*copies, **named)
        if name in _ONE_TO_ONE:
            given = pytree.tree_leaves(args)
            for original, copy in zip(given, pytree.tree_leaves(copies), strict=True):
                if is_lazy_tensor(original):
                    _under_way[original] = copy
            return args[names.index("tensors" if "tensors" in names else "tensor")]
        result = pytree.tree_map(torch.ops._c10d_functional.wait_tensor, result)
        if writes:
            written = kwargs["out"] if "out" in writes else args[0]
            _bring_back(written, result)
            return written
        return _uploaded(result, args)

    return call


def _functional_plan_maker(name: str, names: list[str]) -> Callable[[Any], str]:
    alike = next((names.index(n) for n in ("input", "inputs", "self") if n in names), None)
    what = f"torch.distributed's functional {name}"

    def plan(args: Any) -> str:
        if alike is None or "all_to_all" in name or "alltoall" in name:
            return what
        told = " ".join(str(a) for n, a in zip(names, args, strict=False) if n in _TOLD)
        return plan_text(f"{what} {told} of", pytree.tree_leaves(args[alike]))

    return plan


def _uploaded(result: Any, args: Any) -> Any:
    index = next(t.device.index for t in pytree.tree_leaves(args) if is_lazy_tensor(t))
    return (
        upload_all([result], index)[0]
        if isinstance(result, torch.Tensor)
        else upload_all(result, index)
    )


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    copy = _under_way.pop(tensor, None)
    if copy is not None:
        torch.ops._c10d_functional.wait_tensor(copy)
        _bring_back(tensor, copy)
    return tensor


def _group_named(name: Any) -> Any:
    if isinstance(name, str):
        return dist.distributed_c10d._resolve_process_group(name)
    return name if isinstance(name, dist.ProcessGroup) else dist.ProcessGroup.unbox(name)


def _refusal(op: Any) -> Rule:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise errors.UnsupportedOpError(
            f"{op} has no rule on device {settings.device_name}",
            got=str(op._schema)[:200],
            where=source.user_line(),
            next="call it on a copy on the CPU: t.cpu()",
        )

    return refuse
