"""Meshes: the devices of a process in rows and columns, with a name for each axis."""

from __future__ import annotations

import ast
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import ltc_core as ltc
from ltc_core.api import sharding

__all__ = [
    "HybridMesh",
    "Mesh",
    "get_1d_mesh",
    "get_global_mesh",
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
        AssertionError: the numbers, sizes or names do not fit each other or the devices; the texts are torch_xla's.

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
        if len(ids) != count:
            raise AssertionError(
                f"Number of device IDs ({len(ids)}) must match the global number of devices ({count})"
            )
        if axis_names is not None and len(mesh_shape) != len(axis_names):
            raise AssertionError(
                f"Number of axis names ({len(axis_names)}) must match mesh dimensions ({len(mesh_shape)})"
            )
        if axis_names is not None and len(set(axis_names)) != len(axis_names):
            raise AssertionError(f"Axis names must be unique, got: {axis_names}")
        if len(ids) != math.prod(mesh_shape):
            raise AssertionError(
                f"Number of device IDs ({len(ids)}) must match mesh size ({math.prod(mesh_shape)})"
            )
        if sorted(ids) != list(range(count)):
            raise AssertionError(f"Device IDs must be unique, and less than {count}, got: {ids}")
        self._ids = tuple(ids)
        self.mesh_shape = tuple(int(n) for n in mesh_shape)
        self.axis_names = tuple(axis_names) if axis_names is not None else None

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

    def sharding(self, partition_spec: Sequence[Any]) -> sharding.Sharding:
        """How `partition_spec` divides a tensor: for each dimension an axis, a tuple of axes, or None.

        Raises:
            ValueError: there is no such axis.
            AssertionError: an axis divides two dimensions.
        """
        spec = tuple(tuple(self._axis(axis) for axis in _listed(entry)) for entry in partition_spec)
        used = [axis for axes in spec for axis in axes]
        if len(used) != len(set(used)):
            raise AssertionError(
                f"Each device mesh dimension should appear at most once in partition_spec {tuple(partition_spec)}."
            )
        return sharding.Sharding(self._ids, self.mesh_shape, spec)

    def _axis(self, axis: Any) -> int:
        if isinstance(axis, str):
            found = self.get_axis_name_idx(axis)
            if found is None:
                raise ValueError(f"Axis name {axis} is not defined in mesh axes {self.axis_names}")
            return found
        if not 0 <= int(axis) < len(self.mesh_shape):
            raise ValueError(f"Axis {axis} is not one of the {len(self.mesh_shape)} of the mesh")
        return int(axis)

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
            raise AssertionError("ici_mesh_shape and dcn_mesh_shape must have one length")
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
