"""Meshes: the devices of a process in rows and columns, with a name for each axis."""

from __future__ import annotations

import ast
import math
import operator
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import ltc_core as ltc
from ltc_core import errors, metrics, source
from ltc_core.api import sharding
from ltc_core.api.sharding import Sharding

__all__ = [
    "HybridMesh",
    "Mesh",
    "get_1d_mesh",
    "get_global_mesh",
    "given_or_global",
    "num_devices",
    "set_global_mesh",
]


def num_devices() -> int:
    """Number of devices that a mesh has: those of the process with LTC_EXECUTOR=jax, else one."""
    return sharding.num_mesh_devices(ltc.lazy_device())


class Mesh:
    """Devices in an array of several axes.

    Args:
        device_ids: numbers of the devices, in row-major order: all of them, each once.
        mesh_shape: size of each axis.
        axis_names: a name for each axis.

    Raises:
        ShardingError: the numbers, sizes or names do not fit each other or the devices; `what` is torch_xla's text.

    Source: `torch_xla.distributed.spmd.Mesh`.
    """

    def __init__(
        self,
        device_ids: Iterable[Any],
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        ids = [int(number) for number in _flat(device_ids)]
        count = num_devices()
        fault = _fault_of(ids, count, tuple(mesh_shape), axis_names)
        if fault is not None:
            what, todo = fault
            raise errors.ShardingError(what, where=source.user_line(), next=todo)
        self._ids = tuple(ids)
        self.mesh_shape = tuple(int(n) for n in mesh_shape)
        self.axis_names = tuple(axis_names) if axis_names is not None else None
        self._shardings: dict[str, Sharding] = {}
        if count > 1:
            sharding.expect_mesh(ltc.lazy_device())

    @property
    def device_ids(self) -> Any:
        """Numbers of the devices, as an array of numpy."""
        return torch.tensor(self._ids).numpy()

    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh_shape)

    def shape(self) -> OrderedDict[Any, int]:
        """Size of each axis, by its name, or by its number where there are no names."""
        return OrderedDict(
            zip(self.axis_names or range(len(self.mesh_shape)), self.mesh_shape, strict=True)
        )

    def get_logical_mesh(self) -> Any:
        """Numbers of the devices in the shape of the mesh, as an array of numpy."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """Number of the axis of a name; None if there is none."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def sharding(self, partition_spec: Sequence[Any]) -> Sharding:
        """How `partition_spec` divides a tensor: for each dimension an axis, a tuple of axes, or None.

        Raises:
            ShardingError: there is no such axis, or an axis divides two dimensions.

        The counter `CreateOpSharding` counts those that are made: a mesh keeps them.
        """
        key = repr(tuple(partition_spec))  # an entry may be anything, and is checked below
        found = self._shardings.get(key)
        if found is None:
            found = self._shardings[key] = self._made_sharding(partition_spec)
            metrics.count("CreateOpSharding")
        return found

    def _made_sharding(self, partition_spec: Sequence[Any]) -> Sharding:
        spec = tuple(tuple(self._axis(axis) for axis in _listed(entry)) for entry in partition_spec)
        used = [axis for axes in spec for axis in axes]
        if len(used) != len(set(used)):
            raise errors.ShardingError(
                f"Each device mesh dimension should appear at most once in partition_spec {tuple(partition_spec)}.",
                where=source.user_line(),
                next="name each axis for one dimension; None leaves a dimension whole",
            )
        return Sharding(self._ids, self.mesh_shape, spec)

    def _axis(self, axis: Any) -> int:
        count = len(self.mesh_shape)
        if isinstance(axis, str):
            found = self.get_axis_name_idx(axis)
            if found is not None:
                return found
            what = f"Axis name {axis} is not defined in mesh axes {self.axis_names}"
        else:
            if hasattr(axis, "__index__") and 0 <= operator.index(axis) < count:
                return operator.index(axis)
            what = f"Axis {axis!r} is not one of the {count} of the mesh"
        raise errors.ShardingError(
            what,
            where=source.user_line(),
            next=f"use a number of range({count})"
            + (f", one of the names {self.axis_names}" if self.axis_names else "")
            + ", a tuple of them, or None",
        )

    def __str__(self) -> str:
        return str(
            {
                "device_ids": list(self._ids),
                "mesh_shape": self.mesh_shape,
                "axis_names": self.axis_names,
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash((self._ids, self.mesh_shape, self.axis_names))

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """The mesh that `str` has written; None if the text is none."""
        try:
            found = ast.literal_eval(mesh_str.replace("Mesh", ""))
            return cls(found["device_ids"], found["mesh_shape"], found["axis_names"])
        except (ValueError, SyntaxError, KeyError, TypeError):
            return None


def _fault_of(
    ids: Sequence[int], count: int, shape: tuple[int, ...], names: Sequence[str] | None
) -> tuple[str, str] | None:
    """What does not fit in a mesh, and what to do about it; None if all of it fits."""
    if len(ids) != count:
        return (
            f"Number of device IDs ({len(ids)}) must match the global number of devices ({count})",
            f"pass range({count}) and a shape of {count} devices; "
            f"LTC_EXECUTOR=jax LTC_NUM_DEVICES={len(ids)} makes {len(ids)} devices of a CPU",
        )
    if names is not None and len(shape) != len(names):
        return (
            f"Number of axis names ({len(names)}) must match mesh dimensions ({len(shape)})",
            f"pass one name for each axis of the shape {shape}",
        )
    if names is not None and len(set(names)) != len(names):
        return f"Axis names must be unique, got: {names}", "give each axis a name of its own"
    if len(ids) != math.prod(shape):
        return (
            f"Number of device IDs ({len(ids)}) must match mesh size ({math.prod(shape)})",
            f"pass a shape whose sizes multiply to {len(ids)}, not {shape}",
        )
    if max(ids) >= count:
        return (
            f"Device IDs must be less than mesh size ({count}), got: {ids}",
            f"pass each number of range({count}) once",
        )
    if sorted(ids) != list(range(count)):
        return (
            f"Device IDs must be unique, got: {ids}",
            f"pass each number of range({count}) once",
        )
    return None


class HybridMesh(Mesh):
    """A mesh over several groups of devices: quick connections within a group, slow ones between groups.

    Args:
        ici_mesh_shape: size of each axis within a group.
        dcn_mesh_shape: number of groups along each axis; one by default.
        axis_names: a name for each axis.

    The devices of a process are one group in the order of their numbers.

    Source: `torch_xla.distributed.spmd.HybridMesh`.
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        groups = tuple(dcn_mesh_shape or (1,) * len(ici_mesh_shape))
        if len(groups) != len(ici_mesh_shape):
            raise errors.ShardingError(
                "ici_mesh_shape and dcn_mesh_shape must have one length",
                got=f"{tuple(ici_mesh_shape)} and {groups}",
                where=source.user_line(),
                next="pass a size for each axis in both",
            )
        self.ici_mesh_shape, self.dcn_mesh_shape = tuple(ici_mesh_shape), groups
        shape = tuple(a * b for a, b in zip(ici_mesh_shape, groups, strict=True))
        # Axes in the order (group, within) for each dimension, then joined: neighbours are in one group.
        count = len(groups)
        ids = torch.arange(math.prod(shape)).reshape(*groups, *ici_mesh_shape)
        order = [axis for k in range(count) for axis in (k, count + k)]
        super().__init__(ids.permute(order).flatten().tolist(), shape, axis_names)


_global_mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh) -> None:
    """Set the mesh that is used where none is given."""
    global _global_mesh
    _global_mesh = mesh


def get_global_mesh() -> Mesh | None:
    """The mesh that is used where none is given, or None."""
    return _global_mesh


def given_or_global(name: str, mesh: Any) -> Mesh:
    """The mesh that a function was given, or else the global one.

    Raises:
        ShardingError: there is none, or it is no mesh; `name` is the function's.
    """
    found = _global_mesh if mesh is None else mesh
    if isinstance(found, Mesh):
        return found
    raise errors.ShardingError(
        f"{name} needs a mesh, and no global one is set"
        if found is None
        else f"{name} takes a Mesh as its mesh, not {type(found).__name__}",
        where=source.user_line(),
        next="pass mesh=Mesh(...), or call set_global_mesh before",
    )


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """A mesh of all devices with one axis."""
    count = num_devices()
    return Mesh(range(count), (count,), (axis_name,) if axis_name is not None else None)


def _flat(ids: Any) -> Iterable[Any]:
    if hasattr(ids, "flatten"):
        return ids.flatten().tolist()  # type: ignore[no-any-return]
    return ids  # type: ignore[no-any-return]


def _listed(entry: Any) -> Sequence[Any]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple | list) else (entry,)
