"""A subgraph as one program of XLA, compiled by JAX before its first run.

The memory of donated inputs is reused for the outputs that the plan names: JAX pairs donated inputs and outputs of
equal type in order, so both are passed in the plan's order. Each output has a buffer of its own. Used by `device`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import torch
from jax.sharding import SingleDeviceSharding

from ltc_core import metrics
from ltc_core.errors import CollectiveError, first_line
from ltc_core.executors.device_program import Apart, Cost, IndexOutOfRange, Interrupted, Launch
from ltc_core.executors.jax.cache import ProgramsOnDisk
from ltc_core.executors.jax.collectives import Collectives, Joint
from ltc_core.executors.jax.library import owners_of, wide_types, without_greeting
from ltc_core.executors.jax.lowering import function_of
from ltc_core.executors.jax.manual import layout
from ltc_core.executors.jax.mesh import DeviceMesh, checksum, is_divided, with_names
from ltc_core.executors.jax.precision import precision
from ltc_core.executors.jax.table import dtype_of
from ltc_core.graph import manual_sharding
from ltc_core.graph.ir import TensorMeta
from ltc_core.graph.sharding import SHARD
from ltc_core.program.index_checks import find_bounds, is_in_bounds
from ltc_core.program.plan import plan
from ltc_core.program.scalar_inputs import vector_metas
from ltc_core.program.subgraph import Subgraph

__all__ = ["OPTIONS", "JaxLaunch"]

# As eager: nan is kept in minima and maxima, and each op rounds its result to bfloat16.
OPTIONS = {"cpu": {"xla_cpu_enable_fast_min_max": False, "xla_allow_excess_precision": False}}

_OF_MESH = frozenset({SHARD, *manual_sharding.OPS})


class JaxLaunch(Launch):
    """The program of a subgraph.

    Args:
        subgraph: the subgraph.
        device: JAX's device.
        on_disk: the programs of this device that earlier processes have compiled.
        shown: shows data of the device as tensors, to check indices before a run, or the parts that this process has;
            None if that costs a transfer. Then indices are not checked, and moved into their range.
        mesh: all devices. The program is one of all of them if an input is divided, or if a node divides its result.
        divided: for each input how it is divided; None for one that is not.
        manual: numbers of the inputs that are manual tensors.
        collectives: makes it one program of all processes, because nodes are collectives. It is compiled at its first
            run, once all processes are known to have it.

    Attributes:
        divided: as given.

    Raises:
        Refused: a node has no rule.
        Misused: a manual tensor cannot be used so.
        RuntimeError: XLA cannot compile the program.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        device: Any,
        on_disk: ProgramsOnDisk,
        shown: Callable[[Any], torch.Tensor] | None,
        mesh: DeviceMesh,
        divided: Sequence[Any],
        manual: frozenset[int] = frozenset(),
        collectives: Collectives | None = None,
    ) -> None:
        super().__init__(subgraph)
        graph = subgraph.graph
        bounds, unknown = ([], set()) if shown is None else find_bounds(graph, has_draws=True)
        self._shown = shown
        self._bounds = bounds
        checked = sorted(unknown)
        self._nodes = [graph.nodes[at] for at in checked]
        self._count = len(graph.outputs)
        reused = {i: output for output, i in plan(graph).reuses.items()}
        self._order = _order(subgraph, reused)
        self._results = _results(graph.outputs, reused, self._order, list(graph.inputs))
        run = function_of(subgraph, checked, collectives, manual)
        inverse = _inverse(self._order)

        def ordered(*inputs: Any) -> list[Any]:
            found = run(*(inputs[k] for k in inverse))
            return [found[k] for k in self._results] + found[self._count :]

        metas = [*graph.inputs.values(), *vector_metas(subgraph.scalar_types)]
        self._mesh = None
        self._has_manual = False
        self._collectives = collectives
        self._program: Any = None
        self._is_agreed = True  # whether all processes have it
        self._lower: Callable[[], Any]
        self.divided = tuple(divided)
        if collectives is not None:
            self._lower_joint(subgraph, collectives, ordered, metas, len(reused), bool(checked))
            options = OPTIONS.get(device.platform, {})
            self._compile_joint = partial(self._of_disk_or_compiled, on_disk, collectives, options)
            return
        of_devices = manual_sharding.manual_values(graph, manual)
        self._has_manual = bool(of_devices)
        if any(divided) or any(node.op in _OF_MESH for node in graph.nodes):
            self._mesh = mesh
            mesh.is_used = True
        alone = SingleDeviceSharding(device) if self._mesh is None else mesh.whole
        lies = [divided[k] or alone for k in self._order]
        by_device = (len(mesh.devices),)  # the first dimension of manual tensors
        numbers = [*graph.inputs, *(None for _ in vector_metas(subgraph.scalar_types))]
        sizes = [
            (by_device if numbers[k] in manual else ()) + tuple(metas[k].size) for k in self._order
        ]
        given = [
            jax.ShapeDtypeStruct(size, dtype_of(metas[k].dtype), sharding=at)
            for k, size, at in zip(self._order, sizes, lies, strict=True)
        ]
        has_flags = bool(checked)
        num_outputs = self._count + has_flags
        are_manual = [graph.outputs[k] in of_devices for k in self._results]
        # Memory is reused by an output that lies as it does. XLA chooses how the other outputs of a mesh lie.
        donated = [
            k
            for k in range(len(reused))
            if self._mesh is None
            or (divided[self._order[k]] and are_manual[k] == (numbers[self._order[k]] in manual))
        ]
        lie: list[Any] = [lies[k] if k in set(donated) else None for k in range(self._count)]
        if self._has_manual:
            lie = [layout() if own else at for own, at in zip(are_manual, lie, strict=True)]
        lie += [alone] * has_flags  # each process reads them
        placed = ""
        if self._mesh is not None:
            placed = mesh.text_of(lies, list(map(len, sizes)))
        about = f"{subgraph.text()} {checked} {placed} {precision()}"
        key = on_disk.key(about)
        is_of_job = self._mesh is not None and mesh.is_of_job
        self._where = next((node.line for node in graph.nodes if node.line), "")
        self._what = f"a program of {len(graph.nodes)} ops, {zlib.crc32(about.encode()):08x}"
        self._is_agreed = not is_of_job
        how = {} if self._mesh is None else {"out_shardings": lie}
        traced = jax.jit(ordered, donate_argnums=donated, keep_unused=True, **how)
        self._lower = partial(traced.lower, *given)
        with wide_types():
            devices = () if self._mesh is None else self._mesh.devices
            self._program = on_disk.load(key, len(given), num_outputs, devices)
            if self._program is None:
                self._program = self._lower().compile(OPTIONS.get(device.platform, {}))
                on_disk.store(key, self._program)

    def hlo(self) -> str:
        with wide_types():
            return str(self._lower().as_text())

    @property
    def compiled(self) -> Any:
        """JAX's compiled program; None if it spans processes and has not run yet."""
        return self._program

    def cost(self) -> Cost | None:
        if self._program is None:
            return None
        work = self._program.cost_analysis() or {}
        memory = self._program.memory_analysis()
        temporary = 0 if memory is None else memory.temp_size_in_bytes
        return Cost(work.get("flops", 0.0), work.get("bytes accessed", 0.0), temporary)

    def _lower_joint(
        self,
        subgraph: Subgraph,
        collectives: Collectives,
        ordered: Callable[..., list[Any]],
        metas: Sequence[TensorMeta],
        num_reused: int,
        has_flags: bool,
    ) -> None:
        """Trace the program of all processes."""
        sizes = [tuple(metas[k].size) for k in self._order]
        of_values = subgraph.graph.metas()
        outputs = [of_values[subgraph.graph.outputs[k]] for k in self._results]
        ranks = [len(meta.size) for meta in outputs] + [1] * has_flags
        given = [
            collectives.described(size, dtype_of(metas[k].dtype))
            for k, size in zip(self._order, sizes, strict=True)
        ]
        # A value without dimensions is passed as a vector, whose memory its new value does not take.
        donated = [k for k in range(num_reused) if sizes[k]]
        with wide_types():
            spanning = collectives.spanning(ordered, sizes, ranks)
            traced = jax.jit(spanning, donate_argnums=donated, keep_unused=True)
            lowered = traced.lower(*given)
            self._lower = lambda: lowered
            self._joint = Joint(subgraph, lowered.as_text())

    def _of_disk_or_compiled(
        self, on_disk: ProgramsOnDisk, collectives: Collectives, options: Mapping[str, Any]
    ) -> Any:
        """The program of all processes, as all of them have it on disk, or compiled in all of them.

        XLA may compile a program of a GPU in turns, which takes all processes.
        """
        key = on_disk.key(f"{owners_of(collectives.devices)} {self._joint.digest.hex()}")
        num_outputs = len(self._lower().out_info)
        program = on_disk.load(key, len(self._order), num_outputs, collectives.devices)
        if self._joint.do_all(program is not None):
            return program
        program = self._lower().compile(options)
        on_disk.store(key, program)
        return program

    def _run_joint(self, collectives: Collectives, inputs: Sequence[Any]) -> list[Any]:
        """Results of the program of all processes."""
        if collectives.is_off:  # since this program was made
            raise Apart
        same_collectives, same_program = self._joint.agree()
        if not same_collectives:
            collectives.turn_off()
        elif not same_program:
            collectives.note_unlike(self._joint.where)
        if not same_program:
            metrics.count("ProgramsDiffer")
            raise Apart
        if self._program is None:
            with wide_types():
                self._program = self._compile_joint()
        metrics.count("JointRun")
        try:
            with wide_types():
                wholes = [collectives.whole(inputs[k]) for k in self._order]
            found = [whole.addressable_data(0) for whole in self._program(*wholes)]
            if collectives.is_cpu:
                jax.block_until_ready(found)
        except (RuntimeError, ValueError) as error:
            failure = CollectiveError(
                "a program with collectives did not run to its end",
                got=first_line(error),
                next="see which process ended first, and why",
            )
            failure.__cause__ = error
            raise Interrupted from failure
        return found

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        if self._bounds:
            self._check(inputs)
        is_first, self._is_agreed = not self._is_agreed, True
        if self._mesh is not None and self._mesh.is_of_job:
            what = self._what
            if is_first:
                own = checksum(data for data in inputs if not is_divided(data))
                what = f"{what}, on undivided data of checksum {own:08x}"
            self._mesh.agree(what, self._where, is_first)
        if self._mesh is not None:
            with wide_types():
                inputs = [self._mesh.spread(data) for data in inputs]
        if self._collectives is not None:
            found = self._run_joint(self._collectives, inputs)
        elif self._mesh is not None and self._mesh.is_of_job:
            self._mesh.wait()
            # gloo greets where the program connects devices for the first time.
            with without_greeting() if is_first else contextlib.nullcontext():
                found = self._program(*(inputs[k] for k in self._order))
                self._mesh.launched(found, self._what, self._where)
                if is_first:
                    self._mesh.wait()
        else:
            found = self._program(*(inputs[k] for k in self._order))
        if self._nodes:
            for node, is_bad in zip(self._nodes, found[self._count].tolist(), strict=True):
                if is_bad:
                    raise IndexError(f"index out of range in {node.op}")
        results: list[Any] = [None] * self._count
        for place, k in enumerate(self._results):
            results[k] = found[place] if self._mesh is None else with_names(found[place])
        return results

    def _check(self, inputs: Sequence[Any]) -> None:
        """Check the indices among the inputs. A process checks its own parts of divided data.

        Raises:
            IndexOutOfRange: one is out of range.
        """
        assert self._shown is not None
        for bound in self._bounds:
            if is_in_bounds(bound, self._shown(inputs[bound.value])):
                continue
            if not self._has_manual and (self._mesh is None or not self._mesh.is_of_job):
                raise IndexOutOfRange
            raise IndexOutOfRange(
                IndexError(
                    f"index out of range: an operand of {self._what} has an index that is not from {bound.low} to "
                    f"{bound.high}{self._where and f' (its first op was recorded at {self._where})'}"
                )
            )


def _order(subgraph: Subgraph, reused: dict[int, int]) -> list[int]:
    """Positions of the inputs, then of the vectors of scalars, as they are passed: the reused ones first."""
    numbers = list(subgraph.graph.inputs)
    count = len(numbers) + len(vector_metas(subgraph.scalar_types))
    first = [k for k, number in enumerate(numbers) if number in reused]
    return [*first, *(k for k in range(count) if k not in set(first))]


def _results(
    outputs: Sequence[int], reused: dict[int, int], order: Sequence[int], numbers: Sequence[int]
) -> list[int]:
    """Positions of the outputs as they are returned: first those that overwrite an input, in the inputs' order."""
    place = {value: k for k, value in enumerate(outputs)}
    first = [place[reused[numbers[k]]] for k in order[: len(reused)]]
    return [*first, *(k for k in range(len(outputs)) if k not in set(first))]


def _inverse(order: Sequence[int]) -> list[int]:
    found = [0] * len(order)
    for place, k in enumerate(order):
        found[k] = place
    return found
